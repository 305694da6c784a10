"""YAML text to plain values, and back from a value's path to its place in the text.

Reads the part of YAML that a policy needs: no aliases, no duplicate keys, no tags that make objects, and no deep
nesting. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from leyline_agent.errors import PolicyError

MAX_DEPTH = 32
"""Nesting of lists and mappings. A policy needs about six; PyYAML recurses, so thousands would end in a crash."""

MAX_EXCERPT_CHARS = 120
"""Of a line that an error shows."""

Path = Sequence[str | int]


_HINTS = {
    "unknown escape character": "between double quotes a backslash is written twice; between single quotes once",
    "expected ',' or": "a bracket before it is not closed, or a text that begins with one is not in quotes",
    "expected <block end>": "is this line indented like its neighbours?",
    "mapping values are not allowed": "a text with ': ' in it needs quotes; else look at the indentation",
    "cannot start any token": "a text that begins with it needs quotes",
    "expected alphabetic or numeric": "a text that begins with '*' or '&' needs quotes",
    "another document": "a policy is one document, so leave '---' out",
}
"""What mostly is wrong where PyYAML says this."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value or a key stands; counted from 1."""

    line: int
    column: int


class _Mark(Protocol):
    """What PyYAML's two kinds of mark have in common; counted from 0."""

    @property
    def line(self) -> int: ...

    @property
    def column(self) -> int: ...


class Document:
    """One parsed YAML document.

    Raises:
        PolicyError: the text is not YAML as this module reads it.
    """

    def __init__(self, text: str, *, file: str) -> None:
        self._file = file
        self._lines = text.splitlines()
        try:
            self._check_events(text)
            self._root = yaml.compose(text, Loader=_Loader)
            if self._root is not None:
                self._check_keys(self._root, ())
            self.value: Any = None if self._root is None else _Loader(text).construct_document(self._root)
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            line, column = before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1
            raise self.error(
                f"got the character {text[error.position]!r}, which YAML does not allow; remove it",
                Place(line, column),
            ) from error
        except yaml.MarkedYAMLError as error:
            raise self._syntax_error(error, text) from error

    def place(self, path: Path) -> Place | None:
        """Place of the value at `path`, or of the nearest value around it that exists."""
        node = self._root
        for part in path:
            child = _child(node, part)
            if child is None:
                break
            node = child[1]
        return None if node is None else _place(node.start_mark)

    def key_place(self, path: Path) -> Place | None:
        """Place of the last key of `path`, where the value at `path` is one of a mapping."""
        node = self._root
        place = None
        for part in path:
            child = _child(node, part)
            if child is None:
                return self.place(path)
            place, node = _place(child[0].start_mark), child[1]
        return place

    def _check_events(self, text: str) -> None:
        """Look at the event stream, which costs no recursion and follows no alias."""
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                raise self._error(f"got the alias '*{event.anchor}'; write the value out", event.start_mark)
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise self._error(f"nested more than {MAX_DEPTH} deep; a policy needs far less", event.start_mark)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1

    def _check_keys(self, node: yaml.Node, path: tuple[str | int, ...]) -> None:
        if isinstance(node, yaml.SequenceNode):
            for idx, item in enumerate(node.value):
                self._check_keys(item, (*path, idx))
        elif isinstance(node, yaml.MappingNode):
            first_lines: dict[str, int] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                    shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                    raise self._error(
                        f"got the key {shown}, which YAML does not read as a word; see the list of keys, or quote it",
                        key.start_mark,
                        key_path(path),
                    )
                if key.value in first_lines:
                    raise self._error(
                        f"got {key.value!r} twice, first in line {first_lines[key.value]}; keep one",
                        key.start_mark,
                        key_path((*path, key.value)),
                    )
                first_lines[key.value] = key.start_mark.line + 1
                self._check_keys(value, (*path, key.value))

    def _syntax_error(self, error: yaml.MarkedYAMLError, text: str) -> PolicyError:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or "not valid YAML"
        if error.context_mark is not None and "quoted scalar" in (error.context or "") and "end of" in problem:
            return self._error("not valid YAML: the quotes that are opened here are not closed", error.context_mark)
        hint = "".join([f"; {words}" for said, words in _HINTS.items() if said in problem])
        if mark is not None:
            lines = text.splitlines()
            line = lines[mark.line] if mark.line < len(lines) else ""
            if "\t" in line[: mark.column + 1]:
                hint = "; YAML wants spaces for indentation, found a tab"
            elif line.strip():
                hint = f"; in {line.strip()[:80]!r}{hint}"
        return self._error(f"not valid YAML: {problem}{hint}", mark)

    def error(self, message: str, place: Place | None, key: str | None = None) -> PolicyError:
        """Make an error that says where, with the line itself and a mark below the place."""
        return PolicyError(
            message + self._excerpt(place),
            file=self._file,
            line=place.line if place else None,
            column=place.column if place else None,
            key=key,
        )

    def _excerpt(self, place: Place | None) -> str:
        line = self._lines[place.line - 1] if place and place.line <= len(self._lines) else ""
        if place is None or not line.strip() or place.column > MAX_EXCERPT_CHARS or not line.isprintable():
            return ""
        number = str(place.line)
        shown = line if len(line) <= MAX_EXCERPT_CHARS else line[:MAX_EXCERPT_CHARS] + "…"
        return f"\n  {number} | {shown}\n  {' ' * len(number)} | {' ' * (place.column - 1)}^"

    def _error(self, message: str, mark: _Mark | None, key: str | None = None) -> PolicyError:
        return self.error(message, None if mark is None else _place(mark), key)


def key_path(path: Path) -> str | None:
    """Write a path as people do: `rules[0].select.tool`; None for the document itself."""
    written = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return written.removeprefix(".") or None


class _Loader(yaml.SafeLoader):
    """SafeLoader whose conversion errors (a 13th month, a number too long to read) say where."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Hashable:
        try:
            value: Hashable = super().construct_object(node, deep=deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, f"{error}; quote it", node.start_mark) from error
        return value


def _child(node: yaml.Node | None, part: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """Key and value at `part`; an item of a list is its own key."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def _place(mark: _Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)
