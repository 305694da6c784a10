"""Intervals and tests against values that statsmodels gives, the bootstrap against its exact distribution."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction
from math import comb

import pytest

from evals.solve_rate.power import check_rates, independent_discordance, mcnemar_power, pairs_needed
from evals.solve_rate.rows import SolveRateError
from evals.solve_rate.statistics import Interval, Pair, holm, is_distinguishable, mcnemar, paired_difference, wilson

BOTH, BASE, OTHER, NEITHER = (True, True), (True, False), (False, True), (False, False)


# statsmodels 0.15.0: proportion_confint(solved, episodes, method="wilson"). 81 of 263, 15 of 148, 0 of 20 and 1 of 29
# are the examples of Newcombe, "Two-sided confidence intervals for the single proportion", Stat. Med. 17 (1998),
# table I, method 3, which has four digits of them.
@pytest.mark.parametrize(
    ("solved", "episodes", "low", "high"),
    [
        (5, 16, 0.1416464385, 0.5559564417),
        (5, 11, 0.2127127162, 0.7199084626),
        (0, 10, 0.0, 0.2775327999),
        (10, 10, 0.7224672001, 1.0),
        (81, 263, 0.2552885199, 0.366209577),
        (15, 148, 0.0623863995, 0.1604872417),
        (0, 20, 0.0, 0.1611252),
        (1, 29, 0.0061132143, 0.1717552188),
    ],
)
def test_wilsons_interval(solved: int, episodes: int, low: float, high: float) -> None:
    interval = wilson(solved, episodes)
    assert interval is not None
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-7), pytest.approx(high, abs=1e-7))


def test_without_episodes_there_is_no_interval() -> None:
    assert wilson(0, 0) is None


# statsmodels 0.15.0: mcnemar([[30, b], [c, 20]], exact=True).
@pytest.mark.parametrize(
    ("only_base", "only_other", "p_value"),
    [
        (0, 0, 1.0),
        (0, 5, 0.0625),
        (0, 6, 0.03125),
        (2, 10, 0.03857421875),
        (5, 15, 0.04138946533203125),
        (20, 9, 0.06142834573984146),
        (7, 7, 1.0),
        (121, 59, 4.4344492637551645e-06),
    ],
)
def test_mcnemars_exact_test(only_base: int, only_other: int, p_value: float) -> None:
    assert mcnemar(only_base, only_other) == pytest.approx(p_value, rel=1e-9)
    assert mcnemar(only_other, only_base) == pytest.approx(p_value, rel=1e-9)


def test_p_values_adjusted_after_holm() -> None:
    # statsmodels 0.15.0: multipletests(..., method="holm").
    assert holm([0.01, 0.04, 0.03, 0.005, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def _exact_interval(gains: list[int], count: int) -> Interval:
    """Return the 2.5% and 97.5% points of the mean gain of tasks that are drawn anew, each with `count` pairs."""
    sums = Counter({0: Fraction(1)})
    for _ in gains:
        drawn: Counter[int] = Counter()
        for (total, weight), gain in itertools.product(sums.items(), gains):
            drawn[total + gain] += weight / len(gains)
        sums = drawn
    ordered = sorted(sums)
    below = list(itertools.accumulate(sums[total] for total in ordered))
    ends = [next(total for total, share in zip(ordered, below, strict=True) if share >= p) for p in (0.025, 0.975)]
    return Interval(ends[0] / (count * len(gains)), ends[1] / (count * len(gains)))


def _task(gain: int) -> list[Pair]:
    """Return five pairs of a task of which the other arm solves `gain` more."""
    return [OTHER if gain > 0 else BASE] * abs(gain) + [BOTH, NEITHER, BOTH, NEITHER, BOTH][: 5 - abs(gain)]


@pytest.mark.parametrize("gains", [[2, 0, -1, 3, 0, 0, 1, 1], [5, 0, 0, 0, 0, 0, 0, 0], [-2, 4, 1]], ids=str)
def test_the_bootstrap_is_over_tasks(gains: list[int]) -> None:
    pairs = {f"task {idx}": _task(gain) for idx, gain in enumerate(gains)}
    found = paired_difference(pairs, num_resamples=20_000)
    exact = _exact_interval(gains, 5)
    assert found is not None
    assert found.interval is not None
    # One step of the mean: a quantile of 20,000 draws may fall beside the exact one where that is close to an edge.
    step = 1 / (5 * len(gains)) + 1e-9
    assert found.interval.low == pytest.approx(exact.low, abs=step)
    assert found.interval.high == pytest.approx(exact.high, abs=step)


def test_seeds_of_a_task_stay_together() -> None:
    # The same 40 pairs, in 4 tasks that each agree with themselves and in 8 that are all alike: over tasks the first
    # say little, and over pairs both would say the same.
    apart = paired_difference({"a": [OTHER] * 10, "b": [BASE] * 10, "c": [NEITHER] * 10, "d": [NEITHER] * 10})
    alike = paired_difference({str(idx): [*_task(0)[:3], OTHER, BASE] for idx in range(8)})
    assert apart is not None
    assert alike is not None
    assert apart.difference == alike.difference == 0
    # Three of four draws the same side or more: 9 in 256, above 2.5%.
    assert apart.interval == Interval(-0.75, 0.75)
    assert alike.interval == Interval(0, 0)


def test_tasks_with_more_pairs_weigh_more() -> None:
    found = paired_difference({f"{idx}": [OTHER] * 9 if idx < 4 else [NEITHER] for idx in range(8)})
    assert found is not None
    assert found.difference == 0.9
    # Of eight draws one to seven are of the large tasks in 99.2%, and two to six in 93%.
    assert found.interval == Interval(9 / 16, 63 / 64)


def test_the_same_seed_gives_the_same_interval_whatever_the_order() -> None:
    rng = random.Random(1)
    # Different numbers of pairs and few resamples, so that another draw gives another interval.
    pairs = {str(idx): [(rng.random() < 0.3, rng.random() < 0.45) for _ in range(5 + idx)] for idx in range(12)}
    backwards = dict(reversed(pairs.items()))
    first, again, other = (
        paired_difference(given, seed=seed, num_resamples=50)
        for given, seed in ((pairs, 3), (backwards, 3), (pairs, 4))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("gains", [[1] * 8, [3, -1, 2, 4, 1, 0, 2, 2], [5, 4, 5], [-2, 4, 1, -3], [0, 0]], ids=str)
def test_the_signs_of_tasks_are_tossed(gains: list[int]) -> None:
    found = paired_difference({f"task {idx}": _task(gain) for idx, gain in enumerate(gains)})
    sums = [
        sum(sign * gain for sign, gain in zip(signs, gains, strict=True))
        for signs in itertools.product((1, -1), repeat=len(gains))
    ]
    assert found is not None
    assert found.p_value_of_tasks == pytest.approx(sum(abs(each) >= abs(sum(gains)) for each in sums) / len(sums))


def test_counts_and_rates_of_pairs() -> None:
    found = paired_difference({"a": [BOTH, BASE, OTHER, OTHER, NEITHER], "b": [OTHER, NEITHER, NEITHER], "c": []})
    assert found is not None
    assert (found.num_tasks, found.num_pairs, found.both, found.only_base, found.only_other) == (2, 8, 1, 1, 3)
    assert (found.base_rate, found.other_rate) == (0.25, 0.5)
    assert (found.difference, found.discordance) == (0.25, 0.5)


def test_one_task_has_no_interval_and_no_pairs_are_no_difference() -> None:
    one = paired_difference({"a": [OTHER] * 20})
    assert one is not None
    assert one.interval is None
    assert one.p_value < 1e-5
    assert not is_distinguishable(one, one.p_value)
    assert paired_difference({}) is None
    assert paired_difference({"a": []}) is None


def test_arms_differ_only_where_both_the_test_and_the_bootstrap_say_so() -> None:
    both = paired_difference({str(idx): [OTHER, NEITHER] for idx in range(10)})
    assert both is not None
    assert is_distinguishable(both, both.p_value)
    # Looked at with many others, the same p-value is no longer enough.
    assert not is_distinguishable(both, 0.06)
    assert is_distinguishable(both, 0.05)
    # Five tasks that agree: the interval has no width, and five pairs show nothing.
    few = paired_difference({str(idx): [OTHER] for idx in range(5)})
    assert few is not None
    assert few.interval == Interval(1, 1)
    assert not is_distinguishable(few, few.p_value)
    # Five tasks cannot show it with any number of seeds: one run in sixteen has them all on one side.
    for num_tasks, shown in ((5, False), (6, True)):
        many_seeds = paired_difference({str(idx): [OTHER] * 10 for idx in range(num_tasks)})
        assert many_seeds is not None
        assert is_distinguishable(many_seeds, many_seeds.p_value) == shown
    # Twenty seeds of one task among ten: McNemar's test takes them for twenty tasks.
    one_task = paired_difference({"a": [OTHER] * 20, **{str(idx): [NEITHER] * 20 for idx in range(9)}})
    assert one_task is not None
    assert one_task.p_value < 1e-5
    assert not is_distinguishable(one_task, one_task.p_value)


@pytest.mark.parametrize(
    ("base_solved", "other_solved"),
    [(5, 7), (4, 8), (13, 18)],
    ids=["31.2% and 43.8% of 16", "25% and 50% of 16", "32.5% and 45% of 40"],
)
def test_what_eight_tasks_with_two_to_five_seeds_cannot_tell_apart(base_solved: int, other_solved: int) -> None:
    """Whatever the pairing: even if the other arm solves all that the base solves, and more."""
    gained = other_solved - base_solved
    assert mcnemar(0, gained) > 0.05


def _p_value(only_base: int, only_other: int) -> float:
    discordant = only_base + only_other
    tail = sum(comb(discordant, idx) for idx in range(min(only_base, only_other) + 1)) / 2**discordant
    return min(1.0, 2 * tail)


@pytest.mark.parametrize(
    ("num_pairs", "only_base", "only_other"),
    [(40, 0.17, 0.31), (120, 0.05, 0.19), (195, 0.17, 0.31), (16, 0.02, 0.4)],
)
def test_the_power_is_what_a_simulation_gives(num_pairs: int, only_base: float, only_other: float) -> None:
    rng = random.Random(f"{num_pairs} {only_base}")
    num_runs, rejected = 4000, 0
    for _ in range(num_runs):
        fell = [rng.random() for _ in range(num_pairs)]
        bases = sum(value < only_base for value in fell)
        others = sum(only_base <= value < only_base + only_other for value in fell)
        rejected += _p_value(bases, others) <= 0.05
    power = mcnemar_power(num_pairs, difference=only_other - only_base, discordance=only_base + only_other, alpha=0.05)
    # Four standard errors of the simulated share, at most 0.032.
    assert power == pytest.approx(rejected / num_runs, abs=4 * (power * (1 - power) / num_runs) ** 0.5)


def test_the_power_of_few_pairs_by_hand() -> None:
    # Five pairs never reach 0.05; six do where all fall on one side, which here they do always.
    assert mcnemar_power(5, difference=1.0, discordance=1.0, alpha=0.05) == 0
    assert mcnemar_power(6, difference=1.0, discordance=1.0, alpha=0.05) == pytest.approx(1)
    # Without a difference: both ends of six tosses.
    assert mcnemar_power(6, difference=0.0, discordance=1.0, alpha=0.05) == pytest.approx(2 / 64)
    assert mcnemar_power(6, difference=0.5, discordance=1.0, alpha=0.05) == pytest.approx(0.75**6 + 0.25**6)
    assert mcnemar_power(0, difference=0.5, discordance=1.0, alpha=0.05) == 0
    assert mcnemar_power(99, difference=0.0, discordance=0.0, alpha=0.05) == 0


@pytest.mark.parametrize("discordance", [0.143, 0.25, 0.48, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_pairs_needed_are_the_least_from_which_on_the_power_is_reached(discordance: float, sign: int) -> None:
    wanted = {"difference": sign * 0.143, "discordance": discordance, "alpha": 0.05}
    needed = pairs_needed(**wanted, power=0.8)
    assert mcnemar_power(needed - 1, **wanted) < 0.8
    assert all(mcnemar_power(needed + more, **wanted) >= 0.8 for more in range(200))


def test_where_the_power_falls_again_the_pairs_are_counted_from_its_last_fall_on() -> None:
    wanted = {"difference": 0.6, "discordance": 1.0, "alpha": 0.05}
    enough = {num_pairs for num_pairs in range(1, 99) if mcnemar_power(num_pairs, **wanted) >= 0.8}
    assert enough == {20, *range(23, 99)}
    assert pairs_needed(**wanted, power=0.8) == 23


def test_a_difference_as_in_the_paper_takes_far_more_pairs_than_its_sixteen() -> None:
    discordance = independent_discordance(0.312, 0.143)
    assert discordance == pytest.approx(0.312 * 0.545 + 0.455 * 0.688)
    assert pairs_needed(difference=0.143, discordance=discordance, alpha=0.05, power=0.8) == 195
    assert mcnemar_power(16, difference=0.143, discordance=discordance, alpha=0.05) < 0.07


@pytest.mark.parametrize(
    ("base", "difference", "discordance", "said"),
    [
        (0.9, 0.2, 0.2, "the rates would be 90.0% and 110.0%; expected both between 0% and 100%"),
        (0.1, -0.2, 0.2, "the rates would be 10.0% and -10.0%"),
        (0.3, 0.2, 0.1, "discordance: got 10.0%; between rates of 30.0% and 50.0% it is at least 20.0% and at most 80"),
        (0.3, 0.2, 0.9, "at most 80.0% of the pairs"),
        (float("nan"), 0.2, 0.3, "expected both between"),
        (0.3, 0.2, float("nan"), "discordance: got nan%"),
    ],
)
def test_arms_that_cannot_be_are_refused(base: float, difference: float, discordance: float, said: str) -> None:
    with pytest.raises(SolveRateError, match=said):
        check_rates(base, difference, discordance)


def test_differences_that_no_run_shows_are_refused() -> None:
    with pytest.raises(SolveRateError, match="a difference of 0 cannot be seen"):
        pairs_needed(difference=0, discordance=0.3, alpha=0.05, power=0.8)
    with pytest.raises(SolveRateError, match="takes more than 100,000 pairs"):
        pairs_needed(difference=0.0001, discordance=0.3, alpha=0.05, power=0.8)


def test_rates_on_the_edge_of_what_is_possible_are_not_refused() -> None:
    check_rates(0.312, 0.143, 0.143)
    check_rates(0.312, 0.143, 0.312 + 0.455)
    check_rates(0.0, 1.0, 1.0)
