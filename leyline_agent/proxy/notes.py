"""What the upstream does with notes, and whether it is sent any. Knows nothing of connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

RETRY_S = 600.0
"""How long an upstream that refuses notes, or ignores them, is sent none."""
# A note holds the conversation's id, which is for the plugin alone.
_MAX_IGNORED = 3


class Notes:
    """Whether to send notes. Who has answered one with an outcome is sent them for good: no answer turns them off."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: Literal["not seen yet", "answered", "ignored", "refused"] = "not seen yet"
        self._has_taken_one = self._has_had_outcome = False
        self._num_ignored = 0
        self._off_until = 0.0

    @property
    def state(self) -> str:
        """What the upstream did with the last note, for people."""
        return self._state

    @property
    def are_sent(self) -> bool:
        """Whether to send one now."""
        return self._clock() >= self._off_until

    def add_taken(self, *, has_outcome: bool | None) -> bool:
        """Count a note that was no hindrance, None where it cannot be known; tell whether this turned notes off."""
        self._has_taken_one = True
        if has_outcome is None:
            return False
        if has_outcome:
            self._has_had_outcome, self._state, self._off_until = True, "answered", 0.0
            return False
        self._state = "ignored"
        self._num_ignored += 1
        return self._num_ignored >= _MAX_IGNORED and self._turn_off()

    def may_be_refused(self, error: bytes) -> bool:
        """Tell whether an error without an outcome may be about the note."""
        # An upstream that has answered a note before, and does not speak of it now, means something else.
        return not self._has_taken_one or b"custom_params" in error

    def add_refused(self) -> bool:
        """Count a request that was answered only without its note; tell whether this turned notes off."""
        if self._has_had_outcome:
            # A client can have an error say what it likes.
            return False
        self._state = "refused"
        return self._turn_off()

    def _turn_off(self) -> bool:
        if self._has_had_outcome:
            return False
        self._num_ignored = 0
        self._off_until = self._clock() + RETRY_S
        return True
