"""Concurrency rows for people: `python -m evals.micro.concurrency_page ROWS --out docs/figures --table concurrency.md`.

Three SVG files, a panel for each model, label, length and n: the median time of a turn, the hit rate, and what the
splice gains over a re-prefill with its interval, each by the number of conversations; and the table of
`concurrency_table.py`, which also says what is shown of cells that were measured more than once. Plain strings,
nothing loaded.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from evals.micro.concurrency_rows import ARMS, PAIRED, read_rows, summaries
from evals.micro.concurrency_table import markdown, one_of_each_cell
from evals.replay.charts import nice_ceiling

Row = Mapping[str, Any]

COLORS = {"none": "#8a8f98", "reprefill": "#c2571a", "splice": "#1f6feb", "splice_ungated": "#5aa9a3"}
NAMES = {
    "none": "no edits",
    "reprefill": "edits, re-prefilled",
    "splice": "edits, spliced",
    "splice_ungated": "spliced without the gate",
}
_PANEL, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 250, 54, 14, 54, 40
_COLUMNS, _LEGEND = 2, 20
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#3d444d}.title{font-weight:600;fill:#1f2328}"
    ".grid{stroke:#d8dee4}.zero{stroke:#8a8f98;stroke-width:1.4}"
)


@dataclass(frozen=True, slots=True)
class Point:
    """A value over a number of conversations."""

    concurrency: int
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """The lines of one model, label, length and n."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    """By arm."""


def panels(found: Sequence[Row], arms: Sequence[str], point: Callable[[Row, str], Point | None]) -> list[Panel]:
    """Sort summaries into panels; `point` gives what an arm has in one of them."""
    sorted_into: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for summary in found:
        name = " · ".join(
            filter(
                None,
                [
                    str(summary.get("model") or ""),
                    str(summary.get("label") or ""),
                    f"{summary['prompt_tokens']:,} tokens",
                    f"n = {summary['keep_turns']}",
                ],
            )
        )
        for arm in arms:
            value = point(summary, arm)
            if value is not None:
                sorted_into[name][arm].append(value)
    return [
        Panel(name, {arm: sorted(points, key=lambda p: p.concurrency) for arm, points in lines.items()})
        for name, lines in sorted_into.items()
    ]


def p50(summary: Row, arm: str) -> Point | None:
    """Median time of a turn, in seconds."""
    figures = summary["arms"].get(arm)
    return figures and Point(summary["concurrency"], figures["p50_ms"] / 1e3)


def hit_rate(summary: Row, arm: str) -> Point | None:
    """Share of prompt tokens that were cached, in per cent."""
    figures = summary["arms"].get(arm)
    return figures and Point(summary["concurrency"], 100 * figures["hit_rate"])


def gain(summary: Row, arm: str) -> Point | None:
    """How much less the median is than that of a re-prefill, in per cent."""
    pair = summary["pairs"].get(arm)
    if not pair:
        return None
    ratio = pair["ratio"]
    low, high = (None if ratio[end] is None else 100 * (1 - ratio[end]) for end in ("high", "low"))
    return Point(summary["concurrency"], 100 * (1 - ratio["value"]), low, high)


def chart(shown: Sequence[Panel], *, title: str, unit: str, low: float = 0.0, high: float | None = None) -> str:
    """Draw panels beside each other; the value axis of each goes from `low` to `high`, or as far as its values do."""
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    arms = [arm for arm in ARMS if any(arm in panel.lines for panel in shown)]
    in_a_row = min(len(arms), 2 * columns)
    width, height = columns * _PANEL, rows * _HEIGHT + _LEGEND * -(-len(arms) // in_a_row) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for idx, panel in enumerate(shown):
        at = f"translate({idx % columns * _PANEL} {idx // columns * _HEIGHT})"
        parts.append(f'<g transform="{at}">{_panel(panel, unit, low, high)}</g>')
    for idx, arm in enumerate(arms):
        x = 14 + idx % in_a_row * (width - 28) / in_a_row
        y = rows * _HEIGHT + _LEGEND * (idx // in_a_row + 1) - 4
        parts.append(f'<circle cx="{x + 4:.0f}" cy="{y - 4}" r="4" fill="{COLORS[arm]}"/>')
        parts.append(f'<text x="{x + 13:.0f}" y="{y}">{escape(NAMES[arm])}</text>')
    return "".join([*parts, "</svg>\n"])


def _panel(panel: Panel, unit: str, low: float, high: float | None) -> str:
    points = [point for line in panel.lines.values() for point in line]
    numbers = sorted({point.concurrency for point in points})
    ends = [value for p in points for value in (p.value, p.low, p.high) if value is not None]
    top = high if high is not None else nice_ceiling(max(ends))
    step = (top - low) / 4
    # Whole steps below it, so that the grid goes through it.
    num_below = max(0, math.ceil((low - min(ends)) / step))
    bottom = low - num_below * step
    inner_width, inner_height = _PANEL - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(concurrency: int) -> float:
        return _LEFT + inner_width * (numbers.index(concurrency) + 0.5) / len(numbers)

    def y(value: float) -> float:
        return _TOP + inner_height * (top - value) / (top - bottom)

    parts = [
        f'<text class="title" x="{_LEFT}" y="20">{escape(panel.title)}</text>',
        f'<text x="{_LEFT}" y="{_TOP - 14}">{escape(unit)}</text>',
        f'<text x="{_PANEL - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">conversations</text>',
    ]
    across = f'x1="{_LEFT}" x2="{_PANEL - _RIGHT}"'
    for idx in range(num_below + 5):
        value = bottom + step * idx
        parts.append(f'<line class="grid" {across} y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    if bottom < 0:
        parts.append(f'<line class="zero" {across} y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    for number in numbers:
        parts.append(f'<text x="{x(number):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{number}</text>')
    for idx, (arm, line) in enumerate(panel.lines.items()):
        color = COLORS[arm]
        # Intervals of two arms stand beside each other.
        shift = 5 * (idx - (len(panel.lines) - 1) / 2) if any(point.low is not None for point in line) else 0
        path = " ".join(f"{x(point.concurrency) + shift:.1f},{y(point.value):.1f}" for point in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for point in line:
            at = x(point.concurrency) + shift
            tooltip = f"{NAMES[arm]}, {point.concurrency} conversations: {point.value:.3g}"
            if point.low is not None and point.high is not None:
                tooltip += f" [{point.low:.3g}, {point.high:.3g}]"
                parts.append(
                    f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(point.low):.1f}" y2="{y(point.high):.1f}" '
                    f'stroke="{color}" stroke-width="1.6"/>'
                )
            parts.append(
                f'<circle cx="{at:.1f}" cy="{y(point.value):.1f}" r="3.2" fill="{color}">'
                f"<title>{escape(tooltip)}</title></circle>"
            )
    return "".join(parts)


def plots(found: Sequence[Row]) -> dict[str, str]:
    """Return the plots of summaries by file name."""
    rates = panels(found, ARMS, hit_rate)
    least = min(point.value for panel in rates for line in panel.lines.values() for point in line)
    return {
        "concurrency-p50.svg": chart(
            panels(found, ARMS, p50),
            title="Median time of a turn, by conversations side by side",
            unit="p50 of a turn, s",
        ),
        "concurrency-hit-rate.svg": chart(
            rates,
            title="Share of prompt tokens from the cache, by conversations side by side",
            unit="hit rate, %",
            low=10 * (least // 10),
            high=100,
        ),
        "concurrency-gain.svg": chart(
            panels(found, PAIRED, gain),
            title="What a splice gains over a re-prefill, with 95% intervals, by conversations side by side",
            unit="p50 below re-prefill's, %",
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the plots and the table, and print their names."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.micro.concurrency_page", description="Plots and table of rows."
    )
    parser.add_argument("files", type=Path, nargs="+", help="rows of evals.micro.concurrency")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the plots")
    parser.add_argument("--table", type=Path, help="a Markdown file")
    options = parser.parse_args(arguments)
    found = one_of_each_cell(summaries(row for file in options.files for row in read_rows(file)))
    if not found:
        parser.error("no finished run of a splice and of a re-prefill in these files; nothing to plot")
    options.out.mkdir(parents=True, exist_ok=True)
    written = {options.out / name: plot for name, plot in plots(found).items()}
    if options.table is not None:
        written[options.table] = markdown(found)
    for path, text in written.items():
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
