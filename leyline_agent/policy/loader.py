"""YAML to `Policy`. Every mistake is a `PolicyError` with file, line, column, key and the line itself.

Those that a schema can find are all told at once; what depends on several keys is looked for once these are right.
"""

from __future__ import annotations

import difflib
import os
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from leyline_agent.errors import PolicyError
from leyline_agent.policy.conditions import Keep, When
from leyline_agent.policy.library import shipped_folder, shipped_policies
from leyline_agent.policy.marks import Document, key_path
from leyline_agent.policy.schema import Detector, Policy, Rule
from leyline_agent.policy.selecting import Select

MAX_POLICY_BYTES = 1 << 20
"""A policy file is a page of text; anything above this is another file given by mistake."""

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "'package.module:function'",
    "too_short": "at least one entry",
}
_MISSING = {
    "version": "'version: 1'",
    "rules": "'rules: []' or some rules",
    "name": "one, such as 'name: old outputs'",
    "select": "what it is about, such as 'select: {role: tool}'",
    "role": "whose messages, such as 'role: tool'",
}
"""What to add where a key is missing."""
_OWNERS: dict[type[BaseModel], str] = {
    Policy: "the policy",
    Rule: "a rule",
    Select: "'select'",
    When: "'when'",
    Keep: "'keep'",
}
# A longer list of keys stands on lines of its own, which fit 100 columns.
_INLINE_CHARS = 40
_LIST_CHARS = 92
_SCALAR_KINDS = frozenset({"int_type", "float_type", "policy"})


def load_policy(path_or_name: str | os.PathLike[str], *, allow_python: Collection[str] = ()) -> Policy:
    """Load a policy from a file, or a shipped one by its name.

    Text without a slash and without `.yaml` or `.yml` is a name, unless no such policy is shipped and such a file
    exists.

    Args:
        path_or_name: where it is.
        allow_python: functions, as `package.module:function`, that rules may select by. They are imported.

    Raises:
        PolicyError: no such file or name, it cannot be read, or it is wrong.
    """
    path = _find(path_or_name)
    file = str(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_POLICY_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"cannot read it: {error.strerror or error}{_shipped_hint()}", file=file) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        raise PolicyError(
            f"got byte 0x{content[error.start]:02x}, which is not UTF-8; save the file as UTF-8",
            file=file,
            line=before.count(b"\n") + 1,
        ) from error
    return parse_policy(text, file=file, allow_python=allow_python)


def parse_policy(text: str, *, file: str = "<string>", allow_python: Collection[str] = ()) -> Policy:
    """Read a policy from YAML text; `file` is what errors call it. See `load_policy`.

    Raises:
        PolicyError: it is no YAML, or says something that a policy cannot mean.
    """
    if len(text) > MAX_POLICY_BYTES:
        raise PolicyError(f"got more than {MAX_POLICY_BYTES} bytes, expected a page of YAML", file=file)
    document = Document(text, file=file)
    if document.value is None:
        raise PolicyError("it is empty, expected at least 'version: 1' and 'rules: []'", file=file, line=1, column=1)
    if not isinstance(document.value, dict):
        raise document.error(
            f"got {_shown(document.value)}, expected a mapping that starts with 'version: 1'", document.place(())
        )
    try:
        policy = Policy.model_validate(document.value)
    except ValidationError as error:
        mistakes = (_policy_error(*found, document) for found in _worth_saying(error, document))
        raise PolicyError.of_all(mistakes) from error
    return _with_detectors(policy, document, allow_python)


def _find(path_or_name: str | os.PathLike[str]) -> Path:
    path = Path(path_or_name)
    is_name = isinstance(path_or_name, str) and path.name == path_or_name and path.suffix not in (".yaml", ".yml")
    if is_name and path_or_name in shipped_policies():
        return shipped_folder() / f"{path_or_name}.yaml"
    if path.is_dir():
        raise PolicyError(f"is a folder, expected a YAML file in it{_shipped_hint()}", file=str(path))
    if not path.exists():
        if not is_name:
            raise PolicyError(f"no such file{_shipped_hint()}", file=os.fspath(path_or_name))
        near = difflib.get_close_matches(path.stem, shipped_policies(), n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"no such file or shipped policy{meant}{_shipped_hint()}", file=os.fspath(path_or_name))
    return path


