"""Quantities with units: "12", "1.5 kg", "250g", "3 x 6"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from stockroom.errors import QuantityError

# Units that measure the same thing, and how many of the base unit one of them is.
BASE_UNITS = {
    "": ("", Decimal(1)),
    "pcs": ("", Decimal(1)),
    "dozen": ("", Decimal(12)),
    "kg": ("kg", Decimal(1)),
    "g": ("kg", Decimal(1000)),
    "l": ("l", Decimal(1)),
    "ml": ("l", Decimal(1000)),
}

PATTERN = re.compile(r"^(?:(?P<times>\d+)\s*x\s*)?(?P<amount>\d+)\s*(?P<unit>[a-z]*)$")


@dataclass(frozen=True)
class Quantity:
    amount: Decimal
    unit: str = ""

    def to_base(self) -> Quantity:
        """Return the same quantity in the base unit of its kind."""
        base, factor = BASE_UNITS[self.unit]
        return Quantity(self.amount * factor, base)

    def __add__(self, other: Quantity) -> Quantity:
        left, right = self.to_base(), other.to_base()
        if left.unit != right.unit:
            raise QuantityError(f"cannot add {other.unit or 'pieces'} to {self.unit or 'pieces'}")
        return Quantity(left.amount + right.amount, left.unit)

    def __str__(self) -> str:
        text = format(self.amount.normalize(), "f")
        return f"{text} {self.unit}".strip()


def parse_quantity(text: str) -> Quantity:
    """Read a quantity; "3 x 6" means eighteen.

    Raises:
        QuantityError: the text is no quantity, or its unit is unknown.
    """
    match = PATTERN.match(text.strip().lower())
    if match is None:
        raise QuantityError(f"not a quantity: {text!r}")
    unit = match["unit"]
    if unit not in BASE_UNITS:
        raise QuantityError(f"unknown unit {unit!r} in {text!r}; known: {', '.join(u for u in BASE_UNITS if u)}")
    amount = Decimal(match["amount"])
    if match["times"]:
        amount *= Decimal(match["times"])
    return Quantity(amount, unit)
