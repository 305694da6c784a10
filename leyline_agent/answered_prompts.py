"""Answered prompts, found again by the messages of a later one: the same from the first on, and then the answer.

Owns the index. Knows nothing of what is found by it, and is not locked: its owner is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Generic, TypeVar

from leyline_agent.core.messages import Message
from leyline_agent.digests import AnswerDigest

MAX_VANISHED = 3
"""How many messages at the end of a prompt (a reminder, a clock) may be gone when its answer follows."""

T = TypeVar("T")


class AnsweredPrompts(Generic[T]):
    """What stands at points of prompts, by the points, by what was answered there, and by a key of its own."""

    def __init__(self) -> None:
        self._at: dict[bytes, dict[str, dict[str, tuple[AnswerDigest, T]]]] = {}

    def add(self, points: Sequence[bytes], answer: AnswerDigest, key: str, value: T) -> None:
        """Have a value found at each of these points; a key is one value's."""
        for point in points:
            self._at.setdefault(point, {}).setdefault(answer.said, {})[key] = answer, value

    def remove(self, points: Sequence[bytes], answer: AnswerDigest, key: str) -> None:
        """Have what was added be found no more, if it still is."""
        for point in points:
            answers = self._at.get(point, {})
            there = answers.get(answer.said, {})
            there.pop(key, None)
            if not there:
                answers.pop(answer.said, None)
            if not answers:
                self._at.pop(point, None)

    def find(self, points: Sequence[bytes], messages: Sequence[Message]) -> T | None:
        """Return the value that messages go on from with most of them, the last added; `points` are theirs."""
        for idx in range(len(messages) - 1, 0, -1):
            answers = self._at.get(points[idx])
            if answers is None:
                continue
            for answer, value in reversed(answers.get(AnswerDigest.of(messages[idx]).said, {}).values()):
                if answer.matches(messages[idx]):
                    return value
        return None


def prompt_points(digests: Sequence[str], seed: bytes = b"") -> list[bytes]:
    """Return for each number of messages, from 0 on, what stands for that many of them, and for whose they are."""
    points = [seed]
    for digest in digests:
        points.append(hashlib.sha256(points[-1] + digest.encode()).digest())
    return points
