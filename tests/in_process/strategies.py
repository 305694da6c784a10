"""What the machines draw: tokens, turns, edits, and what comes between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from leyline_agent.core.protocol import Directive, Mode

TOKEN = st.integers(1, 7)
TOKENS = st.lists(TOKEN, min_size=1, max_size=6)
OUTPUTS = st.lists(TOKEN, max_size=4)
BACK = st.sampled_from([0, 0, 0, 1, 2, 3])
"""How many turns before the last one."""
INDEX = st.integers(0, 7)
"""Taken modulo the number of what is to be chosen from."""
_MODE = st.sampled_from([Mode.AMORTIZE, Mode.AMORTIZE, Mode.AMORTIZE, Mode.FORGET])
SPAN = st.tuples(st.integers(0, 8), st.integers(0, 5), st.lists(TOKEN, max_size=3), _MODE)
"""A directive: tokens left alone before it, tokens removed, R, mode."""
SPANS = st.lists(SPAN, min_size=1, max_size=4)
CHOICES = st.sampled_from([1, 1, 1, 2, 3])
"""How many answers a turn asks for."""
BETWEEN = st.one_of(
    st.tuples(st.just("evict"), st.integers(1, 40)),
    st.tuples(st.just("ask"), TOKENS),
    st.tuples(st.just("lose"), st.integers(0, 4)),
    st.tuples(st.just("reset"), st.booleans()),
)
"""What comes between the steps of a turn."""


def directives_of(base: Sequence[int], spans: list[Any]) -> list[Directive]:
    """Lay the spans out over the base, as far as they fit."""
    directives: list[Directive] = []
    at = 0
    for gap, length, replacement, mode in spans:
        start = at + gap
        if start > len(base):
            break
        at = min(start + length, len(base))
        directives.append(Directive(start=start, end=at, replacement_ids=tuple(replacement), mode=mode))
    return directives or [Directive(start=0, end=min(1, len(base)))]
