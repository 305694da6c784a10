"""Inline SVG charts: plain strings, no library, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 34


@dataclass(frozen=True, slots=True)
class Series:
    """A line through one value for each turn, from turn 1."""

    name: str
    color: str
    values: Sequence[float]
    filled: bool = False
    dashed: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    width: int,
    height: int,
    x_max: int,
    y_max: float,
    y_label: str,
    show: Callable[[float], str],
    title: str,
) -> str:
    """Draw series over turns 1 to `x_max`, with grid lines at round numbers and a text alternative.

    Each turn has a tooltip with the values of all series.
    """
    top = nice_ceiling(y_max)
    inner_width, inner_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def x(turn: float) -> float:
        return _LEFT + inner_width * (turn - 1) / max(1, x_max - 1)

    def y(value: float) -> float:
        return _TOP + inner_height * (1 - value / top)

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for step in range(5):
        value = top * step / 4
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{show(value)}</text>'
        )
    for turn in _turn_ticks(x_max):
        parts.append(f'<text class="tick" x="{x(turn):.1f}" y="{height - 16}" text-anchor="middle">{turn}</text>')
    parts.append(f'<text class="axis" x="{width - _RIGHT}" y="{height - 2}" text-anchor="end">turn</text>')
    parts.append(f'<text class="axis" x="{_LEFT}" y="10">{escape(y_label)}</text>')
    for each in series:
        parts.append(_path(each, x, y))
    parts.extend(_tooltips(series, x_max, x, inner_width / max(1, x_max - 1), inner_height, show))
    return "".join([*parts, "</svg>"])


def nice_ceiling(value: float) -> float:
    """Return a round number at or above a value, one that four grid lines divide well."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(
        factor * unit for factor in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0) if value <= factor * unit
    )


def legend(entries: Mapping[str, str]) -> str:
    """Return a legend of names and colours."""
    items = (f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries.items())
    return f'<p class="legend">{"".join(items)}</p>'


def _path(series: Series, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    if not series.values:
        return ""
    points = [f"{x(turn):.1f},{y(value):.1f}" for turn, value in enumerate(series.values, start=1)]
    if series.filled:
        base = [f"{x(len(points)):.1f},{y(0):.1f}", f"{x(1):.1f},{y(0):.1f}"]
        return f'<polygon points="{" ".join(points + base)}" fill="{series.color}"/>'
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    line = f'<polyline points="{" ".join(points)}" fill="none" stroke="{series.color}" stroke-width="2.2"{dashes}/>'
    end_x, end_y = points[-1].split(",")
    return f'{line}<circle cx="{end_x}" cy="{end_y}" r="3.2" fill="{series.color}"/>'


def _tooltips(
    series: Sequence[Series],
    x_max: int,
    x: Callable[[float], float],
    step: float,
    inner_height: float,
    show: Callable[[float], str],
) -> list[str]:
    tooltips = []
    for turn in range(1, x_max + 1):
        values = [f"{each.name}: {show(each.values[turn - 1])}" for each in series if turn <= len(each.values)]
        if values:
            text = escape(f"turn {turn} · " + " · ".join(values))
            left = x(turn) - step / 2
            tooltips.append(
                f'<rect class="hover" x="{left:.1f}" y="{_TOP}" width="{step:.1f}" height="{inner_height}">'
                f"<title>{text}</title></rect>"
            )
    return tooltips


def _turn_ticks(x_max: int) -> list[int]:
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100) if x_max / step <= 10), 200)
    return [1, *range(step if step > 1 else 2, x_max + 1, step)]
