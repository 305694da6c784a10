"""Two text reports: what to reorder, and what sells."""

from __future__ import annotations

from stockroom.catalog import Catalog
from stockroom.inventory import Inventory
from stockroom.ledger import Ledger


def table(rows: list[tuple[str, ...]]) -> str:
    """Lay out rows in columns: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_reorder(catalog: Catalog, inventory: Inventory) -> list[tuple[str, int, int]]:
    """Return (sku, available, reorder_at) of items at or below their reorder point, the scarcest first."""
    low = []
    for item in catalog:
        available = inventory.available(item.sku)
        if available < item.reorder_at:
            low.append((item.sku, available, item.reorder_at))
    return sorted(low, key=lambda row: (str(row[1]), row[0]))


def best_sellers(ledger: Ledger, skus: list[str], limit: int = 3) -> list[tuple[str, int]]:
    """Return the `limit` SKUs of which most pieces went out, most first; ties by SKU."""
    sold = [(sku, sum(ledger.outgoing_by_week(sku).values())) for sku in skus]
    ranked = sorted(sold, key=lambda row: (-row[1], row[0]))
    return [row for row in ranked[: limit - 1] if row[1]]


def reorder_report(catalog: Catalog, inventory: Inventory) -> str:
    low = to_reorder(catalog, inventory)
    if not low:
        return "nothing to reorder"
    return table([("sku", "available", "reorder at")] + [(sku, str(a), str(r)) for sku, a, r in low])
