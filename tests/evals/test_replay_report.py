from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evals.replay.charts import Series, line_chart, nice_ceiling
from evals.replay.demo import check
from evals.replay.errors import ReplayError
from evals.replay.report import render_report
from evals.replay.runner import ReplayRequest, keep_last_policy, make_summary
from evals.replay.server_facts import ServerFacts
from evals.replay.trajectory import load_trajectory
from evals.replay.turn_rows import ARMS, ArmResult, TurnRow

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _rows(arm: Any, num: int) -> tuple[TurnRow, ...]:
    status = "spliced" if arm == "splice" else None
    return tuple(TurnRow(arm, n, 100 * n, 90 * n - 90, 0, 10.0 * n, 9.0 * n, 1, status) for n in range(1, num + 1))


@pytest.fixture
def results() -> list[ArmResult]:
    stopped = {"none": "turn 3: the prompt has 300 tokens, more than 250"}
    return [ArmResult(arm, _rows(arm, 3 if arm == "none" else 6), stopped.get(arm)) for arm in ARMS]


@pytest.fixture
def summary(tmp_path: Path, results: list[ArmResult]) -> dict[str, Any]:
    file = tmp_path / "t.json"
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    file.write_text(json.dumps({"source": "<b>recorded</b> & kept", "messages": messages}))
    trajectory = load_trajectory(file)
    return make_summary(
        ReplayRequest(trajectory, keep_last_policy(2, trajectory)), ServerFacts("tiny", None, "0.5.23"), results
    )


def test_summary_names_arms_policy_and_versions(summary: dict[str, Any]) -> None:
    assert list(summary["arms"]) == ["none", "reprefill", "splice"]
    assert summary["policy"]["name"] == "keep_last_observations"
    assert summary["versions"]["python"]
    assert summary["same_prompts"] is True
    json.dumps(summary)


def test_prompts_that_differ_between_edited_arms_are_told(tmp_path: Path, results: list[ArmResult]) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]))
    trajectory = load_trajectory(file)
    results[2] = ArmResult("splice", results[2].rows, prompt_digests=("other",))
    request = ReplayRequest(trajectory, keep_last_policy(2, trajectory))
    summary = make_summary(request, ServerFacts("tiny", None, None), results)
    assert summary["same_prompts"] is False
    assert "did not send the same messages" in render_report(summary, [])


def test_page_is_whole_and_loads_nothing(summary: dict[str, Any], results: list[ArmResult]) -> None:
    page = render_report(summary, [row for result in results for row in result.rows])
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert page.count("<svg") == 4
    assert re.findall(r"""(?:src|href|url)\s*[=(]|https?:|@import""", page) == []


def test_page_says_what_happened(summary: dict[str, Any], results: list[ArmResult]) -> None:
    page = render_report(summary, [row for result in results for row in result.rows])
    assert page.count("&lt;b&gt;recorded&lt;/b&gt; &amp; kept") == 2
    assert "<b>recorded" not in page
    assert "<b>none</b> stopped at turn 3: the prompt has 300 tokens, more than 250." in page
    assert f"{summary['arms']['splice']['hit_rate']:.1%}" in page
    assert "turn 6 · prompt: 600 · cached: 450" in page


def test_page_of_one_arm(summary: dict[str, Any], results: list[ArmResult]) -> None:
    alone = {**summary, "arms": {"reprefill": summary["arms"]["reprefill"]}}
    page = render_report(alone, results[1].rows)
    assert "One trajectory, one arm" in page
    assert page.count("<svg") == 2


@pytest.mark.parametrize(("value", "expected"), [(0, 1), (7, 8), (8, 8), (30_200, 32_000), (0.13, 0.16), (99, 100)])
def test_axes_end_at_round_numbers(value: float, expected: float) -> None:
    assert nice_ceiling(value) == pytest.approx(expected)


def test_a_chart_of_one_turn_and_of_none() -> None:
    for values in ([5.0], []):
        svg = line_chart(
            [Series("a", "#000", values)], width=200, height=100, x_max=1, y_max=5, y_label="y", show=str, title="t"
        )
        assert "nan" not in svg
        assert svg.endswith("</svg>")


def test_demo_passes_with_splices_and_no_fallback(summary: dict[str, Any]) -> None:
    check(summary)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"splices": 0}, "no turn of the splice arm was spliced", id="no splices"),
        pytest.param(
            {"fallbacks": 2, "fallbacks_by_reason": {"evicted": 2}}, r"2 of 6 turns .* \(evicted: 2\)", id="fallbacks"
        ),
    ],
)
def test_demo_fails_without_splices_or_with_fallbacks(
    summary: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    summary["arms"]["splice"] |= change
    with pytest.raises(ReplayError, match=message):
        check(summary)
