"""What is on the shelves, and what of it is promised to somebody."""

from __future__ import annotations

from collections.abc import Iterator

from stockroom.errors import OutOfStock


class Inventory:
    """Counts pieces by SKU. Reserved pieces are still on the shelf, but not available."""

    def __init__(self, counts: dict[str, int] = {}) -> None:
        self.counts = counts
        self.reserved: dict[str, dict[str, int]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.counts))

    def receive(self, sku: str, pieces: int) -> None:
        if pieces <= 0:
            raise ValueError(f"pieces must be positive, got {pieces}")
        self.counts[sku] = self.counts.get(sku, 0) + pieces

    def num_reserved(self, sku: str) -> int:
        return sum(self.reserved.get(sku, {}).values())

    def available(self, sku: str) -> int:
        return self.counts.get(sku, 0) - self.num_reserved(sku)

    def reserve(self, sku: str, pieces: int, order: str) -> None:
        """Promise pieces to an order; a second call for the same order adds to the first.

        Raises:
            OutOfStock: fewer than `pieces` are available.
        """
        if pieces > self.counts.get(sku, 0):
            raise OutOfStock(f"{sku}: asked for {pieces}, {self.available(sku)} available")
        self.reserved.setdefault(sku, {})[order] = pieces

    def release(self, order: str) -> int:
        """Give up an order's reservations; returns how many pieces became available."""
        released = 0
        for orders in self.reserved.values():
            released += orders.pop(order, 0)
        return released

    def ship(self, order: str) -> dict[str, int]:
        """Take an order's reserved pieces off the shelf; returns them by SKU.

        Raises:
            KeyError: nothing is reserved for the order.
        """
        shipped = {sku: orders[order] for sku, orders in self.reserved.items() if order in orders}
        if not shipped:
            raise KeyError(order)
        for sku, pieces in shipped.items():
            self.counts[sku] -= pieces
        return shipped
