"""Whether a server is sent notes. A note holds a conversation's id, and who knows it can edit the conversation.

Owns what is known of one server. Knows nothing of HTTP or of who sends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

RETRY_S = 600.0
"""How long a server that refuses notes, or ignores them, is sent none."""
_MAX_IGNORED = 3
_FIELD = b"custom_params"


class NotedServer:
    """What a server did with notes. Any number of threads may use it.

    One that has ever answered a note with an outcome is sent notes for good: no answer turns them off, since a client
    can have an error say what it likes. Any other is sent none for ten minutes after it refused one and answered
    without it, after its third answer without an outcome, and after each later one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state: Literal["not seen yet", "answered", "ignored", "refused"] = "not seen yet"
        self._has_taken_one = self._has_had_outcome = False
        self._num_ignored = 0
        self._off_until = float("-inf")

    @property
    def state(self) -> str:
        """What it did with the last note, for people."""
        return self._state

    @property
    def takes_notes(self) -> bool:
        """Whether to send it one now."""
        return self._clock() >= self._off_until

    def add_taken(self, *, has_outcome: bool | None) -> bool:
        """Count a note that was no hindrance, None where it cannot be known; tell whether this turned notes off."""
        with self._lock:
            self._has_taken_one = True
            if has_outcome:
                self._has_had_outcome, self._state, self._off_until = True, "answered", float("-inf")
            if has_outcome is not False:
                return False
            self._state = "ignored"
            self._num_ignored += 1
            return self._num_ignored >= _MAX_IGNORED and self._turn_off()

    def may_be_refused(self, error: bytes) -> bool:
        """Tell whether an error 400 or 422 without an outcome may be about the note."""
        # A server that has answered a note before, and does not speak of it now, means something else.
        return not self._has_taken_one or _FIELD in error

    def add_refused(self) -> bool:
        """Count a request that was answered only without its note; tell whether this turned notes off."""
        with self._lock:
            if self._has_had_outcome:
                return False
            self._state = "refused"
            return self._turn_off()

    def _turn_off(self) -> bool:
        if self._has_had_outcome:
            return False
        self._off_until = self._clock() + RETRY_S
        return True
