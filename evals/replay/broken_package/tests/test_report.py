from datetime import date
from pathlib import Path

import pytest

from stockroom.catalog import Catalog
from stockroom.cli import main, read_counts
from stockroom.inventory import Inventory
from stockroom.ledger import Ledger, Movement
from stockroom.report import best_sellers, reorder_report, to_reorder

CATALOG = """sku,name,unit,price,reorder_at
bolt-8,Bolt M8,pcs,0.12,200
nut-8,Nut M8,pcs,0.05,300
glue,"Glue, wood",l,4.50,5
"""


def test_at_the_reorder_point_is_low() -> None:
    inventory = Inventory({"BOLT-8": 200, "NUT-8": 301, "GLUE": 6})
    assert to_reorder(Catalog.from_csv(CATALOG), inventory) == [("BOLT-8", 200, 200)]


def test_the_scarcest_comes_first() -> None:
    inventory = Inventory({"BOLT-8": 90, "NUT-8": 100, "GLUE": 3})
    assert [row[0] for row in to_reorder(Catalog.from_csv(CATALOG), inventory)] == ["GLUE", "BOLT-8", "NUT-8"]


def test_report_aligns_columns() -> None:
    inventory = Inventory({"BOLT-8": 90, "NUT-8": 1000, "GLUE": 3})
    assert reorder_report(Catalog.from_csv(CATALOG), inventory) == (
        "sku     available  reorder at\n"
        "GLUE            3           5\n"
        "BOLT-8         90         200"
    )


def test_nothing_to_reorder() -> None:
    inventory = Inventory({"BOLT-8": 900, "NUT-8": 1000, "GLUE": 30})
    assert reorder_report(Catalog.from_csv(CATALOG), inventory) == "nothing to reorder"


def test_best_sellers_are_limited_and_ranked() -> None:
    day = date(2024, 5, 6)
    ledger = Ledger(Movement(day, sku, -sold) for sku, sold in [("A", 5), ("B", 9), ("C", 5), ("D", 1)])
    assert best_sellers(ledger, ["A", "B", "C", "D"], limit=3) == [("B", 9), ("A", 5), ("C", 5)]


def test_counts_of_one_sku_add_up() -> None:
    assert read_counts("# shelf 1\nBOLT-8 3 x 50\n\nbolt-8 25\nNUT-8 2 dozen\n") == {"BOLT-8": 175, "NUT-8": 24}


@pytest.mark.parametrize(("glue", "code"), [("9", 0), ("4", 1)])
def test_exit_code_tells_whether_anything_is_low(tmp_path: Path, glue: str, code: int) -> None:
    (tmp_path / "catalog.csv").write_text(CATALOG)
    (tmp_path / "counts.txt").write_text(f"bolt-8 900\nnut-8 900\nglue {glue}\n")
    assert main([str(tmp_path / "catalog.csv"), str(tmp_path / "counts.txt")]) == code


def test_a_missing_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.csv"), str(tmp_path / "none.txt")]) == 2
    assert "none.csv" in capsys.readouterr().err
