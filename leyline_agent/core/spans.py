"""Half-open spans of token positions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The positions `start <= position < end`.

    Raises:
        ValueError: `start` is negative or `end` lies before it.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.end < self.start:
            raise ValueError(f"a span is 0 <= start <= end, got [{self.start}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.start

    def shifted(self, position_delta: int) -> Span:
        """Return the span moved by `position_delta` positions."""
        return Span(self.start + position_delta, self.end + position_delta)
