"""What is spliced and what is prefilled again, by what prefill and splices were measured to cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from leyline_sglang.gate import Gate
from leyline_sglang.prefill_cost import Cost

from .live import Answer, Live, new_conversation, note

COST = Cost(floor_ms=10, fixed_ms=0, token_ms=0.1, pair_ms=0, cached_pair_ms=0, most_tokens=1e5, most_pairs=1e9)


def _gate(*, splice_ms: float = 5.0, moved_tokens: int = 900, one_step: bool = True) -> Gate:
    gate = Gate(prefill_cost=COST)
    gate.observe(moved_tokens=moved_tokens, one_step=one_step, ms=splice_ms)
    return gate


def _why_not(gate: Gate, moved_tokens: int, *, new_tokens: int = 20, one_step: bool = True) -> str | None:
    return gate.why_not(
        prompt_tokens=1000 + moved_tokens + 10 + new_tokens,
        kept_tokens=1000,
        moved_tokens=moved_tokens,
        replacement_tokens=10,
        one_step=one_step,
    )


def test_a_turn_is_spliced_where_that_is_quicker() -> None:
    gate = _gate()
    # 9,030 tokens take 903 ms, and the 30 that a splice leaves what any batch takes.
    assert _why_not(gate, 9000) is None
    # 80 tokens take no longer than 30.
    assert _why_not(gate, 50) == (
        "moving 50 tokens would take 5.0 ms and save 0.0 ms of prefill; a note with gate: off has them moved all the "
        "same"
    )
    # 150 take 15 ms, 5 more than 30 do; a token more would pay.
    assert _why_not(gate, 120) is not None
    assert _why_not(gate, 121) is None


def test_in_two_steps_the_replacements_are_part_of_what_the_splice_took() -> None:
    """100 new tokens take 10 ms; the 10 of R would take one more if they were the request's own."""
    gate = _gate(one_step=False)
    assert _why_not(gate, 40, new_tokens=100, one_step=False) is not None
    assert _why_not(gate, 41, new_tokens=100, one_step=False) is None
    # Nothing is known of the other path.
    assert _why_not(gate, 1, new_tokens=100, one_step=True) is None


def test_what_is_not_known_is_spliced() -> None:
    assert _why_not(Gate(prefill_cost=COST), 1) is None
    gate = _gate()
    gate.prefill_cost = None
    assert _why_not(gate, 1) is None
    gate.prefill_cost = COST._replace(most_tokens=100)
    assert _why_not(gate, 100) is None


def test_a_splice_costs_what_most_of_its_size_took() -> None:
    gate = Gate(prefill_cost=COST)
    for ms in (2.0, 3.0, 2000.0, 2.5, 2.5):
        gate.observe(moved_tokens=600, one_step=True, ms=ms)
    for ms in (20.0, 21.0, 22.0):
        gate.observe(moved_tokens=16_000, one_step=True, ms=ms)
    assert "2.5 ms" in (_why_not(gate, 60) or "")
    # Saves 170 ms, whatever it costs; 200 moved rows are nearer to 600 than to 16,000.
    assert _why_not(gate, 200) is None
    old = Gate(prefill_cost=COST)
    for ms in [50.0] * 20 + [1.0] * 16:
        old.observe(moved_tokens=600, one_step=True, ms=ms)
    assert "1.0 ms" in (_why_not(old, 60) or "")


def test_one_of_many_of_a_size_that_are_held_back_is_tried_again() -> None:
    """A first splice that compiled a kernel would keep all others out for good."""
    gate = _gate(splice_ms=60_000)
    for _ in range(20):
        gate.observe(moved_tokens=600, one_step=True, ms=60_000)
    for ms in (50_000.0, 5.0):
        for _ in range(32):
            assert _why_not(gate, 900) is not None
            # Others go their own way.
            _why_not(gate, 90_000)
        assert _why_not(gate, 900) is None
        gate.observe(moved_tokens=900, one_step=True, ms=ms)
    # What was just measured stands alone.
    assert _why_not(gate, 900) is None
    assert "5.0 ms" in (_why_not(gate, 60) or "")


TOO_LONG_MS, AT_ONCE_MS = 1e6, 1e-6


@pytest.fixture
def gated(live: Live) -> Iterator[Callable[[float], Live]]:
    """Return the shared server with its gate in force, as if its splices so far had all taken so long."""
    for tokens in (8, 100, 1000):
        live.generate(live.ids(tokens, tokens), note(new_conversation(), "1"), max_new_tokens=1)

    def splices_take(ms: float | None) -> Live:
        live.http.post("/probe", json={"splices_take_ms": ms}).raise_for_status()
        return live

    yield splices_take
    splices_take(None)


def _edited(live: Live, *, replacement_tokens: int = 5, **more: object) -> tuple[list[int], dict[str, object]]:
    """Begin a conversation; return a prompt with 20 tokens left of 300 others replaced, and its note."""
    conversation, base = new_conversation(), live.ids(420, replacement_tokens)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    edited = base[:100] + live.ids(replacement_tokens, 1) + base[120:] + live.ids(9, 2)
    return edited, note(conversation, "2", "1", **more)


def _status(answer: Answer) -> tuple[str, str | None]:
    assert answer.outcome is not None
    return answer.outcome["status"], answer.outcome.get("reason")


@pytest.mark.sglang
@pytest.mark.parametrize("replacement_tokens", [5, 600], ids=["one_step", "two_steps"])
def test_a_live_server_holds_back_what_does_not_pay(gated: Callable[[float], Live], replacement_tokens: int) -> None:
    live = gated(TOO_LONG_MS)
    edited, told = _edited(live, replacement_tokens=replacement_tokens)
    answer = live.generate(edited, told, max_new_tokens=3)
    assert _status(answer) == ("reprefill", "gated")
    assert answer.outcome is not None
    assert "moving 300 tokens" in answer.outcome["message"]
    assert "moved_tokens" not in answer.outcome
    assert answer.output_ids == live.generate(edited, max_new_tokens=3, cache_salt="elsewhere").output_ids
    assert answer.cached_tokens == 100
    again, told = _edited(live, replacement_tokens=replacement_tokens, gate="off")
    assert _status(live.generate(again, told)) == ("spliced", None)


@pytest.mark.sglang
@pytest.mark.parametrize("replacement_tokens", [5, 600], ids=["one_step", "two_steps"])
def test_a_live_server_splices_what_pays(gated: Callable[[float], Live], replacement_tokens: int) -> None:
    live = gated(AT_ONCE_MS)
    assert _status(live.generate(*_edited(live, replacement_tokens=replacement_tokens))) == ("spliced", None)


@pytest.mark.sglang
def test_after_a_turn_that_was_held_back_the_next_one_is_spliced(gated: Callable[[float], Live]) -> None:
    """It is a turn as any other: remembered, and served from where more of it is cached."""
    live = gated(TOO_LONG_MS)
    conversation, base = new_conversation(), live.ids(500, 1)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    first = base[:450] + live.ids(3, 2) + base[470:]
    assert _status(live.generate(first, note(conversation, "2", "1"))) == ("reprefill", "gated")
    second = first[:50] + live.ids(3, 3) + first[100:] + live.ids(5, 4)
    assert _status(live.generate(second, note(conversation, "3", "2", gate="off"))) == ("spliced", None)
    third = [*second[:390], *live.ids(3, 5), *second[410:]]
    answer = live.generate(third, note(conversation, "4", "3"))
    assert _status(answer) == ("reprefill", "gated")
    # From its own namespace, where the turn before stands.
    assert answer.cached_tokens >= 390
