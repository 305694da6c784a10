"""What prefill costs, fitted to batches; and what a splice is said to have saved by it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from leyline_sglang.prefill_cost import Batch, Cost, PrefillMeter, batch_of, fit, num_pairs, predict_ms, saved_by_moving

from .live import Live, new_conversation, note

FIXED_MS, TOKEN_MS, PAIR_MS = 4.0, 0.05, 2e-5
LENGTHS = [(7, 0), (7, 500), (60, 900), (200, 0), (500, 3000), (2000, 0), (2000, 6000), (30, 8000), (1000, 1000)]


def _ms(tokens: int, prefix_tokens: int) -> float:
    return FIXED_MS + TOKEN_MS * tokens + PAIR_MS * num_pairs(tokens, prefix_tokens)


def _on_a_gpu(tokens: int, prefix_tokens: int) -> float:
    """80 ms to launch whatever it is, and twice as long for a pair where something is cached."""
    pair_ms = 1.2e-5 if prefix_tokens else 6e-6
    return max(80.0, 0.02 * tokens + pair_ms * num_pairs(tokens, prefix_tokens))


def _batches(
    lengths: list[tuple[int, int]], *, noise: float = 0.0, ms: Callable[[int, int], float] = _ms
) -> list[Batch]:
    rng = random.Random(1)
    return [batch_of([length], ms(*length) * (1 + rng.uniform(-noise, noise))) for length in lengths]


def test_pairs_are_those_of_causal_attention() -> None:
    for tokens, prefix in ((1, 0), (3, 0), (4, 10)):
        assert num_pairs(tokens, prefix) == sum(prefix + idx + 1 for idx in range(tokens))


def test_a_batch_is_the_sum_of_its_requests_and_one_with_a_prefix_decides() -> None:
    assert batch_of([(3, 0), (2, 0)], 5.0) == (5, 6 + 3, 0, 5.0)
    assert batch_of([(3, 0), (2, 10)], 5.0) == (5, 0, 6 + 23, 5.0)


def test_a_fit_finds_what_the_batches_were_made_of() -> None:
    cost = fit(_batches(LENGTHS))
    assert cost is not None
    assert cost[1:5] == pytest.approx((FIXED_MS, TOKEN_MS, PAIR_MS, PAIR_MS), rel=1e-6)


@pytest.mark.parametrize(("tokens", "prefix"), [(300, 200), (1500, 4000), (5000, 0)])
def test_with_noise_a_prediction_is_as_far_off_as_the_noise(tokens: int, prefix: int) -> None:
    cost = fit(_batches(LENGTHS * 4, noise=0.1))
    assert cost is not None
    assert predict_ms(cost, tokens, prefix) == pytest.approx(_ms(tokens, prefix), rel=0.1)


GPU_LENGTHS = [(20, 0), (30, 16_000), (300, 900), (8192, 0), (6000, 8192), (2500, 14_000), (12_000, 4096), (4096, 0)]


@pytest.mark.parametrize("length", [(20, 0), (20, 16_000), (3000, 0), (2000, 1000), (16_000, 0), (2500, 15_000)])
def test_a_batch_takes_the_launching_of_its_kernels_or_what_it_computes(length: tuple[int, int]) -> None:
    cost = fit(_batches(GPU_LENGTHS * 3, noise=0.03, ms=_on_a_gpu))
    assert cost is not None
    assert predict_ms(cost, *length) == pytest.approx(_on_a_gpu(*length), rel=0.1)


def test_where_all_took_as_long_nothing_is_said_of_longer_ones() -> None:
    cost = fit(_batches([(20, 0), (300, 0), (2000, 0)], noise=0.05, ms=_on_a_gpu))
    assert cost is not None
    assert predict_ms(cost, 1500, 0) == pytest.approx(80, rel=0.06)
    assert predict_ms(cost, 2001, 0) is None


def test_batches_that_were_held_up_do_not_count() -> None:
    held_up = [(*batch[:3], 200 * batch[3]) for batch in _batches([(7, 0), (200, 0), (2000, 0)])]
    cost = fit([*_batches(LENGTHS), *held_up])
    assert cost is not None
    assert cost[1:5] == pytest.approx((FIXED_MS, TOKEN_MS, PAIR_MS, PAIR_MS), rel=1e-6)
    first_of_its_size = [(6, 21, 0, 9000.0)]
    cost = fit([*_batches(LENGTHS), *first_of_its_size])
    assert cost is not None
    assert cost.floor_ms == pytest.approx(_ms(7, 250), rel=0.05)


@pytest.mark.parametrize("num_held_up", [1, 2, 3])
@pytest.mark.parametrize("held_up_ms", [40.0, 60.0, 500.0])
def test_short_batches_that_were_held_up_are_contradicted_by_longer_ones(num_held_up: int, held_up_ms: float) -> None:
    """Five milliseconds a token, were they believed."""
    lengths = [(2**bits, 0) for bits in range(3, 13)]
    cost = fit([*_batches(lengths, ms=lambda _tokens, _prefix: 30.0), *[(12, 78, 0, held_up_ms)] * num_held_up])
    assert cost is not None
    assert predict_ms(cost, 4096, 0) == pytest.approx(30, rel=0.3)
    assert predict_ms(cost, 100, 0) == pytest.approx(30, rel=0.3)


@pytest.mark.parametrize(
    "lengths", [[], [(100, 0)], [(100, 0)] * 9, [(100, 50 * idx) for idx in range(9)], [(7, 0), (6, 10), (40, 0)]]
)
def test_batches_of_one_size_tell_nothing(lengths: list[tuple[int, int]]) -> None:
    """Such as a server's own first ones: anything could be what makes them slow."""
    assert fit(_batches(lengths)) is None


