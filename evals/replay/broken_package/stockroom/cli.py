"""`python -m stockroom.cli CATALOG COUNTS`: print what to reorder; exit with 1 if anything is low."""

from __future__ import annotations

import sys
from pathlib import Path

from stockroom.catalog import Catalog
from stockroom.errors import StockroomError
from stockroom.inventory import Inventory
from stockroom.quantity import parse_quantity
from stockroom.report import reorder_report, to_reorder


def read_counts(text: str) -> dict[str, int]:
    """Read lines of "SKU quantity"; the same SKU may come on several lines."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        sku, quantity = line.split(maxsplit=1)
        counts[sku] = int(parse_quantity(quantity).to_base().amount)
    return counts


def main(argv: list[str]) -> int:
    try:
        catalog = Catalog.from_csv(Path(argv[0]).read_text())
        inventory = Inventory(read_counts(Path(argv[1]).read_text()))
    except (StockroomError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(reorder_report(catalog, inventory))
    return 1 if to_reorder(catalog, inventory) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
