"""LangChain messages to chat dicts, and edits of those back onto the LangChain messages.

The dicts are for digests, policies and tokenizers. What is sent stays LangChain's to render, so that a message which
no edit touches renders as it does without us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages, convert_to_openai_messages

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message


def to_openai(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return the messages as chat dicts; text stays text and a list of content blocks stays a list."""
    return [_to_openai(message) for message in messages]


def apply_edits_to_langchain(
    messages: Sequence[BaseMessage], parsed: Sequence[Message], edits: Sequence[Edit]
) -> list[BaseMessage]:
    """Return a new list with the edits carried out. Messages that are edited are copies, the rest are the same objects.

    Args:
        messages: what the edits are to be made of.
        parsed: the same messages, by way of `to_openai`.
        edits: sorted and disjoint.
    """
    edited: list[BaseMessage] = []
    at = 0
    for edit in edits:
        edited.extend(messages[at : edit.start])
        edited.extend(edited_messages(messages, parsed, edit))
        at = edit.end
    edited.extend(messages[at:])
    return edited


def edited_messages(messages: Sequence[BaseMessage], parsed: Sequence[Message], edit: Edit) -> list[BaseMessage]:
    """Return what an edit puts in the place of messages."""
    if edit.end - edit.start == 1 and len(edit.replacement) == 1:
        return [_replaced(messages[edit.start], parsed[edit.start], edit.replacement[0])]
    return convert_to_messages([message.to_openai() for message in edit.replacement])


def _to_openai(message: BaseMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return convert_to_openai_messages(message, text_format="string")
    return convert_to_openai_messages(message, text_format="block")


def _replaced(message: BaseMessage, original: Message, replacement: Message) -> BaseMessage:
    same_kind = replacement.role == original.role and replacement.tool_calls == original.tool_calls
    if not same_kind:
        return convert_to_messages([replacement.to_openai()])[0]
    # A copy keeps the id and whatever else an inner middleware may look for.
    return message.model_copy(update={"content": replacement.raw.get("content") or ""})
