from __future__ import annotations

from typing import Any

from evals.micro.concurrency_rows import summaries
from evals.micro.concurrency_table import markdown, one_of_each_cell
from tests.evals.concurrency_runs import run


def measured(git: str, *, repeats: int, splice_ms: float = 75.0, **more: Any) -> list[dict[str, Any]]:
    """Both arms of a cell, so many times."""
    return [
        run(arm, repeat, [ms, ms], [ms, ms + repeat], git=git, **{"label": "", **more})
        for repeat in range(repeats)
        for arm, ms in (("reprefill", 100.0), ("splice", splice_ms))
    ]


def test_a_cell_is_shown_by_the_measurement_with_the_most_pairs() -> None:
    rows = measured("old", repeats=3) + measured("new", repeats=2)
    (shown,) = one_of_each_cell(summaries(rows))
    assert shown["git"] == "old"
    (shown,) = one_of_each_cell(summaries(rows[::-1]))
    assert shown["git"] == "old"


def test_of_as_many_pairs_the_one_with_more_arms_is_shown() -> None:
    rows = [*measured("old", repeats=3), run("none", 0, [90.0, 90.0], git="old", label="")]
    (shown,) = one_of_each_cell(summaries(rows + measured("new", repeats=3)))
    assert shown["git"] == "old"


def test_the_newest_of_equals_is_shown() -> None:
    (shown,) = one_of_each_cell(summaries(measured("old", repeats=3) + measured("new", repeats=3)))
    assert shown["git"] == "new"


def test_labels_models_and_lengths_are_other_cells_in_order() -> None:
    rows = [
        *measured("g", repeats=1, model="b"),
        *measured("g", repeats=1, model="b", concurrency=16),
        *measured("g", repeats=1, model="b", concurrency=4),
        *measured("g", repeats=1, model="b", label="small"),
        *measured("g", repeats=1, model="a", keep_turns=8),
        *measured("g", repeats=1, model="a", prompt_tokens=500),
    ]
    cells = [
        (s["model"], s["label"], s["keep_turns"], s["prompt_tokens"], s["concurrency"])
        for s in one_of_each_cell(summaries(rows))
    ]
    assert cells == [
        ("b", "", 2, 1000, 2),
        ("b", "", 2, 1000, 4),
        ("b", "", 2, 1000, 16),
        ("b", "small", 2, 1000, 2),
        ("a", "", 2, 500, 2),
        ("a", "", 8, 1000, 2),
    ]


def test_a_cell_without_a_baseline_is_not_shown() -> None:
    assert one_of_each_cell(summaries([run("splice", 0, [1.0]), run("none", 0, [1.0])])) == []


def test_a_line_has_both_arms() -> None:
    rows = measured("abc", repeats=3, model="shape", label="page 1")
    *_, line = markdown(one_of_each_cell(summaries(rows))).splitlines()
    assert line == (
        "| shape, page 1 | 1,000, 2 | 2 | 3 |  | 100 → 75 | 0.750 [0.750, 0.750] | 25 [25, 25] | 102 → 77 | "
        "100 → 75 | 80.0 → 80.0 | 90.0 | 20 → 20 | 12 of 12 | abc |"
    )


def test_a_slower_splice_has_a_minus() -> None:
    rows = measured("abc", repeats=3, splice_ms=110.0)
    assert "| −10 [−10, −10] |" in markdown(one_of_each_cell(summaries(rows)))
