from __future__ import annotations

import random
from typing import Any

import pytest

from evals.micro.concurrency_rows import bars, finished, paired_gain, summaries, summarise, table
from evals.micro.result_rows import percentile
from tests.evals.concurrency_runs import run

# --- pairs ----------------------------------------------------------------------------------------------------------


def test_a_constant_gain_has_an_interval_without_width() -> None:
    rng = random.Random(0)
    baseline = [[rng.uniform(100, 200) for _ in range(6)] for _ in range(8)]
    gain = paired_gain(baseline, [[value - 10 for value in talk] for talk in baseline])
    assert [gain.difference.value, gain.difference.low, gain.difference.high] == pytest.approx([10, 10, 10])
    assert gain.num_clusters == 8


def test_a_ratio_is_that_of_the_two_medians() -> None:
    baseline = [[100.0, 200.0], [300.0, 400.0], [500.0, 600.0]]
    gain = paired_gain(baseline, [[value * 0.8 for value in talk] for talk in baseline])
    assert gain.ratio.value == pytest.approx(0.8)
    assert gain.ratio.low == pytest.approx(0.8)
    # Of an even number of values the lower one in the middle, as `percentile` has it.
    assert gain.difference.value == pytest.approx(percentile([20, 40, 60, 80, 100, 120], 50))


def test_turns_of_a_conversation_are_drawn_together() -> None:
    # Half of the conversations gain 10, half lose 10. Were turns drawn one by one, their median would hardly leave 0.
    baseline = [[100.0] * 101 for _ in range(4)]
    arm = [[90.0] * 101, [110.0] * 101] * 2
    gain = paired_gain(baseline, arm)
    assert (gain.difference.low, gain.difference.high) == (-10, 10)


def test_noise_around_nothing_has_an_interval_around_nothing() -> None:
    rng = random.Random(1)
    baseline, arm = ([[rng.gauss(100, 10) for _ in range(6)] for _ in range(40)] for _ in range(2))
    gain = paired_gain(baseline, arm)
    assert gain.difference.low is not None
    assert gain.difference.high is not None
    assert -5 < gain.difference.low < 0 < gain.difference.high < 5


def test_the_same_seed_gives_the_same_interval() -> None:
    rng = random.Random(2)
    baseline, arm = ([[rng.gauss(100, 10) for _ in range(3)] for _ in range(9)] for _ in range(2))
    assert paired_gain(baseline, arm, seed=3) == paired_gain(baseline, arm, seed=3)
    assert paired_gain(baseline, arm, seed=3) != paired_gain(baseline, arm, seed=4)


def test_two_conversations_have_no_interval() -> None:
    gain = paired_gain([[10.0, 20.0], [30.0, 40.0]], [[5.0, 10.0], [15.0, 20.0]])
    assert (gain.difference.low, gain.ratio.high) == (None, None)
    assert gain.ratio.value == 0.5


def test_pairs_are_of_one_repeat() -> None:
    # Rows of another order, and a repeat that only one arm has.
    runs = [
        run("reprefill", 1, [200.0], [200.0]),
        run("reprefill", 0, [100.0], [100.0]),
        run("reprefill", 2, [900.0], [900.0]),
        run("splice", 0, [90.0], [90.0]),
        run("splice", 1, [190.0], [190.0]),
    ]
    pair = summarise(runs)["pairs"]["splice"]
    assert pair["gain_ms"] == {"value": 10.0, "low": 10.0, "high": 10.0}
    assert pair["clusters"] == 4


# --- figures --------------------------------------------------------------------------------------------------------


def test_an_arm_adds_up_its_repeats() -> None:
    runs = [run("none", repeat, [10.0 * (repeat + 1), 50.0], [30.0, 70.0]) for repeat in range(2)]
    figures = summarise(runs)["arms"]["none"]
    assert figures["turns"] == 8
    assert figures["p50_ms"] == 30.0
    assert figures["p95_ms"] == 70.0
    assert figures["mean_ms"] == pytest.approx((10 + 20 + 2 * (50 + 30 + 70)) / 8, abs=0.06)
    assert figures["first_token_p50_ms"] == 15.0
    assert figures["p50_ms_by_turn"] == [20.0, 50.0]
    # Eight turns of ten tokens in two runs of two seconds.
    assert figures["output_tokens_per_s"] == 20.0
    assert figures["turns_per_s"] == 2.0
    assert (figures["hit_rate"], figures["ideal_hit_rate"]) == (0.8, 0.9)
    assert figures["prefill_tokens_per_run"] == 500
    assert figures["client_cpu_share"] == 0.25
    assert "statuses" not in figures


