"""Edits of a message list, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode


class Edit(NamedTuple):
    """Put `replacement` in the place of `messages[start:end]`.

    Replacing one message has one replacement, dropping has none, collapsing several has one stub. A tuple, since a turn
    may make hundreds and a frozen dataclass takes four times as long to make.
    """

    start: int
    end: int
    replacement: tuple[Message, ...] = ()
    mode: Mode = Mode.AMORTIZE
    rule: str = ""
    """Name of the rule that made it, or what else did."""


def apply_edits(messages: Sequence[Message], edits: Sequence[Edit]) -> list[Message]:
    """Return a new list with every edit applied; edits are sorted and disjoint.

    Raises:
        ValueError: the edits overlap, are unsorted or reach beyond the list.
    """
    edited: list[Message] = []
    at = 0
    for edit in edits:
        if not at <= edit.start <= edit.end <= len(messages):
            raise ValueError(
                f"edit [{edit.start}, {edit.end}) of rule {edit.rule!r} must start at {at} or later and end within "
                f"{len(messages)} messages; sort the edits and keep them apart"
            )
        edited.extend(messages[at : edit.start])
        edited.extend(edit.replacement)
        at = edit.end
    edited.extend(messages[at:])
    return edited
