"""What a plan's steps come to in an outcome and in a turn's log of edits. Pure arithmetic on positions."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from leyline_agent.core.plan import SplicePlan, SpliceStep
from leyline_agent.core.protocol import Directive, DirectiveOutcome
from leyline_sglang.sequences import Edit

MAX_EDITS = 256
"""Remembered of one turn. A `forget` of an older one gives up the whole namespace, as for any id that is in no log."""


def fill_tokens(plan: SplicePlan, steps: list[SpliceStep]) -> list[int]:
    """Return for each step how many tokens of R stand left of its kept run and right of the one before."""
    first = 0
    tokens = []
    for step in steps:
        tokens.append(sum(len(other.replacement) for other in plan.steps[first : step.directive_idx + 1]))
        first = step.directive_idx + 1
    return tokens


def num_worth_showing(directives: list[Directive], steps: list[SpliceStep], first_forget: int | None) -> int:
    """Return how many directives an outcome lists: those right of the last kept run only cut off the base's end."""
    if first_forget is not None:
        return len(directives)
    return steps[-1].directive_idx + 1 if steps else 0


def directive_outcome(directive: Directive, edit_id: str | None, in_answer: bool) -> DirectiveOutcome:
    """Return what an outcome says of a directive; `edit_id` is None where it was not carried out."""
    return DirectiveOutcome(
        start=directive.start,
        end=directive.end,
        replacement_tokens=len(directive.replacement_ids),
        mode=directive.mode,
        edit_id=edit_id,
        in_answer=in_answer,
    )


def carried_over(edits: tuple[Edit, ...], plan: SplicePlan) -> list[Edit]:
    """Return earlier edits at their positions in the new prompt; inside a removed span, at its left end."""
    starts = [step.removed.start for step in plan.steps]
    return [replace(edit, position=_new_position(edit.position, plan, starts)) for edit in edits]


def made_by(edit_ids: list[str], plan: SplicePlan, turn_id: str | None) -> list[Edit]:
    """Return the edits of a plan's first steps, one for each id."""
    return [
        Edit(edit_id, step.replacement.start, turn_id, len(step.removed), len(step.replacement))
        for edit_id, step in zip(edit_ids, plan.steps, strict=False)
    ]


def _new_position(position: int, plan: SplicePlan, starts: list[int]) -> int:
    idx = bisect_right(starts, position) - 1
    if idx < 0:
        return position
    step = plan.steps[idx]
    in_kept_run = position >= step.kept.src.start
    return position + step.kept.position_delta if in_kept_run else step.replacement.start
