"""Which servers are sent notes. A note holds a conversation's id, and who knows it can edit the conversation.

Owns what is known of each server by its base URL. Knows nothing of HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MAX_UNHEARD = 3
"""Answers to notes, none of them with an outcome, after which a server counts as one without the plugin."""
_PAUSE_S = 600.0


class NotedServers:
    """Remembers which servers have answered a note with an outcome. Any number of threads may use it.

    One that has is sent notes for good. Any other is sent none for ten minutes after it refused one, after its third
    answer without an outcome, and after each later one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._num_unheard: dict[str, int] = {}
        self._paused_until: dict[str, float] = {}

    def takes_notes(self, server: str) -> bool:
        """Tell whether to send it a note now."""
        with self._lock:
            return self._clock() >= self._paused_until.get(server, float("-inf"))

    def spoke(self, server: str) -> None:
        """Take note of a response with an outcome."""
        with self._lock:
            self._known.add(server)
            self._paused_until.pop(server, None)

    def was_silent(self, server: str) -> bool:
        """Take note of an answer to a note, without an outcome; return whether the server gets no more for now."""
        with self._lock:
            self._num_unheard[server] = self._num_unheard.get(server, 0) + 1
            return self._num_unheard[server] >= _MAX_UNHEARD and self._pause(server)

    def refused(self, server: str) -> bool:
        """Take note of an answer to a request that was refused with a note; return as `was_silent`."""
        with self._lock:
            return self._pause(server)

    def _pause(self, server: str) -> bool:
        if server in self._known:
            return False
        self._paused_until[server] = self._clock() + _PAUSE_S
        return True
