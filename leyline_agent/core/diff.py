"""From old and new token ids to the directives that turn one into the other."""

from __future__ import annotations

from collections.abc import Sequence

from leyline_agent.core.alignment import align
from leyline_agent.core.protocol import Directive, Reason
from leyline_agent.errors import PlanError


def diff_token_ids(old_ids: Sequence[int], new_ids: Sequence[int], *, budget: int = 4_000_000) -> list[Directive]:
    """Return amortizing directives whose application to `old_ids` gives exactly a prefix of `new_ids`.

    They are sorted and disjoint, and none is empty. What follows the last kept run in `new_ids` is prefilled with the
    rest of the prompt and is in no directive, so an append-only change has none. Old tokens behind the last kept run
    are removed by a last directive with an empty replacement.

    Runs are kept where that saves more prefilled tokens than one more directive costs (`alignment.DIRECTIVE_COST`,
    `REPLACEMENT_COST`): a run of 20 tokens between two replacements, or of any length next to the common prefix.

    Args:
        old_ids: The base, as the server has it cached.
        new_ids: The prompt that is asked for now.
        budget: A bound on the work, in units of about 0.1 microseconds. 32,000 tokens with ten edits take below
            100,000 of them.

    Raises:
        PlanError: with reason `diff_budget`, or `token_out_of_vocabulary` for ids that are no uint32.
    """
    runs = align(old_ids, new_ids, budget=budget)
    directives: list[Directive] = []
    old_at = new_at = 0
    for run in runs:
        if run.old > old_at or run.new > new_at:
            replacement_ids = tuple(new_ids[new_at : run.new])
            directives.append(Directive(start=old_at, end=run.old, replacement_ids=replacement_ids))
        old_at, new_at = run.old_end, run.new_end
    if old_at < len(old_ids):
        directives.append(Directive(start=old_at, end=len(old_ids)))
    _check(old_ids, new_ids, directives)
    return directives


def _check(old_ids: Sequence[int], new_ids: Sequence[int], directives: list[Directive]) -> None:
    """Refuse directives that would serve another prompt than the one asked for, whatever fault made them."""
    old_at = new_at = 0
    for directive in directives:
        kept = directive.start - old_at
        replacement_ids = directive.replacement_ids
        found = (*old_ids[old_at : directive.start], *replacement_ids)
        expected = tuple(new_ids[new_at : new_at + kept + len(replacement_ids)])
        if found != expected:
            raise PlanError(
                f"directive [{directive.start}, {directive.end}) does not lead to the new prompt; please report it",
                reason=Reason.INTERNAL_ERROR,
            )
        old_at, new_at = directive.end, new_at + kept + len(replacement_ids)
    rest = tuple(old_ids[old_at:])
    if rest != tuple(new_ids[new_at : new_at + len(rest)]):
        raise PlanError("the tail of the base is not in the new prompt; please report it", reason=Reason.INTERNAL_ERROR)
