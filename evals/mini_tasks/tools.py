"""A tool's name, parameters and schema, and what to tell an agent that calls it wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_PYTHON_TYPES: dict[str, type] = {"string": str, "integer": int}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument; each is required."""

    type: Literal["string", "integer"]
    description: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an agent may call."""

    name: str
    description: str
    parameters: Mapping[str, Parameter]

    def schema(self) -> dict[str, Any]:
        """Return the tool as an OpenAI chat request has it."""
        properties = {
            name: {"type": parameter.type, "description": parameter.description}
            for name, parameter in self.parameters.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def complaint(self, arguments: object) -> str | None:
        """Say what is wrong with the arguments of a call; None where nothing is."""
        expected = ", ".join(f"{name} ({parameter.type})" for name, parameter in self.parameters.items()) or "nothing"
        if not isinstance(arguments, dict):
            return f"{self.name}: the arguments must be a JSON object; got {show(arguments)}. Expected: {expected}."
        for name in arguments:
            if name not in self.parameters:
                return f"{self.name}: unknown argument {show(name)}. Expected: {expected}."
        for name, parameter in self.parameters.items():
            if name not in arguments:
                return f"{self.name}: the argument {name!r} is missing. Expected: {expected}."
            # Not isinstance: JSON's true is no whole number, though Python's True is.
            if type(arguments[name]) is not _PYTHON_TYPES[parameter.type]:
                got = show(arguments[name])
                return f"{self.name}: {name!r} must be of type {parameter.type}; got {got}. Expected: {expected}."
        return None


def show(value: object) -> str:
    """Describe what an agent sent by mistake: the start of a text, else the JSON type, since it may be of any size."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")
