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


def _pair(messages: Sequence[Message]) -> tuple[dict[int, tuple[Call, ...]], dict[int, Call]]:
    calls: dict[int, tuple[Call, ...]] = {}
    call_of: dict[int, Call] = {}
    waiting: dict[str, list[Call]] = defaultdict(list)
    current: tuple[Call, ...] = ()
    for idx, message in enumerate(messages):
        if message.role == "assistant":
            current = tuple(Call(idx, call.id or None, call.name, call.arguments) for call in message.tool_calls)
            if current:
                calls[idx] = current
            for call in current:
                if call.id is not None:
                    waiting[call.id].append(call)
        elif message.role == "tool":
            answered = _answered_call(message.tool_call_id or None, current, waiting)
            if answered is not None:
                answered.result_idxs.append(idx)
                call_of[idx] = answered
    return calls, call_of


def _answered_call(call_id: str | None, current: tuple[Call, ...], waiting: dict[str, list[Call]]) -> Call | None:
    """Find the call that a result answers, given the calls of the last assistant message.

    Ids repeat in what clients send, so the nearest unanswered call goes first. Where either side lacks its id the
    order decides. A second result for an answered call stays with it, else it would be left over when the call goes.
    """
    unanswered = [call for call in current if not call.result_idxs]
    if call_id is None:
        found = next(iter(unanswered), None)
    else:
        found = next((call for call in unanswered if call.id == call_id), None)
        if found is None and waiting[call_id]:
            found = waiting[call_id][-1]
        if found is None:
            found = next((call for call in current if call.id == call_id), None)
        if found is None:
            found = next((call for call in unanswered if call.id is None), None)
    if found is not None and found.id is not None and found in waiting[found.id]:
        waiting[found.id].remove(found)
    return found
