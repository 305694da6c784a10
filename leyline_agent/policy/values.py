"""Small values that policies are written in: amounts, globs, numbers, and how a wrong one is reported."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictInt, WithJsonSchema
from pydantic_core import PydanticCustomError


def mistake(message: str, *path: str | int) -> PydanticCustomError:
    """Make an error about the value at `path` below the model that raises it."""
    return PydanticCustomError("policy", "{message}", {"message": message, "path": path})


def only(expected: int | bool) -> BeforeValidator:
    """Take one value and nothing that merely equals it: to Python True, 1 and 1.0 are the same."""

    def check(value: object) -> object:
        if type(value) is not type(expected) or value != expected:
            hint = "; leave the key out instead" if value is False else ""
            raise mistake(f"expected {str(expected).lower()}, got {value!r}{hint}")
        return value

    return BeforeValidator(check)


def listed(value: object) -> object:
    """Take one text for a list of one."""
    return (value,) if isinstance(value, str) else value


NonEmpty = Annotated[str, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]
_ONE_OR_MORE: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ]
}
Globs = Annotated[tuple[NonEmpty, ...], Field(min_length=1), BeforeValidator(listed), WithJsonSchema(_ONE_OR_MORE)]
"""A glob or a list of them."""


def covers(globs: Sequence[str], others: Sequence[str]) -> bool:
    """Tell whether whatever one of `others` matches surely is matched by one of `globs`."""
    return all(any(_is_wider(glob, other) for glob in globs) for other in others)


def _is_wider(glob: str, other: str) -> bool:
    is_name = not any(sign in other for sign in "*?[")
    return glob == other or set(glob) == {"*"} or (is_name and fnmatchcase(other, glob))


_TURNS = re.compile(r"([0-9]{1,9}) turns?")


def _every(value: object) -> object:
    found = _TURNS.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise mistake(f"got {value!r:.80}, expected a number of turns such as '5 turns'")
    if int(found[1]) == 0:
        raise mistake(f"got {value!r}, which never comes; expected '1 turn' or more")
    return int(found[1])


EveryTurns = Annotated[
    int, BeforeValidator(_every), WithJsonSchema({"type": "string", "pattern": "^[1-9][0-9]* turns?$"})
]
"""Written `5 turns`."""

Unit = Literal["lines", "chars"]
_AMOUNT = re.compile(r"([0-9]{1,9}) (line|char)s?")


@dataclass(frozen=True, slots=True)
class Amount:
    """So many lines, or so many characters."""

    number: int
    unit: Unit

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


def _amount(value: object) -> object:
    if isinstance(value, Amount):
        return value
    found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        number, _, unit = value.partition(" ") if isinstance(value, str) else ("", "", "")
        near = difflib.get_close_matches(unit, ("lines", "chars"), n=1, cutoff=0.5)
        hint = f"; did you mean '{number} {near[0]}'?" if near and number.isdecimal() else ""
        raise mistake(f"got {value!r:.80}, expected an amount such as '20 lines' or '2000 chars'{hint}")
    return Amount(int(found[1]), "lines" if found[2] == "line" else "chars")


TextAmount = Annotated[
    Amount, BeforeValidator(_amount), WithJsonSchema({"type": "string", "pattern": "^[0-9]+ (line|char)s?$"})
]
"""Written `20 lines` or `2000 chars`."""
