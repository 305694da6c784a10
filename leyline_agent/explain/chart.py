"""An inline SVG chart of what each request's prompt is made of. Plain strings, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 960, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 16, 34


@dataclass(frozen=True, slots=True)
class Bar:
    """One request, in tokens."""

    kept: int
    moved: int
    recomputed: int
    recomputed_without_splice: int
    before: int
    """Of the unedited prompt."""
    has_edits: bool


def chart(bars: Sequence[Bar], *, title: str) -> str:
    """Draw a stacked bar for each request, and lines for the unedited prompt and for what is computed without splices.

    Colours are the page's: classes `kept`, `moved`, `recomputed`, `before`, `without`. Each bar has a tooltip, and an
    attribute `data-turn`.
    """
    top = _nice_ceiling(max((max(bar.before, bar.kept + bar.moved + bar.recomputed) for bar in bars), default=1))
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = inner_width / max(1, len(bars))

    def y(value: float) -> float:
        return _TOP + inner_height * (1 - value / top)

    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for quarter in range(5):
        value = top * quarter / 4
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    for number, bar in enumerate(bars, 1):
        left = _LEFT + step * (number - 1)
        at = 0
        parts.append(f'<g class="bar" data-turn="{number}"><title>{escape(_tooltip(number, bar))}</title>')
        for kind, value in (("kept", bar.kept), ("moved", bar.moved), ("recomputed", bar.recomputed)):
            parts.append(
                f'<rect class="{kind}" x="{left + step * 0.1:.1f}" width="{step * 0.8:.1f}" '
                f'y="{y(at + value):.1f}" height="{y(at) - y(at + value):.1f}"/>'
            )
            at += value
        if bar.has_edits:
            middle = left + step / 2
            parts.append(f'<circle class="edit" cx="{middle:.1f}" cy="{_HEIGHT - _BOTTOM + 6}" r="2.4"/>')
        parts.append(f'<rect class="hover" x="{left:.1f}" width="{step:.1f}" y="{_TOP}" height="{inner_height}"/></g>')
    for kind, values in (
        ("before", [bar.before for bar in bars]),
        ("without", [bar.recomputed_without_splice for bar in bars]),
    ):
        points = " ".join(f"{_LEFT + step * (idx + 0.5):.1f},{y(value):.1f}" for idx, value in enumerate(values))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    for number in _ticks(len(bars)):
        middle = _LEFT + step * (number - 0.5)
        parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{number}</text>')
    return "".join([*parts, "</svg>"])


def _tooltip(number: int, bar: Bar) -> str:
    return (
        f"turn {number}: kept {bar.kept:,}, moved {bar.moved:,}, recomputed {bar.recomputed:,} "
        f"(without splices {bar.recomputed_without_splice:,}); unedited {bar.before:,}"
    )


def _nice_ceiling(value: float) -> float:
    """Return a round number at or above a value, one that four grid lines divide well."""
    unit = 10.0 ** max(1, math.floor(math.log10(max(1.0, value))))
    return next(
        factor * unit for factor in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0) if value <= factor * unit
    )


def _ticks(num_bars: int) -> list[int]:
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if num_bars / step <= 14), 1000)
    return [number for number in range(1, num_bars + 1) if number == 1 or number % step == 0]
