"""The page of a report: what is in it, that it loads nothing, and how a browser lays it out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evals.solve_rate.page import report_as_page
from evals.solve_rate.report import make_report
from tests.evals.synthetic_runs import KEEP, RUN, paired_rows, row, three_arms

_CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
_VOID = {"meta", "line", "circle", "rect"}
SPLICE = f"{KEEP}/splice"


class _Page(HTMLParser):
    """Titles, headings, tooltips, table cells and addresses of a page; fails on a tag that is closed wrongly."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {"title": [], "h1": [], "text": [], "td": []}
        self.marks: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.addresses += [value for name, value in given.items() if name in ("src", "href", "data", "srcset")]
        if given.get("class", "").startswith("mark "):
            self.marks.append(given["class"].removeprefix("mark "))
        if tag not in _VOID:
            self.open.append(tag)
            if tag in self.texts:
                self.texts[tag].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += text


def _page(rows: Any) -> _Page:
    return _Page(report_as_page(make_report(rows)))


def test_it_loads_nothing_and_runs_nothing() -> None:
    html = report_as_page(make_report(three_arms()))
    page = _Page(html)
    assert page.addresses == []
    assert "script" not in page.tags
    assert not re.search(r"https?://|@import|url\(", html)


@pytest.mark.parametrize("scripted", [None, "solver"])
def test_its_title_and_heading_are_the_reports(scripted: str | None) -> None:
    rows = [each.model_copy(update={"scripted": scripted}) for each in three_arms()]
    html = report_as_page(make_report(rows))
    page = _Page(html)
    title = make_report(rows).title
    assert title.startswith("SCRIPTED, NO MODEL: " if scripted else "Solve rates of synthetic rows, not measured")
    assert page.texts["title"][0] == title
    assert page.texts["h1"] == [title]
    assert ('class="warning"' in html) == (scripted is not None)


def test_a_scripted_arm_is_named_in_the_title_and_in_its_row() -> None:
    rows = [
        each.model_copy(update={"scripted": "solver" if each.arm == SPLICE else None})
        for each in paired_rows("none", SPLICE, [["++", "--"]] * 2)
    ]
    page = _page(rows)
    but = f"but in {SPLICE} a script, solver, stands for the model"
    assert page.texts["title"][0] == f"PARTLY SCRIPTED: solve rates of {RUN}: a made-up model ({but})"
    assert page.texts["td"].count("a script: solver") == 1
    assert page.texts["td"].count("as in the title") == 1


def test_what_is_not_distinguishable_is_called_so() -> None:
    assert _page(three_arms()).texts["td"].count("not distinguishable") == 3
    assert "higher than none" in _page(paired_rows("none", SPLICE, [["-+", "--", "++"]] * 20)).texts["td"]


def test_each_plot_has_a_mark_for_each_number() -> None:
    page = _page(three_arms())
    # Three arms' rates, three differences, three times; of 24 tasks by arm, three had no episode that ended.
    assert len(page.marks) == 3 + 3 + 3 + 21
    assert set(page.marks) == {"none", "reprefill", "splice"}
    tooltips = page.texts["title"]
    assert "none: 10 of 34, 29.4% (16.8 to 46.2%)" in tooltips
    assert f"{SPLICE}: 31,002 prompt tokens an episode, 24,000 (77.4%) of them cached" in tooltips
    assert any(text.startswith(f"{SPLICE} against none: not distinguishable. +14.3 points") for text in tooltips)


def test_a_mark_stands_where_its_number_is() -> None:
    html = report_as_page(make_report(paired_rows("none", SPLICE, [["++", "-+"]] * 4)))
    (rates,) = re.findall(r'<svg[^>]*aria-label="mini_nightmare: solve rate of each arm">.*?</svg>', html, re.DOTALL)
    grid = [float(x) for x in re.findall(r'<line class="grid" x1="([\d.]+)"', rates)]
    low, value, high = (
        [float(x) for x in re.findall(pattern, rates)]
        for pattern in (r'<line x1="([\d.]+)"', r'<circle cx="([\d.]+)"', r'<line x1="[\d.]+" x2="([\d.]+)"')
    )
    assert len(grid) == 5
    assert value == pytest.approx([grid[2], grid[4]], abs=0.1)
    # Wilson's intervals of 4 and 8 of 8.
    assert low == pytest.approx([grid[0] + share * (grid[4] - grid[0]) for share in (0.2152, 0.6756)], abs=0.1)
    assert high == pytest.approx([grid[0] + share * (grid[4] - grid[0]) for share in (0.7848, 1.0)], abs=0.1)


