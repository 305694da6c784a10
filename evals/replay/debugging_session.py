"""What the scripted agent does to the broken package: a thought and one or two tool calls a step.

The script knows the bugs, but works as agents do: it looks before it edits, runs the tests again after each edit,
reads files it has read before, mistypes an edit now and then and tries small things in Python. `record.py` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call; `arguments` as the tool in `record.TOOLS` takes them."""

    tool: str
    arguments: dict[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """One assistant message."""

    thought: str
    calls: tuple[Call, ...]


SYSTEM = (
    "You are a careful software engineer. You are given a broken Python package and tools to look at it, to change it "
    "and to run its tests. Find the causes, fix the package, never the tests, and stop when all tests pass. Say in a "
    "sentence what you are about to do, then call a tool."
)
TASK = (
    "The package `stockroom` (a small stock keeper) has failing tests. Its modules are quantity, catalog, pricing, "
    "inventory, ledger, report and cli. Please make the tests in `tests/` pass without changing them."
)
LAST_WORD = (
    "All tests pass. The causes were: quantities without decimals and an inverted gram factor; a catalog that split "
    "CSV by hand, compared SKUs before normalizing them and counted lines from the wrong one; price tiers, rounding "
    "and the order of voucher and discount; a shared default dictionary and reservations that ignored each other; a "
    "ledger that excluded the day itself, kept late bookings at the end and used %W for ISO weeks; and slips in the "
    "reports and in the reading of counts."
)


def _pytest(arguments: str) -> Call:
    return Call("pytest", {"arguments": arguments})


def _cat(path: str) -> Call:
    return Call("cat", {"path": path})


def _grep(pattern: str, paths: str) -> Call:
    return Call("grep", {"pattern": pattern, "paths": paths})


def _edit(path: str, old: str, new: str) -> Call:
    return Call("edit", {"path": path, "old": old, "new": new})


def _python(code: str) -> Call:
    return Call("python", {"code": code})


def _step(thought: str, *calls: Call) -> Step:
    return Step(thought, calls)


STEPS: tuple[Step, ...] = (
    _step("I start with an overview of what fails.", _pytest("--tb=no")),
    _step("Much fails. I go module by module, from the bottom: quantities first.", _cat("stockroom/quantity.py")),
    _step("Now what the tests expect of it.", _cat("tests/test_quantity.py")),
    _step("Let me see the failures in this file alone.", _pytest("--tb=short tests/test_quantity.py")),
    _step(
        "The pattern allows no decimal point in the amount. I allow one.",
        _edit(
            "stockroom/quantity.py",
            "(?P<amount>\\d+)\\s*(?P<unit>[a-z]*)$",
            "(?P<amount>\\d+(?:\\.\\d+)?)\\s*(?P<unit>[a-z]*)$",
        ),
    ),
    _step("Run the file again.", _pytest("--tb=short tests/test_quantity.py")),
    _step(
        "Parsing works, adding grams does not. I look at what to_base makes of 250 g.",
        _python("from stockroom.quantity import parse_quantity\nprint(repr(parse_quantity('250g').to_base()))"),
    ),
    _step("250,000 kg: the factor is inverted. Who uses the factors?", _grep("BASE_UNITS|factor", "stockroom/*.py")),
    _step(
        "Only to_base does. A gram is a thousandth of a kilogram, a millilitre of a litre.",
        _edit("stockroom/quantity.py", '"g": ("kg", Decimal(1000))', '"g": ("kg", Decimal("0.001"))'),
        _edit("stockroom/quantity.py", '"ml": ("l", Decimal(1000))', '"ml": ("l", Decimal("0.001"))'),
    ),
    _step("Check the quantities.", _pytest("tests/test_quantity.py")),
    _step("Quantities are done. Next the catalog.", _cat("stockroom/catalog.py")),
    _step("And its tests.", _cat("tests/test_catalog.py")),
    _step("Which of them fail, and how?", _pytest("--tb=short tests/test_catalog.py")),
    _step(
        "Four causes: quoted commas, SKUs compared before they are normalized, line numbers, the empty file. "
        "I let the csv module read the lines.",
        _edit(
            "stockroom/catalog.py",
            "            row = dict(zip(header, line.split(',')))\n",
            "            row = dict(zip(header, next(csv.reader([line]))))\n",
        ),
    ),
    _step("The edit did not match; let me see the line as it stands.", _grep("split|strip", "stockroom/catalog.py")),
    _step(
        "Double quotes, of course.",
        _edit(
            "stockroom/catalog.py",
            '            row = dict(zip(header, line.split(",")))\n',
            "            row = dict(zip(header, next(csv.reader([line]))))\n",
        ),
        _edit(
            "stockroom/catalog.py",
            "from __future__ import annotations\n\nfrom collections.abc",
            "from __future__ import annotations\n\nimport csv\nfrom collections.abc",
        ),
    ),
    _step(
        "Normalize the SKU before it is compared.",
        _edit("stockroom/catalog.py", 'sku = row["sku"].strip()', 'sku = normalize_sku(row["sku"])'),
    ),
    _step("Run the catalog's tests.", _pytest("--tb=short tests/test_catalog.py")),
    _step(
        "Lines are counted from the first after the header, starting at zero; the file's line is two more.",
        _edit("stockroom/catalog.py", "enumerate(lines[1:])", "enumerate(lines[1:], start=2)"),
    ),
    _step(
        "An empty file has no header line at all.",
        _edit(
            "stockroom/catalog.py",
            "        header = [name.strip()",
            '        if not lines:\n            raise CatalogError("the file is empty", line=1)\n'
            "        header = [name.strip()",
        ),
    ),
    _step("Again.", _pytest("tests/test_catalog.py")),
    _step("Good. How far are we overall?", _pytest("--tb=no")),
    _step("Prices next.", _cat("stockroom/pricing.py"), _cat("tests/test_pricing.py")),
    _step(
        "A tier starts at its number, so the comparison must include it.",
        _edit("stockroom/pricing.py", "if pieces > tier.at_least]", "if pieces >= tier.at_least]"),
    ),
    _step("Check the tiers.", _pytest("--tb=line tests/test_pricing.py -k tier")),
    _step(
        "The first tier reached is returned, not the best one.",
        _edit(
            "stockroom/pricing.py", "return reached[0] if reached else None", "return reached[-1] if reached else None"
        ),
    ),
    _step("And again.", _pytest("--tb=line tests/test_pricing.py")),
    _step(
        "Rounding goes through binary floats. What does that do to 1.005 and 0.125?",
        _python(
            "from decimal import Decimal\nfor text in ('1.005', '2.675', '0.125'):\n"
            "    print(text, Decimal(float(text)), round(float(text), 2))"
        ),
    ),
    _step(
        "As feared. Decimal can do it: quantize with ROUND_HALF_UP.",
        _edit(
            "stockroom/pricing.py",
            "return Decimal(str(round(float(amount), 2)))",
            'return amount.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)',
        ),
    ),
    _step("Run the prices.", _pytest("--tb=line tests/test_pricing.py -k half")),
    _step(
        "I forgot the import.",
        _edit("stockroom/pricing.py", "from decimal import Decimal\n", "from decimal import ROUND_HALF_UP, Decimal\n"),
    ),
    _step("Now.", _pytest("--tb=short tests/test_pricing.py")),
    _step("Voucher and discount are in the wrong order. I read the function again.", _cat("stockroom/pricing.py")),
    _step(
        "Discount first, then the voucher, and not below zero.",
        _edit(
            "stockroom/pricing.py",
            "    total = (unit_price * pieces - voucher) * (100 - percent) / 100\n    return round_cents(total)",
            "    total = unit_price * pieces * (100 - percent) / 100 - voucher\n"
            "    return round_cents(max(total, Decimal(0)))",
        ),
    ),
    _step(
        "Check, prices and the two modules before.",
        _pytest("tests/test_pricing.py tests/test_quantity.py tests/test_catalog.py"),
    ),
    _step("Next: the inventory.", _cat("stockroom/inventory.py")),
    _step("Its failures, in full.", _pytest("tests/test_inventory.py")),
    _step(
        "The default dictionary is shared by all inventories, and the caller's is changed. I copy it.",
        _edit(
            "stockroom/inventory.py",
            "counts: dict[str, int] = {}) -> None:\n        self.counts = counts\n",
            "counts: dict[str, int] | None = None) -> None:\n        self.counts = dict(counts or {})\n",
        ),
    ),
    _step("Did that do it?", _pytest("--tb=line tests/test_inventory.py")),
    _step(
        "Reservations compare with what is on the shelf instead of what is available.",
        _edit(
            "stockroom/inventory.py",
            "        if pieces > self.counts.get(sku, 0):\n",
            "        if pieces > self.available(sku):\n",
        ),
        _edit(
            "stockroom/inventory.py",
            "        self.reserved.setdefault(sku, {})[order] = pieces\n",
            "        orders = self.reserved.setdefault(sku, {})\n"
            "        orders[order] = orders.get(order, 0) + pieces\n",
        ),
    ),
    _step("Run.", _pytest("--tb=short tests/test_inventory.py")),
    _step(
        "Shipping leaves the reservation in place. Where is `reserved` changed?", _grep("reserved", "stockroom/*.py")
    ),
    _step(
        "After the pieces have left the shelf the order's reservations must go.",
        _edit(
            "stockroom/inventory.py",
            "            self.counts[sku] -= pieces\n        return shipped",
            "            self.counts[sku] -= pieces\n            del self.reserved[sku][order]\n        return shipped",
        ),
    ),
    _step("Inventory once more.", _pytest("tests/test_inventory.py")),
    _step("The ledger, and its tests.", _cat("stockroom/ledger.py"), _cat("tests/test_ledger.py")),
    _step(
        "A balance is at the end of the day, so the day's own movements count.",
        _edit("stockroom/ledger.py", "if movement.on >= on:", "if movement.on > on:"),
    ),
    _step("See what is left there.", _pytest("--tb=short tests/test_ledger.py")),
    _step(
        "A late booking is appended at the end. insort keeps the list sorted.",
        _edit(
            "stockroom/ledger.py",
            "self._movements.append(movement)",
            "insort(self._movements, movement, key=lambda booked: booked.on)",
        ),
        _edit(
            "stockroom/ledger.py",
            "from collections import defaultdict\n",
            "from bisect import insort\nfrom collections import defaultdict\n",
        ),
    ),
    _step(
        "%W is not the ISO week. What are the right directives?",
        _python(
            "from datetime import date\nfor day in (date(2024, 1, 1), date(2024, 1, 7), date(2024, 12, 31)):\n"
            "    print(day, day.strftime('%Y-W%W'), day.strftime('%Y-W%V'), day.strftime('%G-W%V'), day.isocalendar())"
        ),
    ),
    _step(
        "%G belongs with %V: the last day of 2024 lies in the first week of 2025.",
        _edit("stockroom/ledger.py", 'strftime("%Y-W%W")', 'strftime("%G-W%V")'),
    ),
    _step("Ledger again.", _pytest("tests/test_ledger.py")),
    _step("Only the reports should be left.", _pytest("--tb=short")),
    _step("I read the report module and the command line.", _cat("stockroom/report.py"), _cat("stockroom/cli.py")),
    _step(
        "At the reorder point counts as low; and the sort compares numbers as text.",
        _edit("stockroom/report.py", "if available < item.reorder_at:", "if available <= item.reorder_at:"),
        _edit("stockroom/report.py", "key=lambda row: (str(row[1]), row[0])", "key=lambda row: (row[1], row[0])"),
    ),
    _step("Check the reports.", _pytest("--tb=line tests/test_report.py")),
    _step(
        "The limit is off by one.",
        _edit("stockroom/report.py", "ranked[: limit - 1]", "ranked[:limit]"),
    ),
    _step(
        "The columns after the first take the width of their left neighbour: widths must skip the first too.",
        _edit("stockroom/report.py", "zip(row[1:], widths)]", "zip(row[1:], widths[1:])]"),
    ),
    _step("What normalizes SKUs in the package?", _grep("normalize_sku", "stockroom/*.py tests/*.py")),
    _step(
        "read_counts neither normalizes nor adds up.",
        _edit(
            "stockroom/cli.py",
            "        counts[sku] = int(parse_quantity(quantity).to_base().amount)\n",
            "        sku = normalize_sku(sku)\n"
            "        counts[sku] = counts.get(sku, 0) + int(parse_quantity(quantity).to_base().amount)\n",
        ),
        _edit("stockroom/cli.py", "import Catalog\n", "import Catalog, normalize_sku\n"),
    ),
    _step("Run the reports' tests.", _pytest("--tb=short tests/test_report.py")),
    _step("And everything, with names.", _pytest("-v")),
    _step(
        "A last look at the command line as a user sees it.",
        _python(
            "import pathlib\nfrom stockroom.cli import main\n"
            "pathlib.Path('c.csv').write_text('sku,name,unit,price,reorder_at\\nbolt-8,Bolt M8,pcs,0.12,200\\n')\n"
            "pathlib.Path('n.txt').write_text('bolt-8 1.5 kg\\n')\nprint(main(['c.csv', 'n.txt']))"
        ),
    ),
)
