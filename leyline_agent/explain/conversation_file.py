"""Reads a recorded conversation: `{"messages": […][, "tools": […]][, "source": "…"]}`, or a bare list of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_agent.core.messages import Message, messages_from_openai

_EXPECTED = 'expected {"messages": […]} or a list of chat messages'


class ConversationFileError(ValueError):
    """A file that holds no conversation, or cannot be read."""


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A whole history, as it happened and unedited."""

    file: str
    source: str
    """Where it comes from, as the file says; else the file's name."""
    messages: tuple[Message, ...]
    """As they came: nothing is corrected."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas that were sent with each request."""


def read_conversation(file: Path | str) -> RecordedConversation:
    """Read a conversation.

    Raises:
        ConversationFileError: the file cannot be read, is no JSON, or holds something else.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversationFileError(f"{file}: cannot read it: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConversationFileError(f"{file}: not UTF-8 text at byte {error.start}; {_EXPECTED}") from error
    except json.JSONDecodeError as error:
        place = f"{file}:{error.lineno}:{error.colno}"
        raise ConversationFileError(f"{place}: not JSON: {error.msg}; {_EXPECTED}") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or thousands of brackets.
        raise ConversationFileError(f"{file}: not JSON: {error}; {_EXPECTED}") from error
    if isinstance(content, list):
        content = {"messages": content}
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        found = f"an object with the keys {sorted(content)}" if isinstance(content, dict) else type(content).__name__
        raise ConversationFileError(f"{file}: got {found}; {_EXPECTED}")
    tools = content.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConversationFileError(f"{file}: tools: got {tools!r:.80}, expected a list of tool schemas")
    try:
        messages = messages_from_openai(content["messages"])
    except ValueError as error:
        raise ConversationFileError(f"{file}: {error}") from error
    source = content.get("source")
    name = source if isinstance(source, str) and source else Path(file).name
    return RecordedConversation(str(file), name, tuple(messages), tuple(tools))
