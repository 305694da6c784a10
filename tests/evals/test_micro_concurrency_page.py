from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from evals.micro import concurrency_page
from evals.micro.concurrency_page import gain, hit_rate, p50, panels, plots
from evals.micro.concurrency_rows import summaries
from tests.evals.concurrency_runs import run

REPOSITORY = Path(__file__).parents[2]

ROWS = [
    run(arm, repeat, *([ms] * 2 for _ in range(concurrency)), concurrency=concurrency, model=model)
    for model in ("one", "two")
    for concurrency in (1, 4)
    for repeat in range(3)
    for arm, ms in (("none", 80.0), ("reprefill", 100.0), ("splice", 75.0 + repeat), ("splice_ungated", 110.0))
]


def test_there_is_a_panel_for_each_model_with_a_point_for_each_number_of_conversations() -> None:
    found = summaries(ROWS)
    shown = panels(found[::-1], ("reprefill", "splice"), p50)
    assert sorted(panel.title for panel in shown) == ["one · 1,000 tokens · n = 2", "two · 1,000 tokens · n = 2"]
    for panel in shown:
        assert [(point.concurrency, point.value) for point in panel.lines["splice"]] == [(1, 0.076), (4, 0.076)]


def test_a_gain_is_how_much_less_the_median_is() -> None:
    (summary, *_) = summaries(ROWS)
    found = gain(summary, "splice")
    assert found is not None
    assert found.value == pytest.approx(24)
    assert (found.low, found.high) == pytest.approx((23, 25))
    slower = gain(summary, "splice_ungated")
    assert slower is not None
    assert slower.value == pytest.approx(-10)
    assert gain(summary, "none") is None


def test_an_arm_that_was_not_run_has_no_point() -> None:
    (summary,) = summaries([run("none", 0, [1.0])])
    assert p50(summary, "splice") is None
    assert hit_rate(summary, "none") is not None


def test_plots_are_drawings_that_load_nothing() -> None:
    for plot in plots(summaries(ROWS)).values():
        root = ET.fromstring(plot)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "http" not in plot.replace("http://www.w3.org/2000/svg", "")
        values = [
            float(y) for circle in root.iter("{http://www.w3.org/2000/svg}circle") for y in [circle.get("cy")] if y
        ]
        _, _, _, height = root.get("viewBox", "").split()
        assert all(0 < value < float(height) for value in values)


def test_files_become_plots_and_a_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    table = tmp_path / "table.md"
    assert concurrency_page.main([str(file), f"--out={tmp_path / 'out'}", f"--table={table}"]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["concurrency-gain.svg", "concurrency-hit-rate.svg", "concurrency-p50.svg"]
    assert len(table.read_text().splitlines()) == 2 + 4


def test_files_without_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        concurrency_page.main([str(tmp_path / "none.jsonl"), f"--out={tmp_path}"])
    assert "nothing to plot" in capsys.readouterr().err


def test_what_is_published_is_what_the_rows_say(tmp_path: Path) -> None:
    results, figures = REPOSITORY / "evals" / "results", REPOSITORY / "docs" / "figures"
    table = tmp_path / "concurrency.md"
    assert concurrency_page.main([str(results / "concurrency.jsonl"), f"--out={tmp_path}", f"--table={table}"]) == 0
    assert table.read_text() == (results / "concurrency.md").read_text()
    for plot in tmp_path.glob("*.svg"):
        assert plot.read_text() == (figures / plot.name).read_text()
