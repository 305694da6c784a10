"""Reading and rewriting raw chat dicts: contents, calls, results, reasoning; OpenAI's form and Anthropic's.

Everything returns new dicts that share what did not change; nothing is mutated. What has an unknown form stays as it
is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from leyline_agent.core.messages import ToolCall, tool_calls_of

Raw = Mapping[str, Any]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks")
_REASONING = frozenset(REASONING_KEYS)
REASONING_BLOCKS = frozenset({"thinking", "redacted_thinking", "reasoning"})
_NO_OTHER_BLOCKS = REASONING_BLOCKS | {"text", "tool_use"}
# Written as a union it would be made anew at each question, of which there are several for each message.
_LISTS = (list, tuple)
_THINK_START, _THINK_END = "<think>", "</think>"


class RawCall(NamedTuple):
    """One call of an assistant message, with the entries of the dict that say it.

    Some frameworks write a call twice, into `tool_calls` and as a content block; both are entries of the one call.
    """

    id: str | None
    name: str
    arguments: str
    """As JSON text."""
    entries: tuple[Any, ...]


def blocks_of(raw: Raw) -> Sequence[Any]:
    """Return the parts of a content that is a list of them."""
    content = raw.get("content")
    return content if isinstance(content, _LISTS) else ()


def block_type(block: object) -> str:
    """Return a content part's type; "" where it has none."""
    # A dict is asked for first: to ask for any mapping takes longer than the rest of this.
    kind = block.get("type") if type(block) is dict or isinstance(block, Mapping) else None
    return kind if isinstance(kind, str) else ""


def text_of(raw: Raw) -> str:
    """Return the text of a content: of a message, or of a block that holds a result."""
    content = raw.get("content")
    if isinstance(content, str):
        return content
    return "".join(_text_parts(content)) if isinstance(content, _LISTS) else ""


def has_other_parts(raw: Raw) -> bool:
    """Tell whether a content has parts, such as an image, that are neither text nor reasoning nor calls."""
    parts = blocks_of(raw)
    return bool(parts) and any(not isinstance(part, str) and block_type(part) not in _NO_OTHER_BLOCKS for part in parts)


def with_text(raw: Raw, text: str) -> dict[str, Any]:
    """Return a copy whose content is a text; calls and reasoning that are parts of the content stay beside it."""
    parts = blocks_of(raw)
    reasoning = [part for part in parts if block_type(part) in REASONING_BLOCKS]
    calls = [part for part in parts if block_type(part) == "tool_use"]
    if not reasoning and not calls:
        return {**raw, "content": text}
    return {**raw, "content": [*reasoning, {"type": "text", "text": text}, *calls]}


def calls_of(raw: Raw) -> list[RawCall]:
    """Return the calls of an assistant message, in order; malformed entries of `tool_calls` are not skipped."""
    calls: list[RawCall] = []
    if raw.get("tool_calls"):
        views = zip(_views(raw), raw["tool_calls"], strict=False)
        calls = [RawCall(view.id or None, view.name, view.arguments, (entry,)) for view, entry in views]
    blocks = blocks_of(raw)
    if not blocks:
        return calls
    by_id = {call.id: idx for idx, call in enumerate(calls) if call.id is not None}
    for block in blocks:
        if block_type(block) != "tool_use":
            continue
        call_id = block.get("id") if isinstance(block.get("id"), str) else None
        twin = by_id.get(call_id) if call_id else None
        if twin is not None:
            call = calls[twin]
            calls[twin] = RawCall(call.id, call.name, call.arguments, (*call.entries, block))
        else:
            name = block.get("name")
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False, default=str)
            calls.append(RawCall(call_id or None, name if isinstance(name, str) else "", arguments, (block,)))
    return calls


def _views(raw: Raw) -> tuple[ToolCall, ...]:
    """Return what the entries of `tool_calls` say; none where those are no list."""
    entries = raw["tool_calls"]
    return tool_calls_of(entries) if isinstance(entries, _LISTS) else ()


def with_calls_apart(raw: Raw) -> Raw:
    """Return a message in which no two entries of calls are the same object, since calls go by their entries."""
    entries = raw.get("tool_calls")
    if not isinstance(entries, _LISTS) or len(entries) == 1 or len(set(map(id, entries))) == len(entries):
        return raw
    return {**raw, "tool_calls": [dict(entry) if isinstance(entry, Mapping) else entry for entry in entries]}


def without_entries(raw: Raw, entries: Collection[Any]) -> dict[str, Any] | None:
    """Return a copy of an assistant message without these entries of calls; None where it says nothing more."""
    gone = {id(entry) for entry in entries}
    left = dict(raw)
    if isinstance(left.get("tool_calls"), _LISTS):
        left["tool_calls"] = [entry for entry in left["tool_calls"] if id(entry) not in gone]
        if not left["tool_calls"]:
            del left["tool_calls"]
    if isinstance(left.get("content"), _LISTS):
        left["content"] = [block for block in left["content"] if id(block) not in gone]
    return left if "tool_calls" in left or says_something(left) else None


def says_something(raw: Raw) -> bool:
    """Tell whether a message has text, or a part that is neither text nor reasoning, such as a call or an image."""
    return bool(text_of(raw).strip()) or any(
        not isinstance(part, str) and block_type(part) not in REASONING_BLOCKS | {"text"} for part in blocks_of(raw)
    )


