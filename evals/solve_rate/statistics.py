"""What solve rates can and cannot tell apart: intervals, an exact paired test, a bootstrap over tasks. Pure arithmetic.

The distributions are scipy's. An episode of one arm is paired with that of the other arm that had the same task and
seed. Seeds of one task are no independent draws of tasks, so three things are looked at: McNemar's test, in which each
pair counts for itself, and a bootstrap and a test by signs, to which a task with all its seeds is one thing. See
`is_distinguishable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from scipy import stats

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000

Pair = tuple[bool, bool]
"""Whether the base arm solved it, and whether the other one did."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Both ends belong to it."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The other arm's solve rate less the base's, over pairs of episodes."""

    num_tasks: int
    both: int
    only_base: int
    only_other: int
    neither: int
    p_value: float
    """Of McNemar's exact test, two-sided."""
    interval: Interval | None
    """Of the difference, by the bootstrap over tasks; None with fewer than two tasks."""
    p_value_of_tasks: float
    """Of the test by signs, two-sided: how often the gains of tasks, each with a sign by a coin's toss, add up to as
    much."""

    @property
    def num_pairs(self) -> int:
        """Return the number of pairs."""
        return self.both + self.only_base + self.only_other + self.neither

    @property
    def base_rate(self) -> float:
        """Return the share of pairs that the base arm solved."""
        return (self.both + self.only_base) / self.num_pairs

    @property
    def other_rate(self) -> float:
        """Return the share of pairs that the other arm solved."""
        return (self.both + self.only_other) / self.num_pairs

    @property
    def difference(self) -> float:
        """Return the difference of the two rates."""
        return (self.only_other - self.only_base) / self.num_pairs

    @property
    def discordance(self) -> float:
        """Return the share of pairs that one arm solved and the other did not."""
        return (self.only_other + self.only_base) / self.num_pairs


def wilson(num_solved: int, num_episodes: int) -> Interval | None:
    """Return Wilson's 95% interval of a rate, without continuity correction; None without episodes."""
    if num_episodes == 0:
        return None
    interval = stats.binomtest(num_solved, num_episodes).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(float(interval.low), float(interval.high))


def mcnemar(only_base: int, only_other: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: among discordant pairs either side is a coin's toss."""
    discordant = only_base + only_other
    return float(stats.binomtest(only_base, discordant, 0.5).pvalue) if discordant else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for having been looked at together, after Holm; in the order given."""
    order = sorted(range(len(p_values)), key=lambda idx: p_values[idx])
    scaled = [min(1.0, p_values[idx] * (len(order) - rank)) for rank, idx in enumerate(order)]
    by_idx = dict(zip(order, accumulate(scaled, max), strict=True))
    return [by_idx[idx] for idx in range(len(p_values))]


def paired_difference(
    pairs: Mapping[str, Sequence[Pair]], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> PairedDifference | None:
    """Compare two arms over the pairs of each task; the same seed gives the same interval. None without pairs."""
    by_task = {task: list(of_task) for task, of_task in sorted(pairs.items()) if of_task}
    every = [pair for of_task in by_task.values() for pair in of_task]
    if not every:
        return None
    only_base, only_other = every.count((True, False)), every.count((False, True))
    return PairedDifference(
        num_tasks=len(by_task),
        both=every.count((True, True)),
        only_base=only_base,
        only_other=only_other,
        neither=every.count((False, False)),
        p_value=mcnemar(only_base, only_other),
        interval=_bootstrap_over_tasks(list(by_task.values()), seed, num_resamples),
        p_value_of_tasks=_signs_of_tasks(list(by_task.values()), seed),
    )


def is_distinguishable(difference: PairedDifference, adjusted_p_value: float) -> bool:
    """Tell whether two arms differ by more than chance would have it.

    All must say so. McNemar's test alone takes the seeds of a task for as many tasks; the bootstrap is too sure of
    itself with ten tasks or fewer. The test by signs is neither; it needs six tasks.
    """
    interval, most = difference.interval, 1 - CONFIDENCE + 1e-12
    is_apart = interval is not None and not interval.low <= 0 <= interval.high
    return is_apart and adjusted_p_value <= most and difference.p_value_of_tasks <= most


def _gains(tasks: Sequence[Sequence[Pair]]) -> npt.NDArray[np.int_]:
    """Return how many more pairs of each task the other arm solved."""
    return np.array([sum(int(other) - int(base) for base, other in pairs) for pairs in tasks])


def _signs_of_tasks(tasks: Sequence[Sequence[Pair]], seed: int) -> float:
    # Tasks without a gain have no sign. Up to thirteen with one it is exact.
    gains = _gains(tasks)
    gains = gains[gains != 0]
    if len(gains) < 2:
        return 1.0
    tossed = stats.permutation_test(
        (gains,), np.sum, permutation_type="samples", n_resamples=NUM_RESAMPLES, rng=np.random.default_rng(seed)
    )
    return float(tossed.pvalue)


def _bootstrap_over_tasks(tasks: Sequence[Sequence[Pair]], seed: int, num_resamples: int) -> Interval | None:
    """Return the percentile interval of the difference, with tasks drawn and the pairs in each kept."""
    if len(tasks) < 2:
        return None
    gains = _gains(tasks)
    counts = np.array([len(pairs) for pairs in tasks])
    drawn = stats.bootstrap(
        (gains, counts),
        lambda gains, counts, axis: gains.sum(axis=axis) / counts.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=num_resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(drawn.low), float(drawn.high))
