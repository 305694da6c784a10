from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyline_agent.policy import policy_library
from leyline_agent.policy.library import shipped_folder
from leyline_agent.policy.reference import SCHEMA_FILE, policy_reference, policy_schema
from leyline_agent.policy.schema import ACTIONS

_STALE = "stale: run python -m leyline_agent.policy.reference"
_DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_schema_file_is_not_stale() -> None:
    assert json.loads((shipped_folder() / SCHEMA_FILE).read_text(encoding="utf-8")) == policy_schema(), _STALE


def test_the_reference_page_is_not_stale() -> None:
    assert (_DOCS / "policy-reference.md").read_text(encoding="utf-8") == policy_reference(), _STALE


def test_every_key_has_its_line() -> None:
    schema = policy_schema()

    for model in (schema, *schema["$defs"].values()):
        assert all(value["description"] for value in model.get("properties", {}).values())
    for action in ACTIONS:
        assert f"| `{action}` |" in policy_reference()


@pytest.fixture
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(policy_schema())


def test_the_schema_takes_every_shipped_policy(validator: Any) -> None:
    validator.check_schema(policy_schema())
    for entry in policy_library():
        validator.validate(yaml.safe_load(entry.path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({"select": {"role": "tool"}, "drop": True}, id="no name"),
        pytest.param({"name": "r", "select": {"role": "tol"}, "drop": True}, id="role"),
        pytest.param({"name": "r", "select": {"role": "tool"}}, id="no action"),
        pytest.param({"name": "r", "select": {"role": "tool"}, "drop": True, "replace": "x"}, id="two actions"),
        pytest.param({"name": "r", "select": {"role": "tool"}, "drop": True, "when": {}}, id="empty trigger"),
        pytest.param({"name": "r", "select": {"role": "tool"}, "drop": True, "when": {"every": 5}}, id="every"),
        pytest.param({"name": "r", "select": {"role": "tool"}, "truncate": {"head": "2 words"}}, id="amount"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(validator: Any, rule: dict[str, Any]) -> None:
    assert not validator.is_valid({"version": 1, "rules": [rule]})
