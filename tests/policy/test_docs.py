"""Every policy in the documentation is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leyline_agent.policy import parse_policy, policy_library

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("policies", "cookbook")
    for number, block in enumerate(
        re.findall(r"```yaml\n(.*?)```", (_DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL), 1
    )
]
_DETECTOR = "my_agent.stale:find"


@pytest.mark.parametrize("block", _BLOCKS)
def test_a_recipe_loads(block: str) -> None:
    if block.startswith("select:"):
        texts = [f"rules:\n  - name: r\n    {line}\n    drop: true\n" for line in block.splitlines()]
    else:
        texts = [block if "rules:" in block else f"{block}rules: []\n"]
    for text in texts:
        if _DETECTOR not in text:
            parse_policy(text if "version:" in text else f"version: 1\n{text}")


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
