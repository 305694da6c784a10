"""What a proxy did, in counts: of each remembered conversation, of all, and what it said once. No text, no ids."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from leyline_agent.proxy.recognise import Known
from leyline_agent.telemetry import Telemetry

logger = logging.getLogger("leyline_agent.proxy")

COUNTS = (
    "turns",
    "splices",
    "prompt_tokens",
    "cached_tokens",
    "kept_tokens",
    "moved_tokens",
    "recomputed_tokens",
    "prefilled_tokens",
    "saved_ms",
    "template_changes",
    "template_moved_tokens",
)
"""The counts of a `Telemetry` that are shown and added up."""


def summary(telemetry: Telemetry) -> dict[str, Any]:
    """Return the counts of one conversation."""
    return {**{name: round(getattr(telemetry, name), 3) for name in COUNTS}, "fallbacks": dict(telemetry.fallbacks)}


def added_up(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of several summaries."""
    counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    fallbacks: Counter[str] = Counter()
    for one in summaries:
        counts.update({name: one[name] for name in COUNTS})
        fallbacks.update(one["fallbacks"])
    return {**counts, "fallbacks": dict(fallbacks)}


class Stats:
    """Counts of one proxy since its start."""

    def __init__(self) -> None:
        self.requests = 0
        """Chat requests."""
        self.unread_answers = 0
        """Answers that came and were not understood; the client has them all the same."""
        self.failures: Counter[str] = Counter()
        """What became of the upstream, where it gave no whole answer."""
        self.without_note: Counter[str] = Counter()
        """Turns that went without their note, by what the upstream does with notes."""
        self._unedited: Counter[str] = Counter()
        self._dropped = added_up(())
        self._num_dropped = 0
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def add_unedited(self, reason: str, words: str, *arguments: object) -> None:
        """Count a request that went through as it came, and say so once a reason."""
        with self._lock:
            self._unedited[reason] += 1
        self.tell_once(f"unedited {reason}", words, *arguments)

    def add_dropped(self, known: Known) -> None:
        """Keep the counts of a conversation that is forgotten."""
        with self._lock:
            self._dropped = added_up((self._dropped, summary(known.conversation.telemetry)))
            self._num_dropped += 1

    def tell_once(self, key: str, words: str, *arguments: object) -> None:
        """Log a warning, unless one of this key was logged before."""
        with self._lock:
            is_new = key not in self._told
            self._told.add(key)
        if is_new:
            logger.warning(words, *arguments)

    def as_json(self, remembered: Iterable[Known]) -> dict[str, Any]:
        """Return all of it; conversations with the last used first."""
        conversations = [_conversation(known) for known in remembered]
        with self._lock:
            return {
                "requests": self.requests,
                "unedited": dict(self._unedited),
                "failures": dict(self.failures),
                "without_note": dict(self.without_note),
                "unread_answers": self.unread_answers,
                "forgotten_conversations": self._num_dropped,
                "totals": added_up((self._dropped, *conversations)),
                "conversations": conversations[::-1],
            }


def _conversation(known: Known) -> dict[str, Any]:
    conversation = known.conversation
    hit_rate = conversation.telemetry.hit_rate
    return {
        # As the server's log has it.
        "conversation": hashlib.sha256(conversation.id.encode()).hexdigest()[:32],
        "by": known.by,
        "idle_s": round(time.monotonic() - known.last_used, 1),
        **summary(conversation.telemetry),
        "hit_rate": None if hit_rate is None else round(hit_rate, 4),
    }
