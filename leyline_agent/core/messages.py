"""Chat messages as frozen values, from and to OpenAI chat dicts without loss.

Nothing here corrects a message. What a model or a framework made of it (unknown keys, broken JSON in arguments, a
missing id) stays as it came, since the same dict must render to the same prompt.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
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

    @classmethod
    def from_openai(cls, message: Mapping[str, Any]) -> Message:
        """Take a deep copy of a chat dict.

        Raises:
            ValueError: it is no dict, or its role is no non-empty string.
        """
        return _message(message, "message")

    def to_openai(self) -> dict[str, Any]:
        """Return a deep copy of `raw`: equal to what came, unknown keys and key order included."""
        copied: dict[str, Any] = _copied(dict(self.raw))
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
        calls = self.raw.get("tool_calls")
        # Lists and dicts are asked for first: to ask for any sequence or mapping takes longer than the rest of this.
        if type(calls) is not list and (not isinstance(calls, Sequence) or isinstance(calls, str)):
            return ()
        return tuple([_tool_call(call) for call in calls])

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
        return hashlib.sha256(_CANONICAL.encode(self.raw).encode("ascii")).hexdigest()


def messages_from_openai(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Take deep copies of a list of chat dicts.

    Raises:
        ValueError: `messages` is no list, or one of them is no message; the text gives its index.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages: got {type(messages).__name__}, expected a list of chat dicts")
    return [_message(message, f"messages[{idx}]") for idx, message in enumerate(messages)]


def _message(message: object, place: str) -> Message:
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
    return Message(role, _copied(dict(message)))


def _copied(value: Any) -> Any:
    """Return a deep copy. What JSON is made of is copied here, ten times as fast as `copy.deepcopy` does it."""
    kind = type(value)
    if kind is str or value is None or kind is int or kind is bool or kind is float:
        return value
    if kind is dict:
        return {key: _copied(part) for key, part in value.items()}
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
    call_id = _str_or_none(call.get("id"))
    function = call.get("function")
    if type(function) is not dict and not isinstance(function, Mapping):
        return ToolCall(call_id, "", "")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False, default=_plain_mapping)
    return ToolCall(call_id, _str_or_none(function.get("name")) or "", arguments)


def _str_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _plain_mapping(value: object) -> dict[str, Any]:
    """Let JSON see a mapping that is no dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a message holds a {type(value).__name__}, which has no JSON form; send plain values")


# `json.dumps` would make one for every message.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain_mapping)