def test_what_tokens_explain_as_well_is_not_laid_to_pairs() -> None:
    """Two sizes cannot tell them apart, and pairs would make a longer prompt too dear: rather say too little."""
    cost = fit(_batches([(10, 0), (900, 100)] * 3))
    assert cost is not None
    predicted = predict_ms(cost, 5000, 0)
    assert predicted is not None
    assert _ms(5000, 0) / 2 < predicted < _ms(5000, 0)


def test_no_coefficient_is_negative() -> None:
    """Longer batches that took no longer, and long ones that took less than their tokens say."""
    for batches in (
        [(10, 50, 0, 9.0), (100, 5000, 0, 5.0), (90, 0, 4000, 6.0)],
        [(10, 50, 0, 1.0), (100, 5000, 0, 10.0), (200, 0, 2e4, 19)],
    ):
        cost = fit(batches)
        assert cost is not None
        assert min(cost) >= 0
        assert max(cost[:5]) > 0


def test_nothing_is_predicted_far_beyond_what_was_seen() -> None:
    cost = fit(_batches([(4, 0), (40, 1000)]))
    assert cost is not None
    assert predict_ms(cost, 40 * 32, 0) is not None
    assert predict_ms(cost, 40 * 33, 0) is None
    assert predict_ms(cost, 40, 32_000) is not None
    assert predict_ms(cost, 40, 33_000) is None
    assert predict_ms(cost, 0, 100) == 0


def test_a_meter_adds_up_a_batch_and_knows_nothing_before_two_sizes() -> None:
    meter = PrefillMeter()
    assert meter.cost is None
    for _ in range(20):
        meter.observe([(10, 0)], _ms(10, 0))
    assert meter.cost is None
    for _ in range(20):
        pairs = num_pairs(600, 100) + num_pairs(300, 0)
        meter.observe([(600, 100), (300, 0)], FIXED_MS + TOKEN_MS * 900 + PAIR_MS * pairs)
    assert meter.cost is not None
    predicted = predict_ms(meter.cost, 900, 0)
    assert predicted == pytest.approx(_ms(900, 0), rel=0.1)


def test_a_meter_remembers_long_prompts_through_many_short_turns() -> None:
    meter = PrefillMeter()
    for tokens, prefix in [*LENGTHS, *[(tokens, 8000) for tokens in range(20, 40)] * 50]:
        meter.observe([(tokens, prefix)], _ms(tokens, prefix))
    assert meter.cost is not None
    assert predict_ms(meter.cost, 8000, 0) == pytest.approx(_ms(8000, 0), rel=0.1)


def test_a_meter_takes_no_batch_that_took_no_time() -> None:
    meter = PrefillMeter()
    for tokens in (10, 100, 1000):
        meter.observe([(tokens, 0)], 0.0)
        meter.observe([], 1.0)
    assert meter.cost is None


@pytest.mark.parametrize(("prefilled_tokens", "still_tokens"), [(0, 60), (10, 50)], ids=["one_step", "two_steps"])
def test_saved_is_the_prefill_of_what_was_moved_less_what_the_splice_took(
    prefilled_tokens: int, still_tokens: int
) -> None:
    """Of 1,000 tokens 200 stood left of the edit and 740 were moved; an R of 10 may be computed before the request."""
    turn = {"prompt_tokens": 1000, "kept_tokens": 200, "prefilled_tokens": prefilled_tokens, "ms": 7.5}
    cost = Cost(0, FIXED_MS, TOKEN_MS, PAIR_MS, PAIR_MS, 1e6, 1e9)
    expected_ms = _ms(800, 200) - _ms(still_tokens, 1000 - still_tokens) - 7.5
    assert saved_by_moving(cost, moved_tokens=740, **turn) == pytest.approx(expected_ms, abs=1e-3)
    assert saved_by_moving(cost._replace(most_tokens=700), moved_tokens=740, **turn) is None
    assert saved_by_moving(None, moved_tokens=740, **turn) is None
    assert saved_by_moving(cost, moved_tokens=0, **turn) is None


@pytest.mark.sglang
@pytest.mark.parametrize("replacement_tokens", [5, 600], ids=["one_step", "two_steps"])
def test_a_live_server_says_what_a_splice_saved(live: Live, replacement_tokens: int) -> None:
    """Two thousand tokens moved: on any machine more time than the splice takes, if both were held up alike."""
    for tokens in (8, 100, 1000):
        live.generate(live.ids(tokens, tokens), max_new_tokens=1)
    conversation, base = new_conversation(), live.ids(2500, 5)
    first = live.generate(base, note(conversation, "1"), max_new_tokens=1)
    assert first.outcome is not None
    assert "saved_ms" not in first.outcome
    edited = base[:100] + live.ids(replacement_tokens, 6) + base[400:] + live.ids(5, 7)
    answer = live.generate(edited, note(conversation, "2", "1"), max_new_tokens=1)
    assert answer.outcome is not None
    assert answer.outcome["moved_tokens"] == 2100
    assert answer.outcome["saved_ms"] > 0
