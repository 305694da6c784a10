"""Stub templates: what stands in the place of what a rule took away.

A template is text with `{placeholder}`s; a literal brace is doubled, as in `str.format`. Knows nothing of messages.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from string import Formatter

MAX_ARGS_CHARS = 80
"""`{args}` is cut to this: a stub is there to be short, and a call's arguments can be a whole file."""

# What counts something is not compared: a stub of a stub would count anew.
_COUNTS = frozenset({"lines", "tokens", "turns"})


@lru_cache(maxsize=256)
def parse_stub(template: str) -> tuple[tuple[str, str | None], ...]:
    """Cut a template into (literal text, placeholder that follows it or None).

    Raises:
        ValueError: braces do not match, or a placeholder is more than a name.
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}; write a literal brace twice: '{{{{' or '}}}}'") from error
    for _, field, spec, conversion in pieces:
        if field is not None and (spec or conversion or not field.isidentifier()):
            raise ValueError(
                "got a placeholder that is more than a name, expected one such as {lines}; write a literal brace twice"
            )
    return tuple((literal, field) for literal, field, _, _ in pieces)


def check_stub(template: str, known: Collection[str]) -> None:
    """Check that a template uses no placeholder but the `known` ones.

    Raises:
        ValueError: as `parse_stub`, or an unknown placeholder, with the nearest known one.
    """
    for _, field in parse_stub(template):
        if field is not None and field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {{{near[0]}}}?" if near else ""
            names = ", ".join(f"{{{name}}}" for name in known)
            raise ValueError(f"got unknown placeholder {{{field}}}, expected one of {names}{hint}")


def render_stub(template: str, values: Mapping[str, str]) -> str:
    """Return the template with its placeholders filled in; braces inside of `values` stay as they are."""
    return template.format_map(values)


def is_stub(template: str, values: Mapping[str, str], text: str) -> bool:
    """Tell whether `text` is this template filled in with these values, whatever its counts are."""
    pieces = parse_stub(template)
    if pieces and not text.startswith(pieces[0][0]):
        # So it is with nearly every text; the rest costs a pattern of its own for each.
        return False
    pattern = "".join(
        re.escape(literal) + ("" if field is None else r"\d+" if field in _COUNTS else re.escape(values[field]))
        for literal, field in pieces
    )
    return re.fullmatch(pattern, text) is not None


def shorten_args(arguments: str) -> str:
    """Return a call's arguments on one line of at most `MAX_ARGS_CHARS` characters."""
    line = " ".join(arguments.split())
    return line if len(line) <= MAX_ARGS_CHARS else line[: MAX_ARGS_CHARS - 1] + "…"


def count_lines(text: str) -> int:
    """Count lines as `wc -l` does, plus a last one that no line break ends."""
    return text.count("\n") + (not text.endswith("\n") if text else 0)
