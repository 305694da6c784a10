"""A small stock keeper."""

from stockroom.catalog import Catalog, Item
from stockroom.inventory import Inventory
from stockroom.ledger import Ledger, Movement
from stockroom.pricing import price
from stockroom.quantity import Quantity, parse_quantity

__all__ = ["Catalog", "Inventory", "Item", "Ledger", "Movement", "Quantity", "parse_quantity", "price"]
