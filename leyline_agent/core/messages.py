"""Chat messages as frozen values, from and to OpenAI chat dicts without loss.

Nothing here corrects a message. What a model or a framework made of it (unknown keys, broken JSON in arguments, a
missing id) stays as it came, since the same dict must render to the same prompt.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson


class ToolCall(NamedTuple):
    """A view on one entry of `tool_calls`; what the entry lacks is None or empty."""

    id: str | None
    name: str
    arguments: str
    """The JSON text as it came, valid or not. Arguments that came as an object are shown as its JSON text."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `raw` is the dict as it came (never mutated); the rest are views on it.

    Two messages are equal where their dicts are. `digest` is the key to remember one by.
    """

    role: str
    raw: Mapping[str, Any] = field(hash=False)
    _digest: str | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_openai(cls, message: Mapping[str, Any]) -> Message:
        """Take a deep copy of a chat dict.

        Raises:
            ValueError: it is no dict, or its role is no non-empty string.
        """
        return _message(message, None)

    def to_openai(self) -> dict[str, Any]:
        """Return a deep copy of `raw`: equal to what came, unknown keys and key order included."""
        copied: dict[str, Any] = _copied(self.raw if type(self.raw) is dict else dict(self.raw))
        return copied

    @property
    def text(self) -> str:
        """The content as one string: the text parts of a part list joined, "" where there is none."""
        content = self.raw.get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, Sequence):
            return "".join(_part_text(part) for part in content)
        return ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """One for each entry of the dict's `tool_calls`, in order; malformed entries are not skipped."""
        return tool_calls_of(self.raw.get("tool_calls"))

    @property
    def tool_call_id(self) -> str | None:
        """Of a tool result: the call that it answers."""
        return _str_or_none(self.raw.get("tool_call_id"))

    @property
    def name(self) -> str | None:
        """The dict's `name`, which frameworks set on tool results and on participants."""
        return _str_or_none(self.raw.get("name"))

    def with_text(self, text: str) -> Message:
        """Return a copy whose content is `text`; every other key stays."""
        return Message(self.role, {**self.to_openai(), "content": text})

    def without_tool_calls(self) -> Message:
        """Return a copy that calls no tool; every other key stays, a content of None too."""
        raw = self.to_openai()
        raw.pop("tool_calls", None)
        return Message(self.role, raw)

    def digest(self) -> str:
        """Return the SHA-256 hex digest of the dict as canonical JSON, the same for any order of keys.

        Raises:
            TypeError: the dict holds a value that JSON has no form for.
        """
        if self._digest is None:
            digest = hashlib.sha256(_canonical(self.raw)).hexdigest()
            object.__setattr__(self, "_digest", digest)
            return digest
        return self._digest


def tool_calls_of(entries: object) -> tuple[ToolCall, ...]:
    """Return what the entries of a dict's `tool_calls` say, as `Message.tool_calls` has it."""
    # Lists and dicts are asked for first: to ask for any sequence or mapping takes longer than the rest of this.
    if type(entries) is not list and (not isinstance(entries, Sequence) or isinstance(entries, str)):
        return ()
    return tuple([_tool_call(entry) for entry in entries])


def messages_from_openai(
    messages: Sequence[Mapping[str, Any] | Message], known: Sequence[Message] = ()
) -> list[Message]:
    """Take deep copies of a list of chat dicts; what is a `Message` already is taken as it is.

    Args:
        messages: the list.
        known: those of an earlier one, from which this one mostly goes on. A message that stands at the same place
            there, the same to the letter, is neither copied nor digested again: the result has the earlier object.

    Raises:
        ValueError: `messages` is no list, or one of them is no message; the text gives its index.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages: got {type(messages).__name__}, expected a list of chat dicts")
    taken = [
        before if _is_same(before.raw, message.raw if type(message) is Message else message) else _taken(message, idx)
        for idx, (before, message) in enumerate(zip(known, messages, strict=False))
    ]
    return taken + [_taken(messages[idx], idx) for idx in range(len(taken), len(messages))]


def _taken(message: Mapping[str, Any] | Message, idx: int) -> Message:
    return message if type(message) is Message else _message(message, idx)


def _is_same(left: object, right: object) -> bool:
    """Tell whether two values are the same to the letter: 1 and True are not, nor are two orders of keys."""
    try:
        return left == right and orjson.dumps(left, option=_STRICT) == orjson.dumps(right, option=_STRICT)
    except (TypeError, ValueError):
        # There is something in it that this has no form for, or that does not compare, such as an array.
        return False


def _message(message: object, idx: int | None) -> Message:
    place = "message" if idx is None else f"messages[{idx}]"
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{place}: got {type(message).__name__} {message!r:.80}, expected a chat dict such as "
            "{'role': 'user', 'content': 'hello'}"
        )
    if "role" not in message:
        raise ValueError(f"{place}: got keys {sorted(map(str, message))}, expected a 'role' among them")
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}: got role {role!r:.80}, expected a non-empty string such as 'user'")
    return Message(role, _copied(message if type(message) is dict else dict(message)))


def _copied(value: Any) -> Any:
    """Return a deep copy. What JSON is made of is copied here, ten times as fast as `copy.deepcopy` does it."""
    kind = type(value)
    if kind is dict:
        return {key: part if type(part) is str else _copied(part) for key, part in value.items()}
    if kind is str or value is None or kind is int or kind is bool or kind is float:
        return value
    if kind is list:
        return [_copied(part) for part in value]
    return copy.deepcopy(value)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text":
        return _str_or_none(part.get("text")) or ""
    return ""


def _tool_call(call: object) -> ToolCall:
    if type(call) is not dict and not isinstance(call, Mapping):
        return ToolCall(None, "", "")
    call_id, function = call.get("id"), call.get("function")
    call_id = call_id if isinstance(call_id, str) else None
    if type(function) is not dict and not isinstance(function, Mapping):
        return ToolCall(call_id, "", "")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False, default=_plain_mapping)
    return ToolCall(call_id, name if isinstance(name, str) else "", arguments)


def _str_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _plain_mapping(value: object) -> dict[str, Any]:
    """Let JSON see a mapping that is no dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a message holds a {type(value).__name__}, which has no JSON form; send plain values")


_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def _canonical(raw: Mapping[str, Any]) -> bytes:
    with suppress(TypeError):
        written = orjson.dumps(raw, _plain_mapping, _STRICT | orjson.OPT_SORT_KEYS)
        # That also stands for a number that is none, which is something else.
        if b"null" not in written:
            return written
    # Or half of a surrogate pair, an integer of more than 64 bits, a key that is no string; or an error, which this
    # names better.
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), default=_plain_mapping).encode("ascii")
