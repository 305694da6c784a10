"""A chat request that is ready to send: what goes out, and what is to be known of it when its answer comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Note
from leyline_agent.digests import PromptDigest
from leyline_agent.telemetry import ByTemplate


@dataclass(frozen=True)
class PreparedTurn:
    """A request that is ready to send, and what `Conversation.commit` needs to know of it."""

    turn: str
    request: Mapping[str, Any]
    """As `body`, with `messages` for its messages."""
    headers: dict[str, str]
    """To be sent with it; empty where there is no note."""
    messages: tuple[Message, ...]
    """The edited messages, as in `body`."""
    edits: tuple[Edit, ...]
    """What was done to the caller's messages."""
    note: Note | None
    unexplained: tuple[str, ...]
    """For people: why the note says `reprefill`, where somebody else changed the history."""
    prompt: PromptDigest
    amortized: frozenset[str]
    """Digests of the messages whose edits this note lets the server amortize."""
    purged: frozenset[str]
    """Digests of the messages of which this note has the server leave nothing cached."""
    period: int
    """How often the conversation had been released before."""
    by_template: ByTemplate = "none"
    """Which differences from the last answered turn the chat template is behind."""

    @cached_property
    def body(self) -> dict[str, Any]:
        """The caller's request with the edited messages and the note. Made when asked for; the reader's own."""
        return {**self.request, "messages": [message.to_openai() for message in self.messages]}

    def openai_arguments(self) -> dict[str, Any]:
        """Return the request as keyword arguments of the `openai` package's `chat.completions.create`.

        That takes only fields that it knows, so all but three go into `extra_body`, from where they are sent alike.
        """
        named: dict[str, Any] = {name: self.body[name] for name in ("model", "messages", "stream") if name in self.body}
        rest = {name: value for name, value in self.body.items() if name not in named}
        return {**named, "extra_body": rest, "extra_headers": self.headers}