def _shipped_hint() -> str:
    return f" (shipped: {', '.join(shipped_policies())})"


def _with_detectors(policy: Policy, document: Document, allowed: Collection[str]) -> Policy:
    detectors: dict[str, Detector] = {}
    for idx, rule in enumerate(policy.rules):
        name = rule.select.python
        if name is None:
            continue
        path = ("rules", idx, "select", "python")
        if name not in allowed:
            raise document.error(
                f"got {name!r}, which nobody has allowed to run{_near(name, list(allowed))}; who loads the policy may "
                f"allow it by this name: allow_python=[{name!r}]",
                document.place(path),
                key_path(path),
            )
        module, _, function = name.partition(":")
        try:
            found = getattr(import_module(module), function)
        except (ImportError, AttributeError) as error:
            hint = "; is it installed, or its folder in PYTHONPATH?" if isinstance(error, ModuleNotFoundError) else ""
            raise document.error(
                f"got {name!r}, which cannot be imported: {error}{hint}", document.place(path), key_path(path)
            ) from error
        if not callable(found):
            raise document.error(
                f"got {name!r}, which is {found!r:.60}, expected a function", document.place(path), key_path(path)
            )
        detectors[name] = found
    return policy.with_detectors(detectors) if detectors else policy


def _worth_saying(error: ValidationError, document: Document) -> list[tuple[ErrorDetails, tuple[int | str, ...], bool]]:
    """Return the mistakes with their paths in the document, less what only follows from another.

    And whether the value may be a mapping too, where it is neither that nor the scalar that it may be.
    """
    found = [
        (details, _path_in(document.value, details["loc"], details["type"]))
        for details in error.errors(include_url=False)
    ]
    # A misspelt key is also missing under its right name; the misspelling is what to say.
    found = [(details, path) for details, path in found if details["type"] != "missing"] or found
    # Where a value may be a number or a mapping, both forms complain; the one that was not meant says nothing.
    mappings = {path for details, path in found if details["type"] == "model_type"}
    return [
        (details, path, path in mappings and _is_of_scalar(details))
        for details, path in found
        if not any(_is_other_form(details, path, other, at) for other, at in found if other is not details)
    ]


def _is_other_form(
    details: ErrorDetails, path: tuple[int | str, ...], other: ErrorDetails, at: tuple[int | str, ...]
) -> bool:
    """Tell whether a mistake is about a form that was not meant, since `other` is about the one that was."""
    is_within = len(at) > len(path) and at[: len(path)] == path
    if details["type"] == "model_type":
        return other["type"] != "model_type" and at == path
    if details["type"] == "too_short":
        # Pydantic does not count entries that are wrong.
        return is_within
    if not _is_of_scalar(details) or at[: len(path)] != path:
        return False
    # Of two forms of a number the one that takes more is said.
    is_wider = details["type"] == "int_type" and other["type"] == "float_type"
    return is_wider or (isinstance(details["input"], dict) and (is_within or not _is_of_scalar(other)))


def _is_of_scalar(details: ErrorDetails) -> bool:
    return details["type"] in _SCALAR_KINDS and not details.get("ctx", {}).get("path")


def _path_in(value: Any, loc: tuple[int | str, ...], kind: str) -> tuple[int | str, ...]:
    """Leave out of pydantic's path what is no part of the document: names of forms, places in a list of one."""
    path: list[int | str] = []
    for number, part in enumerate(loc):
        is_place = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_place or (isinstance(value, dict) and part in value):
            value = value[part]
        elif kind != "missing" or number < len(loc) - 1:
            continue
        path.append(part)
    return tuple(path)