def test_errors_and_skipped_episodes_have_a_table_of_their_own() -> None:
    page = _page(three_arms())
    cells = page.texts["td"]
    assert cells.count("the server was gone") == 3
    assert cells.count("the server was not there") == 3
    assert "none: 1 error; were it a failure, the rate would be 28.6%" in report_as_page(make_report(three_arms()))
    assert "<h2>Errors and skipped" not in report_as_page(make_report([row("none", "a", 0, "solved")]))


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([row("none", "a", 0, "solved")], id="one episode"),
        pytest.param([row("none", "a", 0, "error"), row(SPLICE, "a", 0, "skipped")], id="no episode ended"),
        pytest.param([row("none", "a", 0, "failed", turn_ms=(), prompt_tokens=0, cached_tokens=0)], id="no turn"),
        pytest.param(paired_rows("none", SPLICE, [["--"]] * 3), id="no difference"),
    ],
)
def test_a_run_with_little_in_it_has_a_page(rows: Any) -> None:
    assert _page(rows).texts["h1"] == [make_report(rows).title]


def test_what_rows_say_is_no_markup() -> None:
    hostile = "<script>alert(1)</script>"
    said = {"arm": hostile, "run": hostile, "model": hostile}
    rows = [
        row("none", hostile, 0, "solved", fallbacks={hostile: 1}).model_copy(update=said),
        row("none", hostile, 1, "error", reason=hostile, scripted=hostile).model_copy(update=said),
    ]
    html = report_as_page(make_report(rows))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") > 8


_MEASURE = """
<script>
const outside = [], cut = [], bottoms = {};
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  for (const part of svg.querySelectorAll("text, circle, .mark line, .bar rect")) {
    const box = part.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
      outside.push(part.outerHTML);
  }
}
for (const table of document.querySelectorAll(".scroll"))
  if (table.scrollWidth > table.clientWidth + 1) cut.push(table.textContent.slice(0, 60));
document.title = JSON.stringify({outside, cut, overflow: document.documentElement.scrollWidth - window.innerWidth,
  plots: document.querySelectorAll("svg").length});
</script>"""


def _chromium(*arguments: str) -> str:
    if _CHROMIUM is None:
        pytest.skip("no Chromium in PATH: the page was not laid out")
    command = [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("rows", [three_arms(), paired_rows("none", f"{'a_long_name_' * 6}/splice", [["-+"]] * 8)])
def test_a_browser_finds_room_for_all_of_it(rows: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(report_as_page(make_report(rows)) + _MEASURE, encoding="utf-8")
    dom = _chromium("--dump-dom", "--window-size=1080,1000", file.as_uri())

    (title,) = re.findall(r"<title>(\{.*?\})</title>", dom)
    laid_out = json.loads(title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert laid_out["plots"] == 5
    assert laid_out["outside"] == []
    assert laid_out["overflow"] <= 0
    if rows[1].arm == f"{KEEP}/reprefill":
        assert laid_out["cut"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "number"), [("dark", 0), ("light", 1)])
def test_a_browser_paints_it_as_the_reader_prefers(scheme: str, number: int, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    file, shot = tmp_path / "page.html", tmp_path / "shot.png"
    file.write_text(report_as_page(make_report(three_arms())), encoding="utf-8")
    _chromium(
        f"--blink-settings=preferredColorScheme={number}",
        "--window-size=1000,1400",
        f"--screenshot={shot}",
        file.as_uri(),
    )

    painted = image.open(shot).convert("RGB")
    assert (max(painted.getpixel((2, 2))) < 60) == (scheme == "dark")
    # The colours of the three executions are there: the page's style reaches the plots.
    colors = {color for _, color in painted.getcolors(1 << 24)}
    expected = {"dark": ((0x8B, 0x93, 0x9B), (0xEE, 0x9A, 0x55), (0x6E, 0xA2, 0xF2))}.get(
        scheme, ((0x70, 0x76, 0x7D), (0xD2, 0x69, 0x1E), (0x2F, 0x6F, 0xD0))
    )
    assert set(expected) <= colors
