from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from evals.micro.bench_server import Answer, fresh
from evals.micro.edited_turn import ARMS, Shape, arm_row, ratios, row
from leyline_agent.core.diff import diff_token_ids

SHAPE = Shape(prompt_tokens=1000, removed=200, replacement=12, new_tokens=20, output_tokens=4)


def answer(first_token_ms: float, ms: float | None = None, **outcome: Any) -> Answer:
    meta_info = {"leyline": {"status": "spliced", "moved_tokens": 550, "ms": 9.0, **outcome}} if outcome else {}
    return Answer([1], meta_info, first_token_ms, first_token_ms if ms is None else ms)


def test_an_edit_removes_a_span_at_a_quarter_of_the_prompt() -> None:
    rng = random.Random(1)
    base = fresh(rng, SHAPE.prompt_tokens + 1)
    prompt = SHAPE.edit(base, rng, replacement=SHAPE.replacement)
    (directive,) = diff_token_ids(array("i", base), array("i", prompt))
    assert (directive.start, directive.end, len(directive.replacement_ids)) == (250, 450, 12)
    assert len(prompt) == SHAPE.edited_tokens


def test_ratios_are_those_of_one_repeat() -> None:
    over = [answer(10.0, 20.0), None, answer(30.0, 30.0)]
    under = [answer(5.0, 20.0), answer(1.0), answer(10.0, 20.0)]
    found = ratios(over, under)
    assert found is not None
    assert (found["first_token_p20"], found["first_token_p80"]) == (2.0, 3.0)
    assert (found["end_p20"], found["end_p80"]) == (1.0, 1.5)


def test_there_is_no_ratio_without_a_repeat_of_both() -> None:
    assert ratios([answer(1.0), None], [None, answer(1.0)]) is None


def test_an_arm_tells_its_stages_and_whether_its_replacement_was_prefilled_before() -> None:
    figures = arm_row(
        [
            answer(1.0, scheduler_ms=1.0, stages_ms={"prefill": 3.0, "rotate": 1.0}),
            answer(2.0, scheduler_ms=2.0, stages_ms={"rotate": 2.0}),
        ]
    )
    assert figures["prefilled_before"] == 1
    assert figures["stages_p50_ms"] == {"prefill": 0.0, "rotate": 1.0}
    assert (figures["scheduler_p50_ms"], figures["scheduler_p95_ms"]) == (1.0, 2.0)


def measured(*, edited_ms: float, scheduler_ms: float, reprefill_ms: float) -> dict[str, Any]:
    taken: dict[str, list[Answer | None]] = {arm: [answer(100.0)] for arm in ARMS}
    for arm in ("copy", "in_place", "empty"):
        taken[arm] = [answer(edited_ms, scheduler_ms=scheduler_ms)]
    taken["reprefill"] = [answer(reprefill_ms)]
    return row(SHAPE, taken)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"edited_ms": 115.0, "scheduler_ms": 2.0, "reprefill_ms": 1150.0}, set()),
        ({"edited_ms": 116.0, "scheduler_ms": 2.0, "reprefill_ms": 1160.0}, {"over_hit"}),
        ({"edited_ms": 115.0, "scheduler_ms": 2.1, "reprefill_ms": 1150.0}, {"scheduler"}),
        ({"edited_ms": 115.0, "scheduler_ms": 2.0, "reprefill_ms": 1140.0}, {"reprefill_over"}),
    ],
    ids=["all_met", "over_a_hit", "scheduler", "reprefill"],
)
def test_a_row_says_which_bars_are_met(figures: dict[str, float], missed: set[str]) -> None:
    for bars in measured(**figures)["bars"].values():
        assert {name for name, holds in bars.items() if not holds} == missed
