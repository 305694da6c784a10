"""Explicit directives for a turn, made on the client with a tokenizer (`plan="client"`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.protocol import Directive, hash_token_ids
from leyline_agent.tokenizers import Tokenizer

_RENDER_ARGUMENTS = (
    "model",
    "tool_choice",
    "reasoning",
    "reasoning_effort",
    "chat_template_kwargs",
    "continue_final_message",
)


@dataclass(frozen=True, slots=True)
class RenderedFrom:
    """What the base's prompt was rendered from, and what was generated on it."""

    body: Mapping[str, Any]
    """The chat request as it was sent."""
    answer: Mapping[str, Any]
    num_ids: int | None
    """Prompt and completion tokens as the server counted them; None where it did not."""


@dataclass(frozen=True, slots=True)
class ExplicitPlan:
    """The three fields that a note carries for explicit directives."""

    directives: tuple[Directive, ...]
    base_len: int
    base_hash: str


def plan_on_client(tokenizer: Tokenizer, base: RenderedFrom, body: Mapping[str, Any]) -> ExplicitPlan:
    """Diff the base, as the next prompt carries it, with the edited prompt in `body`.

    What a template puts behind an answer is in no cache, so the base ends where the server's count of its ids ends.
    Where the server did not count, it ends with the base's prompt, and the answer is prefilled again.
    """
    base_messages = [*base.body["messages"], base.answer]
    base_ids = _render(tokenizer, base.body, base_messages, add_generation_prompt=False)
    num_ids = base.num_ids
    if num_ids is None:
        num_ids = len(_render(tokenizer, base.body, base.body["messages"], add_generation_prompt=True))
    base_ids = base_ids[:num_ids]
    new_ids = _render(tokenizer, body, body["messages"], add_generation_prompt=True)
    return ExplicitPlan(tuple(diff_token_ids(base_ids, new_ids)), len(base_ids), hash_token_ids(base_ids))


def _render(
    tokenizer: Tokenizer,
    body: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
) -> list[int]:
    arguments = {name: body[name] for name in _RENDER_ARGUMENTS if body.get(name) is not None}
    return tokenizer.render(messages, body.get("tools"), add_generation_prompt=add_generation_prompt, **arguments)
