"""Prices: tiers by quantity, a voucher on top, rounded to cents."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Tier:
    """From `at_least` pieces on, `percent` off."""

    at_least: int
    percent: int


TIERS = (Tier(10, 5), Tier(50, 10), Tier(200, 20))


def tier_for(pieces: int, tiers: tuple[Tier, ...] = TIERS) -> Tier | None:
    """Return the best tier that `pieces` reaches, or None."""
    reached = [tier for tier in tiers if pieces > tier.at_least]
    return reached[0] if reached else None


def round_cents(amount: Decimal) -> Decimal:
    """Round to cents, a half cent up (away from zero)."""
    return Decimal(str(round(float(amount), 2)))


def price(unit_price: Decimal, pieces: int, voucher: Decimal = Decimal(0)) -> Decimal:
    """Return what `pieces` cost: the tier's discount first, then the voucher; never below zero.

    Raises:
        ValueError: fewer than one piece.
    """
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}")
    tier = tier_for(pieces)
    percent = tier.percent if tier else 0
    total = (unit_price * pieces - voucher) * (100 - percent) / 100
    return round_cents(total)
