"""Chat messages as frozen values, from and to OpenAI chat dicts without loss. (Contract; the body follows.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str | None
    name: str
    arguments: str
    """The JSON text as it came."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `raw` is the dict as it came (never mutated); the rest are views on it."""

    role: str
    raw: Mapping[str, Any]

    @classmethod
    def from_openai(cls, message: Mapping[str, Any]) -> Message:
        raise NotImplementedError

    def to_openai(self) -> dict[str, Any]:
        """A deep copy of `raw`: equal to what came, unknown keys included."""
        raise NotImplementedError

    # properties: text (str: content flattened, "" for None), tool_calls (tuple[ToolCall, ...]), tool_call_id,
    # name; methods: with_text(str) -> Message, without_tool_calls, digest() -> str (sha256 of canonical JSON)


def messages_from_openai(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    raise NotImplementedError
