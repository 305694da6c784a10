"""YAML to `Policy`. Every mistake is a `PolicyError` with file, line, column and key, and a suggestion."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from leyline_agent.errors import PolicyError
from leyline_agent.policy.marks import Document, key_path
from leyline_agent.policy.schema import Policy

MAX_POLICY_BYTES = 1 << 20
"""A policy file is a page of text; anything above this is another file given by mistake."""

_EXPECTED = {
    "int_type": "a whole number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "string_too_short": "text that is not empty",
    "too_short": "at least one entry",
}


def load_policy(path_or_name: str | os.PathLike[str]) -> Policy:
    """Load a policy from a file, or a shipped one by its name.

    Text without a slash and without `.yaml` or `.yml` is a name, unless no such policy is shipped and such a file
    exists.

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
    return parse_policy(text, file=file)


def parse_policy(text: str, *, file: str = "<string>") -> Policy:
    """Read a policy from YAML text; `file` is what errors call it.

    Raises:
        PolicyError: it is no YAML, or says something that a policy cannot mean.
    """
    if len(text) > MAX_POLICY_BYTES:
        raise PolicyError(f"got more than {MAX_POLICY_BYTES} bytes, expected a page of YAML", file=file)
    document = Document(text, file=file)
    if document.value is None:
        raise PolicyError("it is empty, expected at least 'version: 1' and 'rules: []'", file=file, line=1, column=1)
    if not isinstance(document.value, dict):
        place = document.place(())
        raise PolicyError(
            f"got {_shown(document.value)}, expected a mapping that starts with 'version: 1'",
            file=file,
            line=place.line if place else None,
            column=place.column if place else None,
        )
    try:
        return Policy.model_validate(document.value)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # A misspelt key is also missing under its right name; the misspelling is what to say.
        found = [details for details in found if details["type"] != "missing"] or found
        mistakes = [_policy_error(details, document, file) for details in found]
        raise min(mistakes, key=lambda mistake: (mistake.line or 0, mistake.column or 0)) from error


def shipped_policies() -> tuple[str, ...]:
    """Names of the policies that come with the package."""
    return tuple(sorted(path.stem for path in _shipped_folder().glob("*.yaml")))


def _shipped_folder() -> Path:
    """`policies/`: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "policies"
    return installed if installed.is_dir() else package.parent / "policies"


def _find(path_or_name: str | os.PathLike[str]) -> Path:
    path = Path(path_or_name)
    is_name = isinstance(path_or_name, str) and path.name == path_or_name and path.suffix not in (".yaml", ".yml")
    if is_name and path_or_name in shipped_policies():
        return _shipped_folder() / f"{path_or_name}.yaml"
    if path.is_dir():
        raise PolicyError(f"is a folder, expected a YAML file in it{_shipped_hint()}", file=str(path))
    if not path.exists():
        near = difflib.get_close_matches(path.stem, shipped_policies(), n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"no such file or shipped policy{meant}{_shipped_hint()}", file=os.fspath(path_or_name))
    return path


def _shipped_hint() -> str:
    return f" (shipped: {', '.join(shipped_policies())})"


def _policy_error(details: ErrorDetails, document: Document, file: str) -> PolicyError:
    kind = details["type"]
    context: dict[str, Any] = details.get("ctx", {})
    path: tuple[int | str, ...] = details["loc"] + tuple(context.get("path", ()))
    is_key_wrong = kind == "extra_forbidden" or bool(context.get("path"))
    place = document.key_place(path) if is_key_wrong else document.place(path)
    return PolicyError(
        _message(kind, context, details, path),
        file=file,
        line=place.line if place else None,
        column=place.column if place else None,
        key=key_path(path),
    )


def _message(kind: str, context: dict[str, Any], details: ErrorDetails, path: tuple[int | str, ...]) -> str:
    got = _shown(details["input"])
    if kind == "policy":
        return str(context["message"])
    if kind == "extra_forbidden":
        known = _known_keys(path[:-1])
        return f"unknown key, expected one of {', '.join(known)}{_near(str(path[-1]), known)}"
    if kind == "missing":
        return "missing; add it"
    if kind in ("literal_error", "enum"):
        choices = str(context["expected"])
        words = [word.strip("'") for word in choices.replace(" or ", ", ").split(", ")]
        return f"got {got}, expected {choices}{_near(str(details['input']), words)}"
    if kind == "model_type":
        return f"got {got}, expected a mapping with the keys {', '.join(_known_keys(path))}"
    if kind == "greater_than_equal":
        return f"got {got}, expected {context['ge']} or more"
    expected = _EXPECTED.get(kind)
    return f"got {got}, expected {expected}" if expected else f"got {got}: {details['msg']}"


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Policy
    for part in path:
        if isinstance(part, str):
            model = next(_models(model.model_fields[part].annotation))
    return list(model.model_fields)


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
    return f"{value!r:.80}"
