from decimal import Decimal

import pytest

from stockroom.pricing import price, round_cents, tier_for


@pytest.mark.parametrize(
    ("pieces", "percent"), [(1, None), (9, None), (10, 5), (49, 5), (50, 10), (199, 10), (200, 20), (1000, 20)]
)
def test_tier(pieces: int, percent: int | None) -> None:
    tier = tier_for(pieces)
    assert (tier.percent if tier else None) == percent


@pytest.mark.parametrize(
    ("amount", "expected"), [("1.004", "1.00"), ("1.005", "1.01"), ("2.675", "2.68"), ("0.125", "0.13")]
)
def test_half_cents_go_up(amount: str, expected: str) -> None:
    assert round_cents(Decimal(amount)) == Decimal(expected)


def test_tier_first_then_voucher() -> None:
    assert price(Decimal("2.00"), 10, voucher=Decimal("5")) == Decimal("14.00")


def test_never_below_zero() -> None:
    assert price(Decimal("1.00"), 2, voucher=Decimal("10")) == Decimal("0.00")


def test_no_pieces_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        price(Decimal("1"), 0)
