from decimal import Decimal

import pytest

from stockroom.errors import QuantityError
from stockroom.quantity import Quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", Quantity(Decimal(12))),
        ("250g", Quantity(Decimal(250), "g")),
        ("1.5 kg", Quantity(Decimal("1.5"), "kg")),
        ("0.75l", Quantity(Decimal("0.75"), "l")),
        ("3 x 6", Quantity(Decimal(18))),
        ("2 Dozen", Quantity(Decimal(2), "dozen")),
    ],
)
def test_parse(text: str, expected: Quantity) -> None:
    assert parse_quantity(text) == expected


@pytest.mark.parametrize("text", ["", "many", "1,5 kg", "1.2.3", "-4", "5 parsecs"])
def test_parse_rejects(text: str) -> None:
    with pytest.raises(QuantityError):
        parse_quantity(text)


def test_grams_add_to_kilograms() -> None:
    assert parse_quantity("250g") + parse_quantity("1 kg") == Quantity(Decimal("1.25"), "kg")


def test_dozens_add_to_pieces() -> None:
    assert parse_quantity("1 dozen") + parse_quantity("3") == Quantity(Decimal(15))


def test_litres_do_not_add_to_kilograms() -> None:
    with pytest.raises(QuantityError, match="cannot add l to kg"):
        parse_quantity("1 kg") + parse_quantity("1 l")


def test_str_drops_trailing_zeros() -> None:
    assert str(Quantity(Decimal("1.50"), "kg")) == "1.5 kg"
    assert str(Quantity(Decimal("100"))) == "100"
