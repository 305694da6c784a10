"""The pages about policies name those that there are; their snippets are in `tests/test_snippets.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leyline_agent.policy import policy_library

_DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["policies", "cookbook"])
def test_the_pages_name_only_policies_that_there_are(page: str) -> None:
    names = {entry.name for entry in policy_library()}
    text = (_DOCS / f"{page}.md").read_text(encoding="utf-8")

    called = set(re.findall(r'load_policy\("([a-z_0-9]+)"\)', text)) | set(re.findall(r"\| `([a-z_0-9]+)` \|\n", text))
    assert called
    assert called <= names


def test_the_cookbook_names_every_shipped_policy() -> None:
    text = (_DOCS / "cookbook.md").read_text(encoding="utf-8")

    assert [entry.name for entry in policy_library() if f"`{entry.name}`" not in text and entry.name != "none"] == []
