"""How long the server said that a conversation's prompts were, found again in every later history that has them.

The exact size of a prompt costs nothing: each answer says it. What it is the size of is the request that was answered,
so it is remembered by what that request and its answer were, and a policy that is replayed over the history meets it
where it belongs. Keeps no text. Knows nothing of HTTP or policies.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from leyline_agent.core.messages import Message
from leyline_agent.digests import AnswerDigest


class ServerCounts:
    """Sizes of answered prompts, answer included. Any number of threads may use it.

    What was once asked for without an answer being known stays unknown: rules have decided by the estimate meanwhile,
    and an edit once made stays made.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int | None] = {}
        # Of the last list that was asked about, since the next one mostly goes on from it.
        self._raws: list[Mapping[str, Any]] = []
        self._digests: list[str] = []
        self._sizes: dict[int, int] = {}

    def add(self, digests: Sequence[str], answer: AnswerDigest, tokens: int) -> None:
        """Remember how long a prompt and its answer were; `digests` are those of its messages, unedited."""
        with self._lock:
            self._counts.setdefault(_key(hashlib.sha256("".join(digests).encode()), answer), tokens)

    def sizes(self, messages: Sequence[Message]) -> dict[int, int]:
        """Return the known sizes of a history's prompts, by how many of its messages they are, answer included."""
        with self._lock:
            raws = [message.raw for message in messages]
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._raws, raws, strict=False)))
            digests = self._digests[:same]
            sizes = {num: size for num, size in self._sizes.items() if num <= same}
            prefix = hashlib.sha256("".join(digests).encode())
            for idx in range(same, len(messages)):
                message = messages[idx]
                if message.role == "assistant":
                    count = self._counts.setdefault(_key(prefix, AnswerDigest.of(message)), None)
                    if count is not None:
                        sizes[idx + 1] = count
                digests.append(message.digest())
                prefix.update(digests[-1].encode())
            self._raws, self._digests, self._sizes = raws, digests, sizes
            return dict(sizes)


def _key(prefix: hashlib._Hash, answer: AnswerDigest) -> str:
    return prefix.hexdigest() + answer.said
