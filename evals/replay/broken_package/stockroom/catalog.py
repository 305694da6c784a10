"""The catalog: what can be in stock, read from CSV text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from stockroom.errors import CatalogError

COLUMNS = ("sku", "name", "unit", "price", "reorder_at")


@dataclass(frozen=True)
class Item:
    sku: str
    name: str
    unit: str
    price: Decimal
    reorder_at: int


def normalize_sku(sku: str) -> str:
    """SKUs are compared without regard to case and surrounding blanks."""
    return sku.strip().upper()


class Catalog:
    def __init__(self, items: list[Item]) -> None:
        self._items = {item.sku: item for item in items}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def __contains__(self, sku: str) -> bool:
        return normalize_sku(sku) in self._items

    def __getitem__(self, sku: str) -> Item:
        return self._items[normalize_sku(sku)]

    @classmethod
    def from_csv(cls, text: str) -> Catalog:
        """Read CSV with a header line; blank lines are skipped.

        Raises:
            CatalogError: a column is missing, a number is none, or a SKU appears twice.
        """
        lines = text.strip().splitlines()
        header = [name.strip() for name in lines[0].split(",")]
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise CatalogError(f"missing columns: {', '.join(missing)}", line=1)
        items: list[Item] = []
        seen: set[str] = set()
        for number, line in enumerate(lines[1:]):
            if not line.strip():
                continue
            row = dict(zip(header, line.split(",")))
            sku = row["sku"].strip()
            if sku in seen:
                raise CatalogError(f"SKU {sku!r} appears twice", line=number)
            seen.add(sku)
            try:
                price = Decimal(row["price"].strip())
                reorder_at = int(row["reorder_at"])
            except (InvalidOperation, ValueError) as error:
                raise CatalogError(f"bad number in {line!r}", line=number) from error
            items.append(Item(normalize_sku(sku), row["name"].strip(), row["unit"].strip(), price, reorder_at))
        return cls(items)