def with_entries(raw: Raw, changed: Mapping[int, Any]) -> dict[str, Any]:
    """Return a copy with entries of calls exchanged; the keys are the `id()`s of the old ones."""
    new = dict(raw)
    for key in ("tool_calls", "content"):
        if isinstance(new.get(key), _LISTS):
            new[key] = [changed.get(id(entry), entry) for entry in new[key]]
    return new


def entry_with_arguments(entry: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a call's entry with other arguments, in the form (object or JSON text) in which it had them."""
    if block_type(entry) == "tool_use":
        return {**entry, "input": dict(arguments)}
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping):
        return entry
    as_object = isinstance(function.get("arguments"), Mapping)
    given = dict(arguments) if as_object else json.dumps(arguments, ensure_ascii=False)
    return {**entry, "function": {**function, "arguments": given}}


def parsed_arguments(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments as an object; None where they are none."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def without_reasoning(raw: Raw) -> dict[str, Any] | None:
    """Return a copy of a message without the model's reasoning; None where it has none."""
    new = {key: value for key, value in raw.items() if not (key in REASONING_KEYS and value)}
    content = raw.get("content")
    if isinstance(content, str):
        start, end = content.find(_THINK_START), content.find(_THINK_END)
        # Some templates put the opening mark into the prompt, so that an answer has the closing one alone.
        if end >= 0 and not content[: max(start, 0)].strip():
            new["content"] = content[end + len(_THINK_END) :].lstrip("\n")
    elif isinstance(content, _LISTS):
        new["content"] = [part for part in content if block_type(part) not in REASONING_BLOCKS]
    return new if new != raw else None


def texts_of(raw: Raw) -> tuple[list[str], int]:
    """Return every text of a message that ends up in a prompt, each once, and how many parts are no text."""
    texts: list[str] = []
    num_other = 0
    content = raw.get("content")
    calls: Sequence[RawCall | ToolCall] = ()
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, _LISTS):
        num_other = _collect(content, texts)
        calls = calls_of(raw)
    if not calls and raw.get("tool_calls"):
        calls = _views(raw)
    for call in calls:
        texts += (call.name, call.arguments)
    if not _REASONING.isdisjoint(raw):
        for key in REASONING_KEYS:
            if key in raw:
                texts += _strings(raw[key])
    return texts, num_other


def map_texts(raw: Raw, change: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a message, or of a block that holds a result, with every text that the model sees changed.

    Calls stay: `entry_with_texts` changes those. A block of reasoning that would change is left out: it is signed, and
    its signature would no longer fit.
    """
    new = dict(raw)
    content = raw.get("content")
    if isinstance(content, str):
        new["content"] = change(content)
    elif isinstance(content, _LISTS):
        new["content"] = [part for part in (_changed_part(part, change) for part in content) if part is not None]
    if _REASONING.isdisjoint(raw):
        return new
    for key in REASONING_KEYS:
        if isinstance(raw.get(key), str):
            new[key] = change(raw[key])
        elif isinstance(raw.get(key), _LISTS):
            new[key] = [part for part in raw[key] if all(change(text) == text for text in _strings(part))]
    return new


def entry_with_texts(entry: Any, change: Callable[[str], str]) -> Any:
    """Return a call's entry with every text within its arguments changed, still JSON where it was."""
    if block_type(entry) == "tool_use":
        changed = _changed_value(entry.get("input"), change)
        return entry if changed == entry.get("input") else {**entry, "input": changed}
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping):
        return entry
    arguments = function.get("arguments")
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            # No JSON: its text is what the model sees.
            changed = change(arguments)
            return entry if changed == arguments else {**entry, "function": {**function, "arguments": changed}}
    changed = _changed_value(value, change)
    if changed == value:
        return entry
    given = json.dumps(changed, ensure_ascii=False) if isinstance(arguments, str) else changed
    return {**entry, "function": {**function, "arguments": given}}


def _changed_value(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key) if isinstance(key, str) else key: _changed_value(part, change) for key, part in value.items()
        }
    if isinstance(value, _LISTS):
        return [_changed_value(part, change) for part in value]
    return value


def _changed_part(part: object, change: Callable[[str], str]) -> object | None:
    if isinstance(part, str):
        return change(part)
    if not isinstance(part, Mapping):
        return part
    kind = block_type(part)
    if kind in REASONING_BLOCKS:
        return part if all(change(text) == text for text in _strings(part)) else None
    if kind == "text" and isinstance(part.get("text"), str):
        changed = change(part["text"])
        return part if changed == part["text"] else {**part, "text": changed}
    return part


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, _LISTS):
        for part in value:
            yield from _strings(part)


def _text_parts(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif block_type(part) == "text" and isinstance(part.get("text"), str):
            yield part["text"]


def _collect(parts: Sequence[Any], texts: list[str]) -> int:
    """Add the texts of content parts, calls left out; return how many parts are something else."""
    num_other = 0
    for part in parts:
        kind = block_type(part)
        if isinstance(part, str) or kind == "text":
            texts += _text_parts((part,))
        elif kind in REASONING_BLOCKS:
            texts += [value for key, value in part.items() if key in ("thinking", "text") and isinstance(value, str)]
        elif kind == "tool_result":
            content = part.get("content")
            if isinstance(content, str):
                texts.append(content)
            elif isinstance(content, _LISTS):
                num_other += _collect(content, texts)
        elif kind != "tool_use":
            num_other += 1
    return num_other
