"""The shape of a conversation: which result answers which call, and how old each message is.

Everything here is found by one pass from the left, so that messages that are appended later never change what was
found before them. That is what makes an edit, once made, stay made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leyline_agent.core.messages import Message


@dataclass(slots=True, eq=False)
class Call:
    """One tool call and the messages that answer it; none while it waits for its result."""

    message_idx: int
    id: str | None
    name: str
    arguments: str
    result_idxs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shape:
    """What `read_shape` found. Indices are those of the message list."""

    ages: tuple[int, ...]
    """Of each message: how many turns begin after it. An assistant message begins a turn."""
    calls: Mapping[int, tuple[Call, ...]]
    """Of each assistant message that calls tools: its calls, in order."""
    call_of: Mapping[int, Call]
    """Of each tool message: the call that it answers. A result without a call is absent."""
    opening: frozenset[int]
    """The user messages that set the task: those before the first turn, and the first one wherever it stands."""


def read_shape(messages: Sequence[Message]) -> Shape:
    """Read turns, calls and results off a message list."""
    calls, call_of = _pair(messages)
    ages = [0] * len(messages)
    later_turns = 0
    for idx in range(len(messages) - 1, -1, -1):
        ages[idx] = later_turns
        later_turns += messages[idx].role == "assistant"
    users = [idx for idx, message in enumerate(messages) if message.role == "user"]
    opening = frozenset(idx for idx in users if idx == users[0] or ages[idx] == later_turns)
    return Shape(tuple(ages), calls, call_of, opening)


def num_chars(message: Message) -> int:
    """Count the characters of a message's text and of its calls' names and arguments."""
    return len(message.text) + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


class Pairing:
    """Finds the call that a result answers, message by message from the left.

    Ids repeat in what clients send, so the nearest unanswered call goes first. Where either side lacks its id the
    order decides. A second result for an answered call stays with it, else it would be left over when the call goes.
    """

    def __init__(self) -> None:
        self._current: Sequence[Call] = ()
        self._waiting: dict[str, list[Call]] = defaultdict(list)
        self._latest: dict[str, Call] = {}

    def call(self, calls: Sequence[Call]) -> None:
        """Take note of the calls of the next assistant message."""
        self._current = calls
        for call in calls:
            if call.id is not None:
                self._waiting[call.id].append(call)
                self._latest[call.id] = call

    def answer(self, call_id: str | None, result_idx: int) -> Call | None:
        """Take the next result; return the call that it answers, None where there is none."""
        found = self._find(call_id)
        if found is None:
            return None
        if found.id is not None and found in self._waiting[found.id]:
            self._waiting[found.id].remove(found)
        found.result_idxs.append(result_idx)
        return found

    def _find(self, call_id: str | None) -> Call | None:
        if call_id is not None:
            # So it is with nearly every result.
            for call in self._current:
                if call.id == call_id and not call.result_idxs:
                    return call
        unanswered = [call for call in self._current if not call.result_idxs]
        if call_id is None:
            return next(iter(unanswered), self._current[-1] if self._current else None)
        found = self._waiting[call_id][-1] if self._waiting[call_id] else None
        if found is None:
            found = next((call for call in self._current if call.id == call_id), None)
        if found is None:
            found = next((call for call in unanswered if call.id is None), None)
        return found or self._latest.get(call_id)


def _pair(messages: Sequence[Message]) -> tuple[dict[int, tuple[Call, ...]], dict[int, Call]]:
    calls: dict[int, tuple[Call, ...]] = {}
    call_of: dict[int, Call] = {}
    pairing = Pairing()
    for idx, message in enumerate(messages):
        if message.role == "assistant":
            current = tuple(Call(idx, call.id or None, call.name, call.arguments) for call in message.tool_calls)
            if current:
                calls[idx] = current
            pairing.call(current)
        elif message.role == "tool":
            answered = pairing.answer(message.tool_call_id or None, idx)
            if answered is not None:
                call_of[idx] = answered
    return calls, call_of
