import pytest

from stockroom.errors import OutOfStock
from stockroom.inventory import Inventory


def test_receive_adds_up() -> None:
    inventory = Inventory()
    inventory.receive("BOLT-8", 5)
    inventory.receive("BOLT-8", 7)
    assert inventory.available("BOLT-8") == 12


def test_a_new_inventory_is_empty() -> None:
    assert list(Inventory()) == []


def test_the_callers_counts_are_not_changed() -> None:
    counts = {"BOLT-8": 5}
    Inventory(counts).receive("BOLT-8", 1)
    assert counts == {"BOLT-8": 5}


def test_reserved_pieces_are_not_available() -> None:
    inventory = Inventory({"BOLT-8": 10})
    inventory.reserve("BOLT-8", 4, order="a")
    assert inventory.available("BOLT-8") == 6


def test_two_orders_cannot_share_a_piece() -> None:
    inventory = Inventory({"BOLT-8": 10})
    inventory.reserve("BOLT-8", 6, order="a")
    with pytest.raises(OutOfStock, match="asked for 6, 4 available"):
        inventory.reserve("BOLT-8", 6, order="b")


def test_a_second_reservation_of_an_order_adds() -> None:
    inventory = Inventory({"BOLT-8": 10})
    inventory.reserve("BOLT-8", 2, order="a")
    inventory.reserve("BOLT-8", 3, order="a")
    assert inventory.num_reserved("BOLT-8") == 5


def test_release_makes_available() -> None:
    inventory = Inventory({"BOLT-8": 10, "NUT-8": 10})
    inventory.reserve("BOLT-8", 2, order="a")
    inventory.reserve("NUT-8", 3, order="a")
    assert inventory.release("a") == 5
    assert inventory.available("BOLT-8") == 10


def test_shipping_takes_off_the_shelf_and_ends_the_reservation() -> None:
    inventory = Inventory({"BOLT-8": 10})
    inventory.reserve("BOLT-8", 4, order="a")
    assert inventory.ship("a") == {"BOLT-8": 4}
    assert inventory.counts == {"BOLT-8": 6}
    assert inventory.available("BOLT-8") == 6


def test_shipping_nothing_is_an_error() -> None:
    with pytest.raises(KeyError):
        Inventory({"BOLT-8": 1}).ship("a")
