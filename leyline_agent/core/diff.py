"""From old and new token ids to the directives that turn one into the other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from leyline_agent.core.alignment import Run, align
from leyline_agent.core.protocol import Directive, Reason
from leyline_agent.errors import PlanError

_TRANSPOSED_TOKENS = 24
"""From this length on, text that stands left of a kept run in the prompt and right of it in the base has changed
places with it. Shorter ones are a template's own words, which stand everywhere."""
_GRAM_TOKENS = _TRANSPOSED_TOKENS // 2
_MAX_ROUNDS = 8
_NO_TOKEN = 2**32 - 1


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
    directives = _directives(old_ids, new_ids, align(old_ids, new_ids, budget=budget))
    masked = list(old_ids)
    for _ in range(_MAX_ROUNDS):
        transposed = _transposed(old_ids, directives)
        if not transposed:
            break
        for start, end in transposed:
            masked[start:end] = [_NO_TOKEN] * (end - start)
        directives = _directives(old_ids, new_ids, align(masked, new_ids, budget=budget))
    _check(old_ids, new_ids, directives)
    return directives


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


def _transposed(old_ids: Sequence[int], directives: Sequence[Directive]) -> list[tuple[int, int]]:
    """Return the kept runs, as spans of the base, that changed places with text which stays to the prompt's left.

    Such text is in a replacement, and in the base it was removed further right. It is the text that keeps its place:
    a conversation grows at its end, so what is new there was appended, and nothing moves to the left.
    """
    removed_right: dict[tuple[int, ...], int] = {}
    transposed: list[tuple[int, int]] = []
    for idx in range(len(directives) - 1, -1, -1):
        replacement_ids = directives[idx].replacement_ids
        found = _shared_at(old_ids, replacement_ids, removed_right)
        if found is not None:
            for left, right in zip(directives[idx:], directives[idx + 1 :], strict=False):
                if left.end < right.start <= found:
                    transposed.append((left.end, right.start))
        start, end = directives[idx].start, directives[idx].end
        for at in range(start, end - _GRAM_TOKENS + 1, _GRAM_TOKENS):
            removed_right[tuple(old_ids[at : at + _GRAM_TOKENS])] = at
    return transposed


def _shared_at(old_ids: Sequence[int], replacement_ids: Sequence[int], grams: dict[tuple[int, ...], int]) -> int | None:
    """Return where in the base a stretch of the replacement of `_TRANSPOSED_TOKENS` or more stands, or None."""
    if len(replacement_ids) < _TRANSPOSED_TOKENS or not grams:
        return None
    for at in range(len(replacement_ids) - _GRAM_TOKENS + 1):
        old_at = grams.get(tuple(replacement_ids[at : at + _GRAM_TOKENS]))
        if old_at is None:
            continue
        before, after = 0, _GRAM_TOKENS
        while before < min(at, old_at) and replacement_ids[at - before - 1] == old_ids[old_at - before - 1]:
            before += 1
        while (
            at + after < len(replacement_ids)
            and old_at + after < len(old_ids)
            and replacement_ids[at + after] == old_ids[old_at + after]
        ):
            after += 1
        if before + after >= _TRANSPOSED_TOKENS and _has_unique_gram(old_ids, old_at - before, old_at + after):
            return old_at - before
    return None


def _has_unique_gram(old_ids: Sequence[int], start: int, end: int) -> bool:
    """Whether a stretch of the base is told from the rest of it by any gram; in repeating text none is."""
    packed = array("I", old_ids).tobytes()
    size = array("I").itemsize
    for at in range(start, end - _GRAM_TOKENS + 1, _GRAM_TOKENS):
        gram = packed[at * size : (at + _GRAM_TOKENS) * size]
        places, found = 0, packed.find(gram)
        while found >= 0 and places < 2:
            places += found % size == 0
            found = packed.find(gram, found + 1)
        if places == 1:
            return True
    return False


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
