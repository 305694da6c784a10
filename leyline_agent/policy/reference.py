"""The language of policies for editors and for people: its JSON schema, and the reference page made from that.

`python -m leyline_agent.policy.reference` writes both files of a checkout anew.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from leyline_agent.policy import conditions, schema, selecting
from leyline_agent.policy.library import shipped_folder
from leyline_agent.policy.schema import ACTIONS, Policy

SCHEMA_FILE = "policy.schema.json"
"""Beside the shipped policies."""
_SECTIONS = (
    ("Policy", "The file"),
    ("Rule", "rules[]"),
    ("Select", "select"),
    ("Age", "older_than"),
    ("IndexRange", "index"),
    ("Size", "larger_than"),
    ("Superseded", "superseded"),
    ("When", "when"),
    ("Keep", "keep"),
    ("Truncate", "truncate"),
    ("ClearArguments", "clear_arguments"),
)
_HEAD = """\
# Policy reference

Every key of a policy file. How rules work together is in [policies.md](policies.md), recipes are in the
[cookbook](cookbook.md).

This page is made from the JSON schema, `policies/policy.schema.json`, by `python -m leyline_agent.policy.reference`.
The schema comes with the package too. An editor with a YAML language server completes and checks a policy that begins
with the path of that file:

```yaml
# yaml-language-server: $schema=policies/policy.schema.json
```
"""


def policy_schema() -> dict[str, Any]:
    """Return the JSON schema of a policy file."""
    docs = _field_docs()
    generated = Policy.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = generated.pop("$defs")
    definitions["Rule"]["oneOf"] = [{"required": [action]} for action in ACTIONS]
    definitions["When"]["minProperties"] = 1
    for name, model in [("Policy", generated), *definitions.items()]:
        for key, value in model.get("properties", {}).items():
            model["properties"][key] = _tidy(value) | {"description": docs[name, key]}
        model.pop("title", None)
        if "description" in model:
            model["description"] = " ".join(model["description"].split())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Leyline policy",
        **generated,
        "$defs": definitions,
    }


def policy_reference() -> str:
    """Return the reference page, in Markdown, made from the schema."""
    whole = policy_schema()
    models = {"Policy": whole, **whole["$defs"]}
    parts = [_HEAD]
    for name, heading in _SECTIONS:
        model = models[name]
        title = heading if name == "Policy" else f"`{heading}`"
        parts.append(f"## {title}\n\n{model['description']}\n\n| key | value | meaning |\n|---|---|---|")
        for key, value in model["properties"].items():
            shown = f"`{key}`" + ("" if key not in model.get("required", ()) else ", required")
            row = f"| {shown} | {_type(value)} | {value['description']} |"
            parts[-1] += "\n" + row
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def main() -> None:
    """Write the schema and the reference page into the checkout."""
    folder = shipped_folder()
    schema_text = json.dumps(policy_schema(), indent=2, ensure_ascii=False) + "\n"
    (folder / SCHEMA_FILE).write_text(schema_text, encoding="utf-8")
    reference = folder.parent / "docs" / "policy-reference.md"
    reference.write_text(policy_reference(), encoding="utf-8")
    print(f"wrote {folder / SCHEMA_FILE} and {reference}")


def _field_docs() -> dict[tuple[str, str], str]:
    """Read the line under each field of the models, by model and by key as it is written in YAML."""
    docs: dict[tuple[str, str], str] = {}
    modules: tuple[ModuleType, ...] = (conditions, schema, selecting)
    for module in modules:
        for node in ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for field, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    key = ast.unparse(field.target).rstrip("_")
                    docs[node.name, key] = " ".join(str(ast.literal_eval(after.value)).split())
    return docs


def _tidy(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only pydantic needs: titles, and that a key may be null by being absent."""
    tidied = {key: part for key, part in value.items() if key != "title"}
    if tidied.get("default", "") is None or isinstance(tidied.get("default"), dict):
        del tidied["default"]
    forms = [form for form in tidied.get("anyOf", ()) if form != {"type": "null"}]
    if len(forms) == 1:
        del tidied["anyOf"]
        tidied |= forms[0]
    elif forms:
        tidied["anyOf"] = forms
    return tidied


def _type(value: dict[str, Any]) -> str:
    """Return a key's type in words."""
    if "anyOf" in value:
        forms = list(dict.fromkeys(_type(form) for form in value["anyOf"]))
        if forms[1:] == [f"list of {forms[0]}"] and "enum" in value["anyOf"][0]:
            return f"{forms[0]}, or a list of them"
        return " or ".join(forms)
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        if name == "Mode":
            return "`amortize` or `forget`"
        heading = dict(_SECTIONS)[name]
        return f"[{heading}](#{heading.strip('[]')})"
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{word}`" for word in value["enum"])
    kind = value.get("type", "anything")
    if kind == "array":
        return f"list of {_type(value['items'])}"
    if kind == "integer":
        return "whole number" + (f", {value['minimum']} or more" if "minimum" in value else "")
    if kind == "number":
        return "number"
    if kind == "string" and "turns" in value.get("pattern", ""):
        return "`n turns`"
    if kind == "string" and "line" in value.get("pattern", ""):
        return "`n lines` or `n chars`"
    return {"string": "text", "boolean": "`true` or `false`"}.get(str(kind), str(kind))


if __name__ == "__main__":
    main()
