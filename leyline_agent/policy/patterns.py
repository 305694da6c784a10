"""Regular expressions in time linear in the text (RE2), so that no pattern in a policy can hang the agent.

Python's own matcher backtracks: `(a+)+$` on forty letters outlives the program. The syntax is nearly Python's; what
cannot be had in linear time (backreferences, lookaround) is refused when the policy is loaded.
"""

from __future__ import annotations

from functools import lru_cache

import re2

MAX_PATTERN_CHARS = 1000


class PatternError(ValueError):
    """A pattern is no regular expression, or needs more than linear time."""


class Pattern:
    """A compiled pattern. Safe across threads."""

    def __init__(self, source: str) -> None:
        """Compile.

        Raises:
            PatternError: see there.
        """
        self.source = source
        if len(source) > MAX_PATTERN_CHARS:
            raise PatternError(f"got a pattern of {len(source)} characters, expected {MAX_PATTERN_CHARS} or fewer")
        if "\b" in source:
            raise PatternError(
                f"got {source!r:.80}, which has a backspace: between double quotes YAML reads \\b as one; put the "
                "pattern in single quotes, or write \\\\b"
            )
        options = re2.Options()
        # The caller is told; RE2 would write to stderr too.
        options.log_errors = False
        try:
            # `^` and `$` are those of a line, as who writes of outputs means them.
            self._compiled = re2.compile(f"(?m){source}", options=options)
        except re2.error as error:
            why = error.args[0]
            problem = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
            raise PatternError(
                f"got {source!r:.80}, which is no regular expression of RE2 ({problem}); lookaround and backreferences "
                "are not to be had in linear time"
            ) from error
        if self._compiled.search("") is not None:
            raise PatternError(f"got {source!r:.80}, which matches the empty text and so everything; ask for something")

    def search(self, text: str) -> bool:
        """Tell whether the pattern matches anywhere in a text."""
        try:
            return self._compiled.search(text) is not None
        except UnicodeEncodeError:
            return self._compiled.search(_encodable(text)) is not None

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the matches from left to right, none overlapping another."""
        try:
            matches = list(self._compiled.finditer(text))
        except UnicodeEncodeError:
            matches = list(self._compiled.finditer(_encodable(text)))
        return [match.span() for match in matches if match.end() > match.start()]


def _encodable(text: str) -> str:
    """Put a question mark in the place of each half of a surrogate pair, so that places stay the same.

    JSON can say one, and UTF-8, in which RE2 looks, cannot.
    """
    return text.encode("utf-8", errors="replace").decode("utf-8")


@lru_cache(maxsize=256)
def compile_pattern(source: str) -> Pattern:
    """Return the compiled pattern, the same object for the same source.

    Raises:
        PatternError: it is no regular expression, or one that needs more than linear time.
    """
    return Pattern(source)
