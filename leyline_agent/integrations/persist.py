"""Edits written into a graph's state, so that its checkpoints hold the edited history.

What is written takes the place of the original by its message id, as the reducer `add_messages` has it. Rules leave
their own stubs alone, so the history that comes back next turn is not edited again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, RemoveMessage, ToolMessage

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.digests import HeldPrompt, digest_prompt
from leyline_agent.integrations.langchain_messages import edited_messages, to_openai
from leyline_agent.prepared_turn import PreparedTurn


def persist_edits(
    messages: Sequence[BaseMessage],
    parsed: Sequence[Message],
    prepared: PreparedTurn,
    state_ids: frozenset[str],
) -> tuple[list[BaseMessage], HeldPrompt]:
    """Return what to add to the state's messages, and the prompt as the state will have it.

    Edits of what the state does not hold (the system prompt, what another middleware put in) stay edits of requests.

    Args:
        messages: what the edits were made of.
        parsed: the same, as the edits know them.
        prepared: the turn with the edits.
        state_ids: ids of the messages in the state.
    """
    updates: list[BaseMessage] = []
    held: list[Message] = []
    left: list[Edit] = []
    renamed: dict[str, str] = {}
    at = 0
    for edit in prepared.edits:
        held.extend(parsed[at : edit.start])
        at = edit.end
        originals = messages[edit.start : edit.end]
        if not originals or any(message.id not in state_ids for message in originals):
            left.append(Edit(len(held), len(held) + len(originals), edit.replacement, edit.mode, edit.rule))
            held.extend(parsed[edit.start : edit.end])
            continue
        written = [_settled(new, originals[0]) for new in edited_messages(messages, parsed, edit)]
        updates += written
        updates += [RemoveMessage(id=str(message.id)) for message in originals[len(written) :]]
        held.extend(messages_from_openai(to_openai(written)))
        if written:
            renamed |= {gone.digest(): held[-1].digest() for gone in parsed[edit.start : edit.end]}
    held.extend(parsed[at:])
    return updates, HeldPrompt(digest_prompt(held, left, prepared.request), renamed)


def _settled(new: BaseMessage, original: BaseMessage) -> BaseMessage:
    """Return what stands in the state in the place of a message."""
    update: dict[str, Any] = {"id": original.id}
    if isinstance(new, ToolMessage):
        # The raw output, of which the edit was to leave a stub.
        update["artifact"] = None
    if isinstance(new, AIMessage) and isinstance(original, AIMessage):
        update |= {name: getattr(original, name) for name in ("name", "response_metadata", "usage_metadata")}
    return new.model_copy(update=update)
