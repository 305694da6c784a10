"""The ledger: dated movements of stock, and balances made from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class Movement:
    on: date
    sku: str
    pieces: int
    """Positive for goods in, negative for goods out."""


class Ledger:
    def __init__(self, movements: Iterable[Movement] = ()) -> None:
        self._movements = sorted(movements, key=lambda movement: movement.on)

    def add(self, movement: Movement) -> None:
        """Book a movement; it may lie in the past."""
        self._movements.append(movement)

    def movements(self, sku: str | None = None) -> list[Movement]:
        """Return the movements (of one SKU) in the order of their dates."""
        return [movement for movement in self._movements if sku is None or movement.sku == sku]

    def balance(self, sku: str, on: date) -> int:
        """Return the pieces of `sku` at the end of the day `on`."""
        total = 0
        for movement in self.movements(sku):
            if movement.on >= on:
                break
            total += movement.pieces
        return total

    def outgoing_by_week(self, sku: str) -> dict[str, int]:
        """Return the pieces that went out in each ISO week, by "2024-W05"."""
        weeks: dict[str, int] = defaultdict(int)
        for movement in self.movements(sku):
            if movement.pieces < 0:
                weeks[movement.on.strftime("%Y-W%W")] -= movement.pieces
        return dict(weeks)
