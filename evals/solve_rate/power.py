"""How many pairs of episodes it takes to see a difference of two solve rates with McNemar's exact test.

Computed, not approximated: over the number of discordant pairs, and over how they fall. Pairs are taken as independent;
seeds of one task are not, so a run needs rather more than this.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import stats

from evals.solve_rate.rows import SolveRateError

MAX_PAIRS = 100_000


def independent_discordance(base_rate: float, difference: float) -> float:
    """Return the share of discordant pairs if what one arm solves tells nothing about the other arm."""
    other_rate = base_rate + difference
    return base_rate * (1 - other_rate) + other_rate * (1 - base_rate)


def check_rates(base_rate: float, difference: float, discordance: float) -> None:
    """Check that there are such arms.

    Raises:
        SolveRateError: there are not.
    """
    other_rate = base_rate + difference
    if not 0 <= base_rate <= 1 or not 0 <= other_rate <= 1:
        raise SolveRateError(
            f"the rates would be {base_rate:.1%} and {other_rate:.1%}; expected both between 0% and 100%"
        )
    most = min(base_rate + other_rate, 2 - base_rate - other_rate)
    # A hair's breadth more, for what is computed from decimals.
    if not abs(difference) - 1e-9 <= discordance <= most + 1e-9:
        raise SolveRateError(
            f"discordance: got {discordance:.1%}; between rates of {base_rate:.1%} and {other_rate:.1%} it is at least "
            f"{abs(difference):.1%} and at most {most:.1%} of the pairs"
        )


def mcnemar_power(num_pairs: int, *, difference: float, discordance: float, alpha: float) -> float:
    """Return the probability that the test says p ≤ alpha, for arms with this true difference."""
    if discordance <= 0:
        return 0.0
    # Ten standard deviations: what is left out is below 1e-20.
    spread = 10 * math.sqrt(num_pairs * discordance * max(0.0, 1 - discordance)) + 1
    least, most = math.floor(num_pairs * discordance - spread), math.ceil(num_pairs * discordance + spread)
    discordant = np.arange(max(0, least), min(num_pairs, most) + 1)
    share_of_other = min(1.0, max(0.0, (discordance + difference) / (2 * discordance)))
    rejects = _rejection_rates(_room(num_pairs), share_of_other, alpha)[discordant]
    return float(stats.binom.pmf(discordant, num_pairs, min(1.0, discordance)) @ rejects)


def pairs_needed(*, difference: float, discordance: float, alpha: float, power: float) -> int:
    """Return the least number of pairs from which on the power does not fall below `power`.

    Raises:
        SolveRateError: there is no difference to see, or it takes more than `MAX_PAIRS` pairs.
    """
    if difference == 0:
        raise SolveRateError("a difference of 0 cannot be seen with any number of pairs")

    def enough(num_pairs: int) -> bool:
        return mcnemar_power(num_pairs, difference=difference, discordance=discordance, alpha=alpha) >= power

    low, high = 0, 1
    while not enough(high):
        low, high = high, 2 * high
        if high > MAX_PAIRS:
            raise SolveRateError(f"that takes more than {MAX_PAIRS:,} pairs")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    # An exact test's power has teeth: with a pair more the limit may move, and the power falls a little. The bisection
    # ended at one of them; the last one that falls below is at most a few per cent further.
    ahead = range(high, high + max(30, high // 20))
    return max((num_pairs + 1 for num_pairs in ahead if not enough(num_pairs)), default=high)


def _room(num_pairs: int) -> int:
    """Return a power of two of at least that many pairs, so that few tables are made."""
    return 1 << num_pairs.bit_length()


@lru_cache(maxsize=32)
def _rejection_rates(max_discordant: int, share_of_other: float, alpha: float) -> npt.NDArray[np.float64]:
    """Return for each number of discordant pairs how often the test rejects."""
    discordant = np.arange(max_discordant + 1)
    # The most that the smaller side may have: the largest k with 2 · P(X ≤ k) ≤ alpha, X ~ Binomial(n, 1/2). `ppf` is
    # the least k with P(X ≤ k) ≥ alpha / 2, so it is that, or one more.
    limit = stats.binom.ppf(alpha / 2, discordant, 0.5)
    limit = np.where(stats.binom.cdf(limit, discordant, 0.5) * 2 <= alpha, limit, limit - 1)
    few_of_other = stats.binom.cdf(limit, discordant, share_of_other)
    few_of_base = stats.binom.cdf(limit, discordant, 1 - share_of_other)
    rates: npt.NDArray[np.float64] = np.where(limit >= 0, few_of_other + few_of_base, 0.0)
    return rates