def _policy_error(
    details: ErrorDetails, loc: tuple[int | str, ...], may_be_mapping: bool, document: Document
) -> PolicyError:
    kind = details["type"]
    context: dict[str, Any] = details.get("ctx", {})
    path = loc + tuple(context.get("path", ()))
    is_key_wrong = kind == "extra_forbidden" or bool(context.get("path"))
    place = document.key_place(path) if is_key_wrong else document.place(path)
    message = _message(kind, context, details, path)
    if may_be_mapping:
        expected = f"{_EXPECTED.get(kind, 'true')} or {_mapping(path, details['input'])}"
        message = f"got {_shown(details['input'])}, expected {expected}"
    return document.error(message, place, key_path(path))


def _message(kind: str, context: dict[str, Any], details: ErrorDetails, path: tuple[int | str, ...]) -> str:
    got = _shown(details["input"])
    if kind == "policy":
        return str(context["message"])
    if kind == "extra_forbidden":
        known = _known_keys(path[:-1])
        keys = f"{', '.join(known)}{_near(str(path[-1]), known) or _elsewhere(str(path[-1]))}"
        return f"unknown key, expected one of{_listed(keys)}"
    if kind == "missing":
        return f"missing; add {_MISSING.get(str(path[-1]), 'it')}"
    if kind in ("literal_error", "enum"):
        choices = str(context["expected"])
        words = [word.strip("'") for word in choices.replace(" or ", ", ").split(", ")]
        return f"got {got}, expected {choices}{_near(str(details['input']), words)}"
    if kind == "model_type":
        hint = "; is what belongs to it indented?" if details["input"] is None else ""
        return f"got {got}, expected {_mapping(path, details['input'], hint)}"
    if kind == "greater_than_equal":
        return f"got {got}, expected {context['ge']} or more"
    if kind in ("greater_than", "less_than_equal"):
        return f"got {got}, expected a share above 0 and up to 1, such as 0.7"
    expected = _EXPECTED.get(kind)
    if kind == "string_type" and isinstance(details["input"], list | dict):
        return f"got {got}, expected text; one that begins with '[' or '{{' needs quotes"
    if kind == "string_type" and details["input"] is not None:
        return f"got {got}, expected text; put it in quotes"
    if kind == "tuple_type" and isinstance(details["input"], dict):
        return f"got {got}, expected a list, whose entries begin with '- '"
    return f"got {got}, expected {expected}" if expected else f"got {got}: {details['msg']}"


def _listed(keys: str) -> str:
    """Return a list of keys to append: in the line, or on lines of their own."""
    return f" {keys}" if len(keys) <= _INLINE_CHARS else "\n    ".join(("", *textwrap.wrap(keys, _LIST_CHARS)))


def _mapping(path: tuple[int | str, ...], given: object, hint: str = "") -> str:
    """Say which mapping belongs at a path, with what was given where that may be meant, and a hint after it."""
    known = _known_keys(path)
    if len(known) > 1:
        return f"a mapping with the keys{_listed(', '.join(known) + hint)}"
    meant = given if isinstance(given, int | float | str) and not isinstance(given, bool) else "…"
    number = re.match(r"[0-9]+(?= )", given) if isinstance(given, str) else None
    return f"a mapping such as {{{known[0]}: {number[0] if number else meant}}}{hint}"


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _elsewhere(key: str) -> str:
    """Say where else a key is known; "" where it is nowhere."""
    owners = [owner for model, owner in _OWNERS.items() if key in model.model_fields]
    return f"; {key!r} is a key of {' or of '.join(owners)}" if owners else ""


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Policy
    for part in path:
        if isinstance(part, str):
            model = next(_models(model.model_fields[part].annotation))
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Find the models that an annotation such as `tuple[Rule, ...]` or `Age | None` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r:.80}"
    if isinstance(value, date):
        return str(value)
    return f"{value!r:.80}"
