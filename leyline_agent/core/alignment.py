"""Which runs of an old token sequence a new one still holds, in order: the search behind `diff.py`.

The sequences are mostly equal, a few thousand tokens are gone here and there, and any stretch may occur many times.
So no shortest edit script is wanted (its cost grows with the square of what was removed) but the chain of equal runs
that saves most:

1. *Seeds.* Every few tokens of the old sequence a gram goes into a dictionary; the new one is scanned for them. A hit
   is extended both ways to a maximal run, and the scan goes on behind it, so equal text costs a few slice comparisons.
2. *Chain.* Of the maximal runs, which overlap and contradict each other where text repeats, the best chain in both
   orders is taken. A run may be cut at its head, and costs what its directive will cost the server.
3. *Again* between the runs of the chain, with shorter grams.

Sequences are `bytes` of uint32, since slicing, hashing and comparing those runs at C speed. Lengths and positions are
in tokens everywhere. Knows nothing of directives.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple

from leyline_agent.core.protocol import Reason
from leyline_agent.errors import PlanError

DIRECTIVE_COST = 4
"""What one more directive is taken to cost, in prefilled tokens: it is checked, logged and reported."""
REPLACEMENT_COST = 16
"""What a non-empty replacement costs beside its tokens: a prefill of its own, whatever its length.

Together with `DIRECTIVE_COST` the shortest run worth keeping between two replacements. On a GPU a prefill's fixed part
is worth more tokens than this; a larger value would give up the short messages that stand between evicted outputs.
"""

_FORBIDDEN = 1 << 40
TOKEN_BYTES = 4
_TOKEN_BITS = 8 * TOKEN_BYTES
_HIGHEST_BYTE = 3 if sys.byteorder == "little" else 0
# (gram, step) of each round: runs of gram + step - 1 tokens are sure to hold a gram at a step. Long grams first, since
# they are unique in text where short ones are everywhere; the last finds all that is worth keeping (19 < 4 + 16).
_ROUNDS = ((32, 32), (12, 8))
_SURE_TOKENS = 20
# Places of one gram that are extended, around the old position where the last run ended. More only cost time: where a
# gram occurs more often, its places mostly lead to the same number of kept tokens.
_PLACES_BEFORE, _PLACES_AFTER = 2, 6
# Runs that contradict each other are compared pairwise. The longest go in first; what they leave out is found between
# them, a round later.
_CHAIN_RUNS = 96

# In larger pieces each is memory that the system has to be asked for.
_COMPARED_BYTES = 1 << 16

# Weights of the budget, so that a unit is about 0.1 microseconds whatever the input.
_LOOKUP_COST, _EXTEND_COST, _PAIR_COST = 2, 64, 4
_FIND_TOKENS = 64  # searched in one unit


class Run(NamedTuple):
    """`length` tokens that are equal from `old` in the old sequence and from `new` in the new one."""

    old: int
    new: int
    length: int

    @property
    def old_end(self) -> int:
        """Position behind the run in the old sequence."""
        return self.old + self.length

    @property
    def new_end(self) -> int:
        """Position behind the run in the new sequence."""
        return self.new + self.length


class _Region(NamedTuple):
    """Unaligned stretches facing each other."""

    old: int
    old_end: int
    new: int
    new_end: int
    is_open: bool
    """Nothing that is kept stands to its right, so that new tokens there are no replacement but the prompt's rest."""


def align(old: bytes, new: bytes, *, budget: int, max_growth: int | None = None) -> list[Run]:
    """Return the runs of `old` worth keeping, sorted and disjoint in both sequences, which `pack` has made.

    A common prefix, however short, is always the first of them. With `max_growth` no run is kept behind new tokens
    that outnumber by more than this the old ones they stand for.

    Raises:
        PlanError: with reason `diff_budget` after about `budget` tenths of a microsecond of work.
    """
    return _Aligner(old, new, budget, max_growth).align()


def pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids as uint32: those of an array of these, or of int32, at memory speed.

    Raises:
        PlanError: with reason `token_out_of_vocabulary` for an id that is no uint32.
    """
    if isinstance(token_ids, array) and token_ids.typecode in ("i", "I"):
        copied = token_ids.tobytes()
        # The highest byte of a negative one is no ASCII.
        if token_ids.typecode == "I" or copied[_HIGHEST_BYTE::TOKEN_BYTES].isascii():
            return copied
    try:
        packed = array("I", token_ids)
    except OverflowError as error:
        raise PlanError(
            f"token ids lie between 0 and 2**32, got {min(token_ids)} to {max(token_ids)}",
            reason=Reason.TOKEN_OUT_OF_VOCABULARY,
        ) from error
    assert packed.itemsize == TOKEN_BYTES
    return packed.tobytes()


class _Aligner:
    def __init__(self, old: bytes, new: bytes, budget: int, max_growth: int | None) -> None:
        self.max_growth = max_growth
        self.old_tokens, self.new_tokens = len(old) // TOKEN_BYTES, len(new) // TOKEN_BYTES
        self.old, self.new = old, new
        self.budget = self.left = budget

    def align(self) -> list[Run]:
        prefix = Run(0, 0, num_equal(self.old, 0, self.new, 0, min(self.old_tokens, self.new_tokens)))
        whole = _Region(prefix.length, self.old_tokens, prefix.length, self.new_tokens, is_open=True)
        runs: list[Run] = []
        pending = [(whole, 0)]
        while pending:
            region, round_idx = pending.pop()
            found = self._maximal_runs(region, *_ROUNDS[round_idx])
            # Runs that do not contradict each other are chained at once, however many.
            chain = self._best_chain(found if _is_in_order(found) else _longest_runs(found), region)
            runs.extend(chain)
            gram = _ROUNDS[round_idx][0]
            # From left to right, as the gaps are.
            left_out = sorted(set(found).difference(chain), key=lambda run: run.new, reverse=True) if chain else []
            reach = 0
            for gap in _gaps(chain, region):
                while left_out and left_out[-1].new <= gap.new_end - gram:
                    reach = max(reach, left_out.pop().new_end)
                # One of them has a gram in the gap.
                again = reach - gram >= gap.new and gap.new_end - gram >= gap.new
                next_round = round_idx if again else round_idx + 1
                if next_round < len(_ROUNDS):
                    pending.append((gap, next_round))
        runs.sort()
        runs.extend([run for gap in _gaps(runs, whole) for run in self._moved_whole(gap)])
        runs.sort()
        return [prefix, *runs] if prefix.length else runs

    def _maximal_runs(self, region: _Region, gram: int, step: int) -> list[Run]:
        """Return the runs of at least `gram` tokens that a scan of the region's new side meets."""
        old, new, gram_bytes = self.old, self.new, gram * TOKEN_BYTES
        if min(region.old_end - region.old, region.new_end - region.new) < gram:
            return []
        # Nearly every gram has one place: a list for each would be most of what a diff makes, and Python's garbage
        # collector would go over them.
        first_of: dict[bytes, int] = {}
        places_of: dict[bytes, list[int]] = {}
        for place in range(region.old, region.old_end - gram + 1, step):
            at = place * TOKEN_BYTES
            key = old[at : at + gram_bytes]
            first = first_of.setdefault(key, place)
            if first != place:
                places_of.setdefault(key, [first]).append(place)
        self._spend(_LOOKUP_COST * (region.old_end - region.old) // step)

        runs: list[Run] = []
        # A diagonal is old minus new position. The last run on each, so that no run is extended twice.
        last_on: dict[int, Run] = {}
        old_at, position = region.old, region.new
        last = region.new_end - gram
        while position <= last:
            scan_start = position
            first_met = None
            for at in range(position * TOKEN_BYTES, last * TOKEN_BYTES + 1, TOKEN_BYTES):
                key = new[at : at + gram_bytes]
                first_met = first_of.get(key)
                if first_met is not None:
                    break
            position = last + 1 if first_met is None else at // TOKEN_BYTES
            self._spend(_LOOKUP_COST * (position - scan_start + 1))
            if first_met is None:
                break
            places = places_of.get(key) or [first_met]
            middle = bisect_left(places, old_at)
            near = places[max(0, middle - _PLACES_BEFORE) : middle + _PLACES_AFTER]
            # Steps meet one phase of text that repeats with another period only now and then.
            off_step = self._find(
                position, gram, old_at, places[middle] + gram - 1 if middle < len(places) else region.old_end
            )
            if off_step is not None:
                near.append(off_step)
            met: list[Run] = []
            for place in near:
                run = last_on.get(place - position)
                if run is None or run.new_end <= position:
                    run = last_on[place - position] = self._extended(place, position, region)
                    runs.append(run)
                met.append(run)
            old_at, position = _longest(met, behind=old_at - position)
        return runs

    def _extended(self, old_at: int, new_at: int, region: _Region) -> Run:
        """Return the maximal run through a pair of equal tokens, within the region."""
        self._spend(_EXTEND_COST)
        behind = num_equal(self.old, old_at, self.new, new_at, min(region.old_end - old_at, region.new_end - new_at))
        before = _common_suffix(self.old, old_at, self.new, new_at, min(old_at - region.old, new_at - region.new))
        return Run(old_at - before, new_at - before, before + behind)

    def _best_chain(self, runs: list[Run], region: _Region) -> list[Run]:
        """Return the runs that keep most for what they cost, cut at their heads so that none overlap."""
        # A run cut at its head keeps its end, so ends put the members of any chain in order.
        runs = sorted(runs, key=lambda run: (run.new_end, run.old_end))
        old_ends, new_ends = [run.old_end for run in runs], [run.new_end for run in runs]
        # Per run: score of the best chain that ends in it, index of the run before it there, tokens cut from its head.
        scores: list[int] = []
        befores: list[int | None] = []
        cuts: list[int] = []
        # Per run: the best score of it and all before it.
        bests: list[int] = []
        num_pairs = 0
        for idx, run in enumerate(runs):
            old_at, new_at, length = run
            best_score = length - self._gap_cost(old_at - region.old, new_at - region.new)
            best_idx: int | None = None
            best_cut = 0
            before_idx = idx
            # From the nearest on, until none can be better; of equal ones the first in order is taken.
            while before_idx and bests[before_idx - 1] + length >= best_score:
                before_idx -= 1
                old_gap, new_gap = old_at - old_ends[before_idx], new_at - new_ends[before_idx]
                cut = 0
                if old_gap < 0 or new_gap < 0:
                    cut = max(-old_gap, -new_gap)
                    if cut >= length:
                        continue
                score = scores[before_idx] + length - cut - self._gap_cost(old_gap + cut, new_gap + cut)
                if score > best_score or (score == best_score and best_idx is not None):
                    best_score, best_idx, best_cut = score, before_idx, cut
            num_pairs += idx - before_idx
            if num_pairs > _CHAIN_RUNS * len(runs):
                return self._best_chain(_longest_runs(runs), region)
            self._spend(_PAIR_COST * (idx - before_idx))
            scores.append(best_score)
            befores.append(best_idx)
            cuts.append(best_cut)
            bests.append(max(best_score, bests[-1]) if bests else best_score)

        best_score = -self._end_cost(region.old, region.new, region)
        last_idx: int | None = None
        for idx, (ending, old_end, new_end) in enumerate(zip(scores, old_ends, new_ends, strict=True)):
            score = ending - self._end_cost(old_end, new_end, region)
            if score > best_score:
                best_score, last_idx = score, idx
        chain: list[Run] = []
        while last_idx is not None:
            run = runs[last_idx]
            cut, last_idx = cuts[last_idx], befores[last_idx]
            chain.append(Run(run.old + cut, run.new + cut, run.length - cut))
        chain.reverse()
        return chain

    def _gap_cost(self, old_gap: int, new_gap: int) -> int:
        """Return what the directive between two runs costs beside the tokens of its replacement."""
        if self.max_growth is not None and new_gap - old_gap > self.max_growth:
            return _FORBIDDEN
        if new_gap:
            return DIRECTIVE_COST + REPLACEMENT_COST
        return DIRECTIVE_COST if old_gap else 0

    def _end_cost(self, old_at: int, new_at: int, region: _Region) -> int:
        """Return the cost of the gap between a position and the region's end."""
        return self._gap_cost(region.old_end - old_at, 0 if region.is_open else region.new_end - new_at)

    def _moved_whole(self, gap: _Region) -> list[Run]:
        """Return the old tokens that a short replacement repeats as a whole, which saves its prefill.

        Such as a short message between two dropped ones: too short to hold a gram at a step.
        """
        length = gap.new_end - gap.new
        if gap.is_open or not 0 < length < min(_SURE_TOKENS, gap.old_end - gap.old):
            return []
        found = self._find(gap.new, length, gap.old, gap.old_end)
        return [] if found is None else [Run(found, gap.new, length)]

    def _find(self, new_at: int, length: int, old_at: int, old_end: int) -> int | None:
        """Return where the `length` tokens at `new_at` first stand as a whole in the old `[old_at, old_end)`."""
        wanted = self.new[new_at * TOKEN_BYTES : (new_at + length) * TOKEN_BYTES]
        at = old_at * TOKEN_BYTES
        while (at := self.old.find(wanted, at, old_end * TOKEN_BYTES)) >= 0:
            if at % TOKEN_BYTES == 0:
                break
            at += 1
        self._spend((max(old_end, old_at) - old_at) // _FIND_TOKENS)
        return at // TOKEN_BYTES if at >= 0 else None

    def _spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise PlanError(
                f"diff of {self.old_tokens} old and {self.new_tokens} new tokens gave up after a budget of "
                f"{self.budget} comparisons; they have too little in common, so let the prompt be prefilled again or "
                "raise the budget",
                reason=Reason.DIFF_BUDGET,
            )


def num_equal(a: bytes, a_at: int, b: bytes, b_at: int, limit: int) -> int:
    """Return how many tokens, at most `limit`, are equal from `a_at` and `b_at` on."""
    a_at, b_at = a_at * TOKEN_BYTES, b_at * TOKEN_BYTES
    for low, high in _pieces(limit):
        left, right = a[a_at + low : a_at + high], b[b_at + low : b_at + high]
        if left != right:
            differing = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
            return low // TOKEN_BYTES + ((differing & -differing).bit_length() - 1) // _TOKEN_BITS
    return limit


def _common_suffix(a: bytes, a_end: int, b: bytes, b_end: int, limit: int) -> int:
    """Return how many tokens, at most `limit`, are equal right before `a_end` and `b_end`."""
    a_end, b_end = a_end * TOKEN_BYTES, b_end * TOKEN_BYTES
    for low, high in _pieces(limit):
        left, right = a[a_end - high : a_end - low], b[b_end - high : b_end - low]
        if left != right:
            differing = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
            return high // TOKEN_BYTES - -(-differing.bit_length() // _TOKEN_BITS)
    return limit


def _pieces(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes at which pieces of so many tokens start and end: short ones first, as most runs are."""
    low, size = 0, 16 * TOKEN_BYTES
    while low < num_tokens * TOKEN_BYTES:
        high = min(low + size, num_tokens * TOKEN_BYTES)
        yield low, high
        low, size = high, min(2 * size, _COMPARED_BYTES)


def _longest(runs: list[Run], *, behind: int) -> tuple[int, int]:
    """Return where the run ends that reaches farthest, in the old and the new sequence.

    Of several the first on a diagonal of `behind` or more, which leaves most of the old sequence for what follows.
    """
    best = max(runs, key=lambda run: (run.new_end, run.old - run.new >= behind, run.new - run.old))
    return best.old_end, best.new_end


def _longest_runs(runs: list[Run]) -> list[Run]:
    return nlargest(_CHAIN_RUNS, runs, key=lambda run: run.length)


def _is_in_order(runs: list[Run]) -> bool:
    """Tell whether each run lies behind the one before it in both sequences."""
    return all(before.old_end <= run.old and before.new_end <= run.new for before, run in itertools.pairwise(runs))


def _gaps(chain: list[Run], region: _Region) -> Iterator[_Region]:
    """Yield what the chain leaves of the region, one more gap than it has runs."""
    old_at, new_at = region.old, region.new
    for run in chain:
        yield _Region(old_at, run.old, new_at, run.new, is_open=False)
        old_at, new_at = run.old_end, run.new_end
    yield _Region(old_at, region.old_end, new_at, region.new_end, region.is_open)
