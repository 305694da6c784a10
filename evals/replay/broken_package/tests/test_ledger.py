from datetime import date

from stockroom.ledger import Ledger, Movement


def test_balance_includes_the_day_itself() -> None:
    ledger = Ledger([Movement(date(2024, 1, 10), "GLUE", 8), Movement(date(2024, 1, 12), "GLUE", -3)])
    assert ledger.balance("GLUE", date(2024, 1, 9)) == 0
    assert ledger.balance("GLUE", date(2024, 1, 10)) == 8
    assert ledger.balance("GLUE", date(2024, 1, 12)) == 5


def test_a_movement_may_be_booked_late() -> None:
    ledger = Ledger([Movement(date(2024, 3, 1), "GLUE", 10)])
    ledger.add(Movement(date(2024, 3, 20), "GLUE", -4))
    ledger.add(Movement(date(2024, 3, 5), "GLUE", 2))
    assert [movement.pieces for movement in ledger.movements("GLUE")] == [10, 2, -4]
    assert ledger.balance("GLUE", date(2024, 3, 10)) == 12


def test_balances_are_kept_apart_by_sku() -> None:
    ledger = Ledger([Movement(date(2024, 1, 1), "GLUE", 8), Movement(date(2024, 1, 1), "TAPE", 2)])
    assert ledger.balance("TAPE", date(2024, 2, 1)) == 2


def test_weeks_are_iso_weeks() -> None:
    ledger = Ledger(
        [
            Movement(date(2024, 1, 1), "GLUE", -1),
            Movement(date(2024, 1, 7), "GLUE", -2),
            Movement(date(2024, 1, 8), "GLUE", -4),
            Movement(date(2024, 12, 31), "GLUE", -8),
        ]
    )
    assert ledger.outgoing_by_week("GLUE") == {"2024-W01": 3, "2024-W02": 4, "2025-W01": 8}


def test_goods_in_are_not_outgoing() -> None:
    assert Ledger([Movement(date(2024, 1, 1), "GLUE", 5)]).outgoing_by_week("GLUE") == {}
