"""A policy applied to each request of a recorded conversation, with what each edit does to the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leyline_agent.core.edits import Edit
from leyline_agent.explain.conversation_file import RecordedConversation
from leyline_agent.explain.meters import Meter
from leyline_agent.explain.reuse import Piece, Reuse, State, forgets, given_pieces, pieces_of, states
from leyline_agent.policy import Applied, Made, Policy, PolicyRun, request_points


@dataclass(frozen=True, slots=True)
class PreviewTurn:
    """One request."""

    turn: int
    """1 is the first request, the one for the first answer."""
    applied: Applied
    base: tuple[Piece, ...] | None
    """What the server has in its cache; None at the first request."""
    pieces: tuple[Piece, ...]
    """The edited prompt."""
    forget: bool
    """A rule that forgets met what the server has seen, so nothing is moved."""
    tokens_before: int
    """Of the unedited prompt."""
    reuse: Reuse

    @property
    def states(self) -> tuple[State, ...]:
        """What becomes of each message of the prompt."""
        return states(self.base, self.pieces, forget=self.forget)


@dataclass(frozen=True, slots=True)
class Preview:
    """A policy on a conversation."""

    policy: Policy
    policy_name: str
    conversation: RecordedConversation
    counted: str
    is_exact: bool
    turns: tuple[PreviewTurn, ...]

    def totals(self) -> dict[str, Any]:
        """Return the sums over all requests."""
        reuses = [turn.reuse for turn in self.turns]
        prompt_tokens = sum(each.prompt_tokens for each in reuses)
        recomputed = sum(each.recomputed_tokens for each in reuses)
        without = sum(each.recomputed_tokens_without_splice for each in reuses)
        return {
            "counted": self.counted,
            "turns": len(self.turns),
            "turns_with_edits": sum(bool(turn.applied.new) for turn in self.turns),
            "edits": sum(len(turn.applied.new) for turn in self.turns),
            "tokens_before": sum(turn.tokens_before for turn in self.turns),
            "tokens_after": prompt_tokens,
            "last_tokens_before": self.turns[-1].tokens_before if self.turns else 0,
            "last_tokens_after": reuses[-1].prompt_tokens if reuses else 0,
            "kept_tokens": sum(each.kept_tokens for each in reuses),
            "moved_tokens": sum(each.moved_tokens for each in reuses),
            "recomputed_tokens": recomputed,
            "recomputed_tokens_without_splice": without,
        }

    def as_json(self, *, directives: bool = False) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "policy": self.policy_name,
            "trajectory": self.conversation.file,
            "source": self.conversation.source,
            "counted": self.counted,
            "exact": self.is_exact,
            "rules_counted": "estimate",
            "turns": [turn_as_json(turn, directives=directives) for turn in self.turns],
            "totals": self.totals(),
        }


def preview(
    policy: Policy,
    conversation: RecordedConversation,
    meter: Meter,
    *,
    name: str = "",
    context_window: int | None = None,
) -> Preview:
    """Apply a policy to every request of a conversation, as a `Conversation` would have.

    Rules decide by the estimate whatever `meter` counts with, since that is what a `Conversation` does.

    Raises:
        PolicyError: as `apply_policy`.
    """
    run = PolicyRun(policy, context_window=context_window)
    given = given_pieces(conversation.messages)
    turns: list[PreviewTurn] = []
    base: tuple[Piece, ...] | None = None
    num_sent = 0
    for number, point in enumerate(request_points(conversation.messages), 1):
        applied = run.apply(conversation.messages[:point], tools=conversation.tools)
        pieces = pieces_of(applied.edits, given[:point])
        forget = forgets(applied, num_sent)
        turns.append(
            PreviewTurn(
                turn=number,
                applied=applied,
                base=base,
                pieces=pieces,
                forget=forget,
                tokens_before=meter.count_given(point),
                reuse=meter.measure(base, pieces, forget=forget),
            )
        )
        if point < len(conversation.messages):
            base = (*pieces, given[point])
            num_sent = point + 1
    return Preview(policy, name or policy.name or "policy", conversation, meter.name, meter.is_exact, tuple(turns))


def turn_as_json(turn: PreviewTurn, *, directives: bool = False) -> dict[str, Any]:
    """Return a request as plain values."""
    last_made = {idx: made for made in turn.applied.made for idx in made.message_idxs}
    reuse = turn.reuse
    row: dict[str, Any] = {
        "turn": turn.turn,
        "num_messages": len(turn.applied.original),
        "messages": [piece.message.to_openai() for piece in turn.pieces],
        "edits": [_edit(edit, last_made, turn) for edit in turn.applied.edits],
        "made": [made_as_json(made) for made in turn.applied.new],
        "idle": [{"rule": idle.rule, "why": idle.why, "detail": idle.detail} for idle in turn.applied.idle],
        "tokens_before": turn.tokens_before,
        "tokens_after": reuse.prompt_tokens,
        "kept_tokens": reuse.kept_tokens,
        "moved_tokens": reuse.moved_tokens,
        "recomputed_tokens": reuse.recomputed_tokens,
        "recomputed_tokens_without_splice": reuse.recomputed_tokens_without_splice,
        "forget": turn.forget,
        "num_directives": len(reuse.changes),
    }
    if reuse.problem is not None:
        row["problem"] = reuse.problem
    if directives:
        row["directives"] = [
            {
                "start": change.start,
                "end": change.end,
                "replacement_tokens": change.replacement_tokens,
                "mode": str(change.mode),
            }
            for change in reuse.changes
        ]
    return row


def made_as_json(made: Made) -> dict[str, Any]:
    """Return what a rule did as plain values, without the text that it took away."""
    return {
        "rule": made.rule,
        "action": made.action,
        "mode": str(made.mode),
        "message_idxs": list(made.message_idxs),
        "estimated_tokens_before": made.tokens_before,
        "estimated_tokens_after": made.tokens_after,
        "reason": made.reason,
    }


def _edit(edit: Edit, last_made: Mapping[int, Made], turn: PreviewTurn) -> dict[str, Any]:
    """Return an edit that stands in the prompt, with what last made it."""
    made = last_made[edit.start]
    return {
        "start": edit.start,
        "end": edit.end,
        "replacement": [message.to_openai() for message in edit.replacement],
        "rule": edit.rule,
        "action": made.action,
        "mode": str(edit.mode),
        "new": made in turn.applied.new,
        "reason": made.reason,
    }
