from __future__ import annotations

from dataclasses import replace

import pytest

from evals.replay.server_counters import ServerCounters, parse_counters
from evals.replay.turn_rows import ArmResult, TurnRow, crosscheck, summarize


def _row(turn: int, prompt: int, cached: int, *, prefilled: int = 0, status: str | None = "spliced") -> TurnRow:
    return TurnRow("splice", turn, prompt, cached, prefilled, ms=100.0, http_ms=80.0, num_requests=1, status=status)


ROWS = (_row(1, 1000, 0, status="unchanged"), _row(2, 1500, 900, status="unchanged"), _row(3, 500, 460, prefilled=60))


def test_hit_rate_counts_from_the_second_request_less_what_the_splice_prefilled() -> None:
    totals = summarize(ArmResult("splice", ROWS))
    assert totals["prompt_tokens"] == 2000
    assert totals["cached_tokens"] == 900 + 400
    assert totals["hit_rate"] == 0.65
    assert totals["ms_total"] == 300.0
    assert totals["turns"] == 3


def test_one_request_has_no_hit_rate_to_speak_of() -> None:
    assert summarize(ArmResult("splice", ROWS[:1]))["hit_rate"] == 0.0


def test_ideal_is_over_the_same_requests() -> None:
    rows = tuple(replace(row, ideal_cached_tokens=n) for row, n in zip(ROWS, (0, 1000, 400), strict=True))
    totals = summarize(ArmResult("splice", rows))
    assert totals["hit_rate_ideal"] == 0.7
    assert totals["ideal_gap"] == {"missed_tokens": 100, "extra_tokens": 0}
    assert summarize(ArmResult("splice", ROWS))["hit_rate_ideal"] is None


def test_a_turn_above_the_ideal_does_not_make_up_for_one_below() -> None:
    rows = tuple(replace(row, ideal_cached_tokens=n) for row, n in zip(ROWS, (0, 1000, 300), strict=True))
    assert summarize(ArmResult("splice", rows))["ideal_gap"] == {"missed_tokens": 100, "extra_tokens": 100}


def test_stages_add_up_to_the_total() -> None:
    rows = tuple(replace(row, splice_ms=5.0) for row in ROWS)
    totals = summarize(ArmResult("splice", rows))
    assert totals["ms_by_stage"] == {"splice": 15.0, "request": 225.0, "client": 60.0}
    assert sum(totals["ms_by_stage"].values()) == totals["ms_total"]


def test_fallbacks_are_what_was_refused_in_part_or_whole_or_not_answered() -> None:
    rows = (
        *ROWS,
        replace(_row(4, 10, 1, status="refused"), reason="evicted"),
        replace(_row(5, 10, 1, status="partial"), reason="evicted"),
        _row(6, 10, 1, status=None),
    )
    totals = summarize(ArmResult("splice", rows))
    assert totals["splices"] == 2  # the partial one carried out what it could
    assert totals["fallbacks"] == 3
    assert totals["fallbacks_by_reason"] == {"evicted": 2, "no_outcome": 1}


def test_other_arms_have_no_splices() -> None:
    rows = tuple(replace(row, arm="reprefill", status=None) for row in ROWS)
    assert "splices" not in summarize(ArmResult("reprefill", rows))


CLIENT = ServerCounters(http_chat_requests=3, finished_requests=3, prompt_tokens=3000, cached_tokens=1360)


@pytest.mark.parametrize(
    ("server", "agrees"),
    [
        pytest.param(CLIENT, True, id="equal"),
        pytest.param(replace(CLIENT, cached_tokens=1361), False, id="one token more without a cause"),
        pytest.param(replace(CLIENT, http_chat_requests=4), False, id="a request that we did not send"),
        pytest.param(replace(CLIENT, finished_requests=4), False, id="an internal request is counted"),
        pytest.param(replace(CLIENT, prompt_tokens=3500), False, id="more prompt tokens"),
        pytest.param(replace(CLIENT, finished_requests=2), False, id="a request is missing"),
    ],
)
def test_crosscheck_takes_equal_sums_alone(server: ServerCounters, agrees: bool) -> None:
    assert crosscheck(ArmResult("splice", ROWS, server=server))["agrees"] is agrees


def test_counters_are_summed_over_labels_and_told_apart_by_endpoint() -> None:
    text = (
        "# TYPE sglang:prompt_tokens_total counter\n"
        'sglang:prompt_tokens_total{is_streaming="false"} 10.0\n'
        'sglang:prompt_tokens_total{is_streaming="true"} 5.0\n'
        'sglang:prompt_tokens_total_created{is_streaming="true"} 1.7e9\n'
        'sglang:cached_tokens_total{cache_source="device"} 7.0\n'
        'sglang:http_requests_total{endpoint="/v1/chat/completions",method="POST"} 3.0\n'
        'sglang:http_requests_total{endpoint="/generate",method="POST"} 9.0\n'
        "sglang:num_requests_total 4.0\n"
    )
    assert parse_counters(text) == ServerCounters(3, 4, 15, 7)


def test_a_server_that_has_counted_nothing_has_zeros() -> None:
    assert parse_counters("# nothing yet\n") == ServerCounters(0, 0, 0, 0)
