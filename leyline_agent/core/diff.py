"""From old and new token ids to the directives that turn one into the other."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from leyline_agent.core.alignment import Run, align
from leyline_agent.core.protocol import Directive, Reason
from leyline_agent.errors import PlanError

_MAX_GROWTH = 16
"""By how many tokens a stub may be longer than what it stands for before the alignment is looked at again."""
_GRAM_TOKENS = 16
_TAIL_TOKENS = 32
"""What may differ at the end of a base without meaning anything: a few generated tokens, a template's own words."""


def diff_token_ids(old_ids: Sequence[int], new_ids: Sequence[int], *, budget: int = 4_000_000) -> list[Directive]:
    """Return amortizing directives whose application to `old_ids` gives exactly a prefix of `new_ids`.

    They are sorted and disjoint, and none is empty. What follows the last kept run in `new_ids` is prefilled with the
    rest of the prompt and is in no directive, so an append-only change has none. Old tokens behind the last kept run
    are removed by a last directive with an empty replacement.

    A kept token keeps its place in the history. Where an output was evicted and a new, equal one stands further right,
    behind messages that were there before, the new one is not served from the rows of the old: those never saw what
    lies in between, and reading it again is what the model did on purpose.

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
    if _grows(runs):
        steady = align(old_ids, new_ids, budget=budget, max_growth=_MAX_GROWTH)
        runs = _truer(runs, steady, old_ids, new_ids)
    directives = _directives(old_ids, new_ids, runs)
    _check(old_ids, new_ids, directives)
    return directives


def _grows(runs: Sequence[Run]) -> bool:
    """Whether a run is kept behind many more new tokens than old ones, as if a text had been put in before it.

    That is how it looks where an evicted output comes again further right: most tokens are kept if the old one moves
    there and all that lies in between is put in anew.
    """
    old_at = new_at = 0
    for run in runs:
        if (run.new - new_at) - (run.old - old_at) > _MAX_GROWTH:
            return True
        old_at, new_at = run.old_end, run.new_end
    return False


def _truer(runs: list[Run], others: list[Run], old_ids: Sequence[int], new_ids: Sequence[int]) -> list[Run]:
    """Return `others`, which keeps fewer tokens, if it is nevertheless how the prompt came about.

    What says so are grams that stand once in the base and once in the prompt: they tell where a text went, however
    many equal ones there are. A conversation grows at its end, so the base's last messages are still there: if
    `others` alone keeps them, any such gram will do. Where both keep them, `others` must have more in place.
    """
    start = runs[0].length if runs and not runs[0].old and not runs[0].new else 0
    old_places, new_places = _unique_grams(old_ids, start), _unique_grams(new_ids, start)
    places = [(old_places[gram], new_places[gram]) for gram in old_places.keys() & new_places.keys()]
    in_runs, in_others = _in_place(runs, places), _in_place(others, places)
    behind_runs, behind_others = (len(old_ids) - (kept[-1].old_end if kept else 0) for kept in (runs, others))
    if abs(behind_runs - behind_others) > _TAIL_TOKENS:
        return others if behind_others < behind_runs and in_others - in_runs else runs
    return others if len(in_others) > len(in_runs) else runs


def _unique_grams(token_ids: Sequence[int], start: int) -> dict[bytes, int]:
    """Return the grams from `start` on that occur once, and where."""
    packed = array("I", token_ids)
    size, raw = packed.itemsize, packed.tobytes()
    places: dict[bytes, int] = {}
    for at in range(start, len(packed) - _GRAM_TOKENS + 1):
        gram = raw[at * size : (at + _GRAM_TOKENS) * size]
        places[gram] = -1 if gram in places else at
    return {gram: at for gram, at in places.items() if at >= 0}


def _in_place(runs: list[Run], places: list[tuple[int, int]]) -> set[int]:
    """Return the old positions of those pairs of old and new positions that lie in one of the runs."""
    starts = [run.old for run in runs]
    in_place: set[int] = set()
    for old_at, new_at in places:
        idx = bisect_right(starts, old_at) - 1
        if idx >= 0:
            run = runs[idx]
            if old_at + _GRAM_TOKENS <= run.old_end and new_at - old_at == run.new - run.old:
                in_place.add(old_at)
    return in_place


def _directives(old_ids: Sequence[int], new_ids: Sequence[int], runs: Sequence[Run]) -> list[Directive]:
    directives: list[Directive] = []
    old_at = new_at = 0
    for run in runs:
        if run.old > old_at or run.new > new_at:
            replacement_ids = tuple(new_ids[new_at : run.new])
            directives.append(Directive(start=old_at, end=run.old, replacement_ids=replacement_ids))
        old_at, new_at = run.old_end, run.new_end
    if old_at < len(old_ids):
        directives.append(Directive(start=old_at, end=len(old_ids)))
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
