"""What operators count: turns by what became of their notes, and tokens, beside SGLang's own metrics at `/metrics`."""

from __future__ import annotations

from functools import cache
from typing import Any

from leyline_agent.core.protocol import Outcome

_SCHEDULER_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@cache
class Metrics:
    """The counters of this process; there is one of each. To be made where SGLang has its metrics switched on."""

    def __init__(self) -> None:
        # Imported once SGLang has said where values go: prometheus_client asks for that as it is imported.
        from prometheus_client import Counter, Histogram

        self._turns: Any = Counter(
            "leyline_turns", "Requests with a note, by the outcome's status and reason", ("status", "reason")
        )
        self._moved: Any = Counter("leyline_moved_tokens", "Tokens that splices moved instead of prefilling them")
        self._prefilled: Any = Counter("leyline_prefilled_tokens", "Tokens that splices prefilled: the R's")
        self._dropped: Any = Counter("leyline_dropped_tokens", "Cached tokens that a forget dropped")
        self._scheduler: Any = Histogram(
            "leyline_scheduler_seconds",
            "What the scheduler spent on the edits of a turn while no batch ran",
            buckets=_SCHEDULER_SECONDS,
        )

    def count(self, outcome: Outcome) -> None:
        """Count a turn."""
        self._turns.labels(outcome.status.value, outcome.reason.value if outcome.reason else "").inc()
        self._moved.inc(outcome.moved_tokens)
        self._prefilled.inc(outcome.prefilled_tokens)
        if outcome.purge is not None:
            self._dropped.inc(outcome.purge.dropped_tokens)
        if outcome.scheduler_ms:
            self._scheduler.observe(outcome.scheduler_ms / 1e3)
