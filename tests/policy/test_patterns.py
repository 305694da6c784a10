"""The linear-time matcher, against Python's own."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_agent.policy.patterns import MAX_PATTERN_CHARS, Pattern, PatternError, compile_pattern

_ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\w", r"\d", r"\s", r"\b", "^", "$", "(?i:A)", "(?i:[^B])"])
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(lambda two: f"({two[0]}){two[1]}"),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=80)
@given(_PATTERNS, st.text("abAB \n1", max_size=9))
def test_it_finds_what_python_finds(source: str, text: str) -> None:
    try:
        pattern = Pattern(source)
    except PatternError:
        # It matches the empty text.
        return

    assert pattern.search(text) == bool(re.search(source, text, re.MULTILINE))


def test_places_are_those_of_characters() -> None:
    assert Pattern(r"sk-\w+").spans("é漢🙂 sk-abc, sk-1") == [(4, 10), (12, 16)]


def test_half_a_surrogate_pair_is_a_character_like_others() -> None:
    """JSON can say it and UTF-8 cannot, in which RE2 looks."""
    assert Pattern(r"sk-\w+").spans("\ud800é sk-abc \udc00") == [(3, 9)]
    assert Pattern("sk").search("\ud800 sk")
    assert not Pattern("sk").search("\ud800")


def test_alternatives_and_classes_are_as_documented() -> None:
    assert Pattern("a|ab").spans("ab") == [(0, 1)]
    assert Pattern(r"\w+").spans("été") == [(1, 2)]
    assert Pattern(r"\p{L}+").spans("été") == [(0, 3)]


def test_edges_are_those_of_a_line() -> None:
    assert Pattern("^b$").spans("a\nb\nc") == [(2, 3)]


@pytest.mark.parametrize(
    ("source", "is_there"),
    [
        ("(a+)+$", False),
        ("(a|aa)+b", False),
        ("(.*)*x", True),
        ("a*a*a*a*a*b", False),
        ("[a-z]+@[a-z]+", False),
        ("(x+x+)+y", False),
    ],
)
def test_no_pattern_hangs(source: str, is_there: bool) -> None:
    """Python's matcher needs hours for the first on forty letters, and this test would not come back."""
    text = "a" * 20_000 + "x" * 20_000

    assert Pattern(source).search(text) is is_there
    assert bool(Pattern(source).spans(text)) is is_there


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("(a)\\1", "invalid escape", id="backreference"),
        pytest.param("a(?=b)", "linear time", id="lookahead"),
        pytest.param("(?<!a)b", "linear time", id="lookbehind"),
        pytest.param("(", "no regular expression", id="syntax"),
        pytest.param("a*", "empty text", id="empty"),
        pytest.param("(a{900}){900}", "repetition size", id="too many states"),
        pytest.param("a" * (MAX_PATTERN_CHARS + 1), "characters", id="too long"),
        pytest.param("(" * 400, "no regular expression", id="deep"),
    ],
)
def test_what_it_cannot_match_is_refused(source: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        Pattern(source)


def test_a_pattern_is_compiled_once() -> None:
    assert compile_pattern("abc+") is compile_pattern("abc+")
