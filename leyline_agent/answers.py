"""From a chat response, whole or streamed, to the answer, the outcome and the usage. Knows nothing of connections."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from leyline_agent.core.protocol import OUTCOME_HEADER, Outcome
from leyline_agent.errors import SpliceTransportError
from leyline_agent.telemetry import Usage

logger = logging.getLogger("leyline_agent")


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One answered turn."""

    message: dict[str, Any]
    """The assistant message of the first choice, to be appended to the messages as it is."""
    outcome: Outcome | None
    """None from a server without the plugin, or where no note was sent."""
    usage: Usage | None
    raw: Mapping[str, Any]
    """The response as it came; of a stream, its last chunk."""


def read_outcome(headers: Mapping[str, str], body: Mapping[str, Any] | None = None) -> Outcome | None:
    """Read the outcome off a response; the body's, where there is one, lists more directives than the header's."""
    metadata = (body or {}).get("metadata")
    in_body = metadata.get("leyline") if isinstance(metadata, Mapping) else None
    if isinstance(in_body, Mapping):
        in_body = json.dumps(in_body)
    for text in (in_body, next((value for name, value in headers.items() if name.lower() == OUTCOME_HEADER), None)):
        if not isinstance(text, str):
            continue
        try:
            return Outcome.model_validate_json(text)
        except ValidationError as error:
            logger.warning("cannot read the outcome %.200r, which a newer server may have sent: %s", text, error)
    return None


def read_reply(headers: Mapping[str, str], body: Any) -> ChatReply:
    """Read a whole chat response.

    Raises:
        SpliceTransportError: it has no choice with a message.
    """
    try:
        message = body["choices"][0]["message"]
        message["role"]
    except (KeyError, IndexError, TypeError) as error:
        raise SpliceTransportError(f"got {body!r:.200}, expected a chat completion with a choice") from error
    return ChatReply(message, read_outcome(headers, body), Usage.from_openai(body.get("usage")), body)


class StreamedAnswer:
    """Assembles the chunks of a streamed answer, tool calls included."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.outcome = read_outcome(headers)
        self.finished = False
        """Whether the first choice came to its end."""
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._calls: dict[int, dict[str, Any]] = {}
        self._usage: Usage | None = None
        self._last: Mapping[str, Any] = {}

    def add_line(self, line: str) -> Mapping[str, Any] | None:
        """Take one line of the event stream; return its chunk, None where it carries none.

        Raises:
            SpliceTransportError: the server reported an error, or the line is no JSON.
        """
        if not line.startswith("data:"):
            return None
        text = line.removeprefix("data:").strip()
        if text == "[DONE]":
            return None
        try:
            chunk = json.loads(text)
        except ValueError as error:
            raise SpliceTransportError(f"got {text!r:.200} in the stream, expected a JSON chunk") from error
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise SpliceTransportError(f"the server broke the stream off: {text:.500}")
        self._add(chunk)
        return chunk

    def reply(self) -> ChatReply:
        """Return the whole answer."""
        message = dict(self._message)
        if self._calls:
            message["tool_calls"] = [self._calls[idx] for idx in sorted(self._calls)]
        return ChatReply(message, self.outcome, self._usage, self._last)

    def _add(self, chunk: Mapping[str, Any]) -> None:
        self._last = chunk
        self._usage = Usage.from_openai(chunk.get("usage")) or self._usage
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    self._message[name] = (self._message.get(name) or "") + delta[name]
            for position, part in enumerate(delta.get("tool_calls") or ()):
                self._add_call(part.get("index", position), part)
            self.finished = self.finished or choice.get("finish_reason") is not None

    def _add_call(self, idx: int, part: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(idx, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
