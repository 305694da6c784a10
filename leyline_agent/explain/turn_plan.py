"""The directives of one edited turn, with their token ids."""

from __future__ import annotations

from typing import Any

from leyline_agent.core.protocol import hash_token_ids
from leyline_agent.explain.conversation_file import RecordedConversation
from leyline_agent.explain.meters import ExactMeter, diff
from leyline_agent.explain.preview import made_as_json
from leyline_agent.explain.reuse import forgets, given_pieces, pieces_of
from leyline_agent.policy import Policy, apply_policy, request_points


def plan_as_json(
    policy: Policy,
    conversation: RecordedConversation,
    meter: ExactMeter,
    turn: int | None = None,
    *,
    context_window: int | None = None,
) -> dict[str, Any]:
    """Return the directives from the prompt before, with its answer, to the prompt of a request; by default the last.

    Raises:
        ValueError: there is no such request, or none at all.
        PlanError: the two are too different for the diff.
    """
    points = request_points(conversation.messages)
    if not points:
        raise ValueError(f"{conversation.file} has no request: no message before an answer, and none at its end")
    number = len(points) if turn is None else turn
    if not 1 <= number <= len(points):
        raise ValueError(f"turn: got {number}, expected 1 to {len(points)}, the number of requests")
    point = points[number - 1]
    applied = apply_policy(
        policy, conversation.messages[:point], tools=conversation.tools, context_window=context_window
    )
    plan: dict[str, Any] = {"turn": number, "counted": meter.name, "base_len": 0, "base_hash": None, "directives": []}
    given = given_pieces(conversation.messages)
    new = pieces_of(applied.edits, given[:point])
    if number == 1:
        base = None
        forget = False
    else:
        sent = points[number - 2]
        before = apply_policy(
            policy, conversation.messages[:sent], tools=conversation.tools, context_window=context_window
        )
        base = (*pieces_of(before.edits, given[:sent]), given[sent])
        forget = forgets(applied, sent + 1)
        base_ids = meter.base_ids(base)
        directives = diff(base_ids, meter.prompt_ids(new), forget=forget)
        plan |= {
            "base_len": len(base_ids),
            "base_hash": hash_token_ids(base_ids),
            "directives": [directive.model_dump(mode="json") for directive in directives],
        }
    reuse = meter.measure(base, new, forget=forget)
    return {
        **plan,
        "prompt_tokens": reuse.prompt_tokens,
        "kept_tokens": reuse.kept_tokens,
        "moved_tokens": reuse.moved_tokens,
        "recomputed_tokens": reuse.recomputed_tokens,
        "recomputed_tokens_without_splice": reuse.recomputed_tokens_without_splice,
        "made": [made_as_json(made) for made in applied.new],
    }
