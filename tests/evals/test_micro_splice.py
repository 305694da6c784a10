from __future__ import annotations

import random

import pytest

from evals.micro.splice import (
    DROPPED_TOKENS,
    PREFIX_TOKENS,
    REPLACEMENT_TOKENS,
    SpliceFailedError,
    is_in_place,
    next_prompt,
    percentile,
    row,
)
from leyline_agent.core.protocol import ConversationState, Outcome, Status, TurnState


@pytest.mark.parametrize(
    ("percent", "wanted"), [(1, 1), (20, 1), (21, 2), (50, 3), (80, 4), (95, 5)], ids=lambda value: str(value)
)
def test_a_percentile_is_one_of_the_values(percent: int, wanted: int) -> None:
    assert percentile([5, 1, 4, 2, 3], percent) == wanted


def test_every_turn_has_as_many_tokens_downstream_of_its_edit() -> None:
    rng = random.Random(1)
    prompt = list(range(PREFIX_TOKENS + DROPPED_TOKENS + 400))
    for _ in range(3):
        edited = next_prompt(prompt, rng)
        downstream = prompt[PREFIX_TOKENS + DROPPED_TOKENS :]
        assert len(downstream) == 400
        assert edited[:PREFIX_TOKENS] == prompt[:PREFIX_TOKENS]
        assert edited[PREFIX_TOKENS + REPLACEMENT_TOKENS :][:400] == downstream
        prompt = edited


def state(*cached: int, own: bool = True) -> ConversationState:
    turns = [
        TurnState(turn=str(n), prompt_tokens=100, output_tokens=1, cached_tokens=tokens, own_namespace=own)
        for n, tokens in enumerate(cached)
    ]
    return ConversationState(conversation_hash="0" * 32, own_tokens=sum(cached), turns=tuple(turns))


@pytest.mark.parametrize(
    ("cached", "wanted"), [((20, 20, 100), True), ((100, 100, 100), False)], ids=["in_place", "copied"]
)
def test_what_is_left_of_edited_turns_tells_whether_their_rows_were_moved(
    cached: tuple[int, ...], wanted: bool
) -> None:
    assert is_in_place(state(*cached)) is wanted


def test_rows_of_the_shared_namespace_tell_nothing() -> None:
    with pytest.raises(SpliceFailedError, match="0 edited turns"):
        is_in_place(state(20, 100, own=False))


def test_a_conversation_that_did_both_is_refused() -> None:
    with pytest.raises(SpliceFailedError, match="2 edited turns"):
        is_in_place(state(20, 100, 100))


def test_a_row_keeps_scheduler_turn_and_gaps_apart() -> None:
    outcomes = [
        Outcome(status=Status.SPLICED, moved_tokens=4000 + n % 2, ms=n + 100.0, scheduler_ms=float(n))
        for n in range(1, 101)
    ]
    measured = row(
        "copy", outcomes, {"alone": [7.0], "edits": [9.0, 8.0]}, in_place=False, num_streams=4, load_before=0.1
    )
    assert measured["turns"] == 100
    assert measured["moved_tokens"] == 4000.5
    assert [measured[f"scheduler_p{p}_ms"] for p in (20, 50, 80, 95)] == [20, 50, 80, 95]
    assert [measured[f"turn_p{p}_ms"] for p in (20, 50, 80, 95)] == [120, 150, 180, 195]
    assert measured["gaps"] == {"alone": 1, "edits": 2}
    assert (measured["gap_alone_p95_ms"], measured["gap_edits_p50_ms"], measured["gap_edits_p95_ms"]) == (7, 8, 9)
