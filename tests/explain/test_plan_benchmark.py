from __future__ import annotations

import json

import pytest

from evals.micro import plan


@pytest.mark.parametrize("case", plan.CASES)
def test_a_row_has_the_time_of_a_plan(case: str) -> None:
    row = plan.measure(case, 60, repeats=4)

    assert (row["op"], row["case"], row["messages"]) == ("plan_turn", case, 60)
    assert min(row["plan_ms"]["p50"], row["plan_ms_without_gc"]["p50"], row["edit_ms"]["p50"]) > 0
    assert row["prompt_tokens"] > 0
    assert row["plan_steps"] > 1_000
    json.dumps(row)


@pytest.mark.parametrize("case", plan.CASES)
def test_the_plan_of_a_turn_grows_no_faster_than_the_history(case: str) -> None:
    short, long = (plan.plan_steps(case, num_messages, turns=3) for num_messages in (500, 5000))

    # In "all at once" there are 1.5% more than ten times as many edits, as three outputs are kept.
    assert long <= 10 * 1.03 * short


def test_wrong_directives_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "apply_directives", lambda base_ids, directives: [0])

    with pytest.raises(AssertionError, match="not timed"):
        plan.measure("keep_last_tool_outputs", 60, repeats=4)


def test_edits_are_in_what_is_timed() -> None:
    assert plan.measure("all at once", 60, repeats=2)["max_directives"] > 5