def test_what_was_done_counts_among_turns_with_edits() -> None:
    status = [["spliced", "reprefill: gated", "refused: evicted", "spliced"], ["partial", "spliced", "spliced", "x"]]
    runs = [
        run(
            "splice",
            0,
            *([[10.0] * 4] * 2),
            status=status,
            edits=[[1, 1, 2, 0], [1, 1, 1, 1]],
            cached=[[85, 10, 10, 99], [85, 85, 85, 10]],
        )
    ]
    figures = summarise(runs)["arms"]["splice"]
    assert figures["edited_turns"] == 7
    assert (figures["spliced"], figures["gated"], figures["refused"]) == (4, 1, {"refused: evicted": 1})
    assert figures["let_through"] == pytest.approx(6 / 7, abs=1e-4)
    assert (figures["let_through_hit_rate"], figures["let_through_ideal_hit_rate"]) == (0.85, 0.9)
    # What a chat template renders otherwise is spliced without an edit.
    assert figures["statuses"]["spliced"] == 4


def test_an_arm_without_splices_has_no_hit_rate_of_splices() -> None:
    gated = [["reprefill: gated"], ["reprefill: gated"]]
    summary = summarise([run("reprefill", 0, [10.0], [10.0]), run("splice", 0, [10.0], [10.0], status=gated)])
    assert summary["arms"]["splice"]["let_through"] == 0
    assert summary["bars"]["near_ideal"] is None
    assert table([summary])


def test_a_run_that_failed_is_none() -> None:
    rows = [run("none", 0, [1.0]), run("none", 1, [1.0], error="BenchError"), {"op": "concurrency", "arms": {}}]
    assert len(finished(rows)) == 1
    assert len(summaries(rows)) == 1


@pytest.mark.parametrize("other", [{"model": "n"}, {"label": "page64"}, {"concurrency": 4}, {"workload": "w"}], ids=str)
def test_what_was_measured_otherwise_is_another_cell(other: dict[str, Any]) -> None:
    assert len(summaries([run("none", 0, [1.0]), run("none", 0, [1.0], **other)])) == 2


# --- bars -----------------------------------------------------------------------------------------------------------


def judged(*, gain: float = 5, low: float | None = 1, ratio: float = 0.9, ungated: float = 0.7, **splice: Any) -> Any:
    arms = {
        "splice": {
            "let_through_hit_rate": 0.97,
            "let_through_ideal_hit_rate": 0.98,
            "let_through": 0.95,
            **splice,
        }
    }
    pairs = {
        "splice": {"gain_ms": {"value": gain, "low": low}, "ratio": {"value": ratio}},
        "splice_ungated": {"ratio": {"value": ungated}},
    }
    return bars(arms, pairs)


ALL_MET = {"gains": True, "never_slower": True, "near_ideal": True, "let_through": True}


@pytest.mark.parametrize(
    ("figures", "otherwise"),
    [
        ({}, {}),
        ({"low": -0.1}, {"gains": False}),
        ({"low": None}, {"gains": None}),
        ({"gain": -3, "low": -4, "ratio": 1.05}, {"gains": False}),
        ({"ratio": 1.051}, {"never_slower": False}),
        ({"let_through_hit_rate": 0.969}, {"near_ideal": False}),
        ({"let_through": 0.949}, {"let_through": False}),
        ({"let_through": 0.1, "ungated": 0.81}, {"let_through": None}),
    ],
    ids=["all_met", "interval", "no_interval", "slower", "too_slow", "hit_rate", "let_through", "no_clear_win"],
)
def test_bars_that_are_missed_are_named(figures: dict[str, Any], otherwise: dict[str, Any]) -> None:
    assert judged(**figures) == {**ALL_MET, **otherwise}
