"""Inline SVG: values with intervals, and stacked bars, a line for each name. Plain strings, nothing loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _RIGHT, _TOP, _BOTTOM = 960, 24, 8, 30
# Wider than most letters are at the size that the page's style gives them.
_LETTER, _MAX_LETTERS = 7.2, 56


@dataclass(frozen=True, slots=True)
class Mark:
    """A value on a line, with an interval around it."""

    value: float
    low: float
    high: float
    kind: str
    """A class of the page's style."""
    tooltip: str


@dataclass(frozen=True, slots=True)
class Line:
    """A name and what stands beside it."""

    name: str
    marks: Sequence[Mark | None]
    """None keeps a place free, so that what belongs together stands at the same height in each line."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A name and lengths that are put end to end."""

    name: str
    parts: Sequence[tuple[str, float]]
    """Class and length."""
    tooltip: str


def interval_plot(lines: Sequence[Line], *, low: float, high: float, show: Callable[[float], str], title: str) -> str:
    """Draw each value as a dot on the line of its name, with its interval, between `low` and `high`.

    Several marks of a line stand below each other. A heavier grid line stands at 0 where that is inside.
    """
    pitch = 13 if max((len(line.marks) for line in lines), default=1) > 1 else 18
    heights = [max(26, pitch * len(line.marks) + 12) for line in lines]
    frame = _Frame([line.name for line in lines], heights, low, high)
    parts = frame.open(title, show)
    for line, top, height in zip(lines, frame.tops, heights, strict=True):
        for idx, mark in enumerate(line.marks):
            if mark is None:
                continue
            y = top + height / 2 + pitch * (idx - (len(line.marks) - 1) / 2)
            parts.append(
                f'<g class="mark {mark.kind}"><title>{escape(mark.tooltip)}</title>'
                f'<line x1="{frame.x(mark.low):.1f}" x2="{frame.x(mark.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<circle cx="{frame.x(mark.value):.1f}" cy="{y:.1f}" r="4.5"/></g>'
            )
    return "".join([*parts, "</svg>"])


def bar_plot(bars: Sequence[Bar], *, high: float, show: Callable[[float], str], title: str) -> str:
    """Draw stacked horizontal bars from 0 to `high`."""
    heights = [30.0] * len(bars)
    frame = _Frame([bar.name for bar in bars], heights, 0, high)
    parts = frame.open(title, show)
    for bar, top in zip(bars, frame.tops, strict=True):
        parts.append(f'<g class="bar"><title>{escape(bar.tooltip)}</title>')
        at = 0.0
        for kind, length in bar.parts:
            x, width = frame.x(at), frame.x(at + length) - frame.x(at)
            parts.append(f'<rect class="{kind}" x="{x:.1f}" width="{width:.1f}" y="{top + 6:.1f}" height="18"/>')
            at += length
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


class _Frame:
    """Names on the left, a grid on the right."""

    def __init__(self, names: Sequence[str], heights: Sequence[float], low: float, high: float) -> None:
        self._names = [name if len(name) <= _MAX_LETTERS else f"{name[: _MAX_LETTERS - 1]}…" for name in names]
        self._heights, self._low, self._high = heights, low, high
        self._left = 24 + _LETTER * max((len(name) for name in self._names), default=0)
        self.tops = [_TOP + sum(heights[:idx]) for idx in range(len(heights))]
        self._bottom = _TOP + sum(heights)

    def x(self, value: float) -> float:
        """Return where a value stands."""
        return self._left + (_WIDTH - _RIGHT - self._left) * (value - self._low) / (self._high - self._low)

    def open(self, title: str, show: Callable[[float], str]) -> list[str]:
        """Return the beginning of the drawing: a text alternative, names and grid."""
        parts = [
            f'<svg class="chart" viewBox="0 0 {_WIDTH} {self._bottom + _BOTTOM:.0f}" role="img" '
            f'aria-label="{escape(title)}"><title>{escape(title)}</title>'
        ]
        for step in range(5):
            value = self._low + (self._high - self._low) * step / 4
            x = self.x(value)
            kind = "zero" if value == 0 and self._low < 0 else "grid"
            parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{self._bottom:.1f}"/>')
            anchor = "end" if step == 4 else "middle"
            parts.append(
                f'<text x="{x:.1f}" y="{self._bottom + 18:.1f}" text-anchor="{anchor}">{escape(show(value))}</text>'
            )
        for name, top, height in zip(self._names, self.tops, self._heights, strict=True):
            parts.append(
                f'<text x="{self._left - 12:.1f}" y="{top + height / 2 + 4:.1f}" text-anchor="end">{escape(name)}'
                "</text>"
            )
        return parts
