"""From old and new token ids to the directives that turn one into the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from leyline_agent.core.alignment import TOKEN_BYTES, Run, align, num_equal, pack
from leyline_agent.core.protocol import Directive, Reason
from leyline_agent.errors import PlanError

_MAX_GROWTH = 16
"""By how many tokens a stub may be longer than what it stands for before the alignment is looked at again."""
_GRAM_TOKENS = 16
_MAX_GRAMS = 4096
_GRAMS_COST = 3
"""Units of the budget for each token that `_unique_grams` looks at."""
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
    old, new = pack(old_ids), pack(new_ids)
    runs = align(old, new, budget=budget)
    if _grows(runs):
        if _GRAMS_COST * (len(old_ids) + len(new_ids)) > budget:
            raise PlanError(
                f"diff of {len(old_ids)} old and {len(new_ids)} new tokens gave up: a budget of {budget} is too small "
                "to tell whether an old text stands further right now; raise it",
                reason=Reason.DIFF_BUDGET,
            )
        steady = align(old, new, budget=budget, max_growth=_MAX_GROWTH)
        runs = _truer(runs, steady, old, new)
    directives = _directives(len(old_ids), memoryview(new).cast("I"), runs)
    _check(old, new, directives)
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


def _truer(runs: list[Run], others: list[Run], old: bytes, new: bytes) -> list[Run]:
    """Return `others`, which keeps fewer tokens, if it is nevertheless how the prompt came about.

    A conversation grows at its end, so the base's last messages are still there: `runs` it is, if `others` loses
    them. Then grams decide that stand once in the base and once in the prompt, since they tell where a text went,
    however many equal ones there are: if `others` alone keeps the last messages, any of them that it alone has in
    place will do. Where both keep them, `others` must have more in place.
    """
    behind_runs, behind_others = (
        len(old) // TOKEN_BYTES - (kept[-1].old_end if kept else 0) for kept in (runs, others)
    )
    if behind_others > behind_runs + _TAIL_TOKENS:
        return runs
    same = runs[0].length if runs and runs[0].old == runs[0].new == 0 else 0
    places = _unique_grams(old, new, same)
    for_others = sum(_keeps(others, *place) > _keeps(runs, *place) for place in places)
    if behind_others < behind_runs - _TAIL_TOKENS:
        return others if for_others else runs
    for_runs = sum(_keeps(runs, *place) > _keeps(others, *place) for place in places)
    return others if for_others > for_runs else runs


def _keeps(runs: list[Run], old_at: int, new_at: int) -> bool:
    """Whether the gram at an old position is kept at this new one."""
    idx = bisect_right(runs, old_at, key=lambda run: run.old) - 1
    if idx < 0:
        return False
    run = runs[idx]
    return old_at + _GRAM_TOKENS <= run.old_end and new_at - old_at == run.new - run.old


def _unique_grams(old: bytes, new: bytes, same: int) -> list[tuple[int, int]]:
    """Return old and new positions behind the first `same` of grams that occur once in each.

    Only grams at every other old position are looked at, or fewer in a long text: a token that two texts do not share
    makes as many grams unique as a gram has tokens.
    """
    old, new = old[same * TOKEN_BYTES :], new[same * TOKEN_BYTES :]
    size = _GRAM_TOKENS * TOKEN_BYTES
    step = TOKEN_BYTES * max(2, len(old) // (TOKEN_BYTES * _MAX_GRAMS))
    num_old = dict.fromkeys((old[at : at + size] for at in range(0, len(old) - size + 1, step)), 0)
    new_places: dict[bytes, list[int]] = {gram: [] for gram in num_old}
    old_places: dict[bytes, int] = {}
    for at in range(0, len(old) - size + 1, TOKEN_BYTES):
        gram = old[at : at + size]
        if gram in num_old:
            num_old[gram] += 1
            old_places[gram] = at // TOKEN_BYTES
    for at in range(0, len(new) - size + 1, TOKEN_BYTES):
        found = new_places.get(new[at : at + size])
        if found is not None and len(found) < 2:
            found.append(at // TOKEN_BYTES)
    return [
        (same + old_places[gram], same + new_places[gram][0])
        for gram, count in num_old.items()
        if count == 1 and len(new_places[gram]) == 1
    ]


def _directives(old_tokens: int, new_ids: memoryview[int], runs: Sequence[Run]) -> list[Directive]:
    directives: list[Directive] = []
    old_at = new_at = 0
    for run in runs:
        if run.old > old_at or run.new > new_at:
            replacement_ids = tuple(new_ids[new_at : run.new])
            directives.append(Directive(start=old_at, end=run.old, replacement_ids=replacement_ids))
        old_at, new_at = run.old_end, run.new_end
    if old_at < old_tokens:
        directives.append(Directive(start=old_at, end=old_tokens))
    return directives


def _check(old: bytes, new: bytes, directives: list[Directive]) -> None:
    """Refuse directives that would serve another prompt than the one asked for, whatever fault made them."""
    old_at = new_at = 0
    for directive in directives:
        kept_tokens = directive.start - old_at
        kept_end = new_at + kept_tokens
        replacement = pack(directive.replacement_ids)
        new_tokens = len(directive.replacement_ids)
        is_kept = num_equal(old, old_at, new, new_at, kept_tokens) == kept_tokens
        if not is_kept or num_equal(replacement, 0, new, kept_end, new_tokens) != new_tokens:
            raise PlanError(
                f"directive [{directive.start}, {directive.end}) does not lead to the new prompt; please report it",
                reason=Reason.INTERNAL_ERROR,
            )
        old_at, new_at = directive.end, kept_end + new_tokens
    kept_tokens = len(old) // TOKEN_BYTES - old_at
    if num_equal(old, old_at, new, new_at, kept_tokens) != kept_tokens:
        raise PlanError("the tail of the base is not in the new prompt; please report it", reason=Reason.INTERNAL_ERROR)
