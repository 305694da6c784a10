"""Edits that a program asked for message by message, carried through the turns that follow.

Owns how such an edit finds its message again, keeps calls and results together, and gets along with a policy's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy.turns import Call, Shape, read_shape

MessageKey = tuple[str, int]
"""A message's digest, and how many equal ones stand before it."""
RULE = "Conversation.edit"


@dataclass(frozen=True, slots=True)
class ManualEdit:
    """What is to stand in a message's place: a text, another message, or nothing."""

    replacement: Message | str | None
    mode: Mode


def message_keys(messages: Sequence[Message]) -> list[MessageKey]:
    """Return the key of each message of a list."""
    seen: Counter[str] = Counter()
    keys = []
    for message in messages:
        digest = message.digest()
        keys.append((digest, seen[digest]))
        seen[digest] += 1
    return keys


def check_replacement(message: Message, replacement: Message) -> None:
    """Check that a replacement leaves calls with their results.

    Raises:
        ValueError: it is another call, answers another call, or is none where the original was one.
    """
    if _pairing(message) != _pairing(replacement):
        raise ValueError(
            f"got a replacement with (is a result, tool_call_id, ids of calls) = {_pairing(replacement)}, expected "
            f"those of the message, {_pairing(message)}, since a call and its results belong together; to remove "
            "both, replace by None"
        )


def manual_edits(messages: Sequence[Message], wanted: Mapping[MessageKey, ManualEdit]) -> list[Edit]:
    """Return the wanted edits of those messages that are in the list, one edit a message, sorted.

    Dropping a result drops its call, dropping a call drops its results, whichever of them was named.
    """
    if not wanted:
        return []
    found = {idx: wanted[key] for idx, key in enumerate(message_keys(messages)) if key in wanted}
    results: dict[int, tuple[Message | None, Mode]] = {}
    for idx, edit in found.items():
        if isinstance(edit.replacement, str):
            results[idx] = (messages[idx].with_text(edit.replacement), edit.mode)
        elif edit.replacement is not None:
            results[idx] = (edit.replacement, edit.mode)
    dropped = {idx: edit.mode for idx, edit in found.items() if edit.replacement is None}
    results |= _drop(messages, dropped, {idx: message for idx, (message, _) in results.items() if message})
    return [
        Edit(idx, idx + 1, () if message is None else (message,), mode, RULE)
        for idx, (message, mode) in sorted(results.items())
    ]


def merge_edits(messages: Sequence[Message], manual: Sequence[Edit], policy: Sequence[Edit]) -> list[Edit]:
    """Return one sorted, disjoint list. A manual edit wins, but where the policy collapses whole turns into one stub.

    A collapse leaves nothing of a manual edit to carry out, except that what it forgets stays forgotten.
    """
    if not manual:
        return list(policy)
    collapses = [edit for edit in policy if edit.end - edit.start > 1]
    inside = {edit.start for edit in manual for span in collapses if span.start <= edit.start < span.end}
    forgetting = {edit.start for edit in manual if edit.mode is Mode.FORGET} & inside
    kept_manual = [edit for edit in manual if edit.start not in inside]
    named = {edit.start for edit in kept_manual}
    groups = _groups(read_shape(messages))
    touched = {member for idx in named for member in groups.get(idx, {idx})}
    merged = list(kept_manual)
    for edit in policy:
        if edit.end - edit.start > 1:
            forgets = any(edit.start <= idx < edit.end for idx in forgetting)
            merged.append(edit._replace(mode=Mode.FORGET) if forgets else edit)
        elif edit.start not in (named if _in_place(messages, edit) else touched):
            merged.append(edit)
    return sorted(merged, key=lambda edit: (edit.start, edit.end))


def _drop(
    messages: Sequence[Message], dropped: Mapping[int, Mode], replaced: Mapping[int, Message]
) -> dict[int, tuple[Message | None, Mode]]:
    shape = read_shape(messages)
    going: dict[int, dict[int, Mode]] = defaultdict(dict)
    results: dict[int, tuple[Message | None, Mode]] = {}
    for idx, mode in dropped.items():
        results[idx] = (None, mode)
        own_call = shape.call_of.get(idx)
        gone: Sequence[Call] = shape.calls.get(idx, ()) if own_call is None else (own_call,)
        for call in gone:
            going[call.message_idx][shape.calls[call.message_idx].index(call)] = mode
            results |= dict.fromkeys(call.result_idxs, (None, mode))
    for message_idx, calls in going.items():
        if message_idx in dropped:
            continue
        message = replaced.get(message_idx, messages[message_idx])
        mode = Mode.FORGET if Mode.FORGET in calls.values() else Mode.AMORTIZE
        results[message_idx] = (_without_calls(message, set(calls)), mode)
    return results


def _without_calls(message: Message, gone: set[int]) -> Message | None:
    raw = message.to_openai()
    raw["tool_calls"] = [call for idx, call in enumerate(raw["tool_calls"]) if idx not in gone]
    if raw["tool_calls"]:
        return Message.from_openai(raw)
    return message.without_tool_calls() if message.text.strip() else None


def _groups(shape: Shape) -> dict[int, set[int]]:
    """Map each member of a call with its results to all of them."""
    groups: dict[int, set[int]] = {}
    for message_idx, calls in shape.calls.items():
        members = {message_idx, *(result for call in calls for result in call.result_idxs)}
        groups |= dict.fromkeys(members, members)
    return groups


def _in_place(messages: Sequence[Message], edit: Edit) -> bool:
    """Tell whether an edit leaves one message that pairs as the original did."""
    one_for_one = edit.end - edit.start == 1 and len(edit.replacement) == 1
    return one_for_one and _pairing(messages[edit.start]) == _pairing(edit.replacement[0])


def _pairing(message: Message) -> tuple[bool, str | None, tuple[str | None, ...]]:
    return message.role == "tool", message.tool_call_id, tuple(call.id for call in message.tool_calls)
