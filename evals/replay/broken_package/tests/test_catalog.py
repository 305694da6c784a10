from decimal import Decimal

import pytest

from stockroom.catalog import Catalog
from stockroom.errors import CatalogError

HEADER = "sku,name,unit,price,reorder_at\n"


def test_reads_items() -> None:
    catalog = Catalog.from_csv(HEADER + "bolt-8,Bolt M8,pcs,0.12,200\n\nnut-8,Nut M8,pcs,0.05,300\n")
    assert [item.sku for item in catalog] == ["BOLT-8", "NUT-8"]
    assert catalog["bolt-8"].price == Decimal("0.12")


def test_reads_a_quoted_name_with_a_comma() -> None:
    catalog = Catalog.from_csv(HEADER + 'wash-8,"Washer, flat, M8",pcs,0.02,500\n')
    assert catalog["wash-8"].name == "Washer, flat, M8"
    assert catalog["wash-8"].reorder_at == 500


def test_columns_may_come_in_any_order() -> None:
    catalog = Catalog.from_csv("price,sku,reorder_at,unit,name\n1.10,glue,4,l,Glue\n")
    assert catalog["GLUE"].price == Decimal("1.10")


def test_the_same_sku_in_another_case_is_a_duplicate() -> None:
    with pytest.raises(CatalogError, match="appears twice"):
        Catalog.from_csv(HEADER + "bolt-8,Bolt,pcs,0.12,1\nBOLT-8,Bolt,pcs,0.12,1\n")


def test_errors_name_the_line_of_the_file() -> None:
    with pytest.raises(CatalogError) as caught:
        Catalog.from_csv(HEADER + "bolt-8,Bolt,pcs,0.12,1\nnut-8,Nut,pcs,cheap,1\n")
    assert caught.value.line == 3


def test_missing_columns_are_named() -> None:
    with pytest.raises(CatalogError, match="missing columns: unit, reorder_at"):
        Catalog.from_csv("sku,name,price\nx,X,1\n")


def test_an_empty_file_is_an_error() -> None:
    with pytest.raises(CatalogError):
        Catalog.from_csv("")
