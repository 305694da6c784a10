"""The server's own counters, read from `/metrics`: the other side of a replay's book-keeping."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from evals.replay.errors import ReplayError
from evals.replay.transport import CHAT_PATH

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Totals since the server started."""

    http_chat_requests: int
    """Chat requests as the HTTP server received them."""
    finished_requests: int
    """Requests that ran to their end, a splice's internal prefills included."""
    prompt_tokens: int
    cached_tokens: int

    def since(self, earlier: ServerCounters) -> ServerCounters:
        """Return what was counted between `earlier` and now."""
        return ServerCounters(
            self.http_chat_requests - earlier.http_chat_requests,
            self.finished_requests - earlier.finished_requests,
            self.prompt_tokens - earlier.prompt_tokens,
            self.cached_tokens - earlier.cached_tokens,
        )


def parse_counters(metrics: str) -> ServerCounters:
    """Read Prometheus text; a counter that is absent has counted nothing yet."""

    def total(name: str, label: str = "") -> int:
        samples = (_SAMPLE.match(line) for line in metrics.splitlines() if not line.startswith("#"))
        return int(
            sum(
                float(found["value"])
                for found in samples
                if found and found["name"] == name and label in (found["labels"] or "")
            )
        )

    return ServerCounters(
        http_chat_requests=total("sglang:http_requests_total", f'endpoint="{CHAT_PATH}"'),
        finished_requests=total("sglang:num_requests_total"),
        prompt_tokens=total("sglang:prompt_tokens_total"),
        cached_tokens=total("sglang:cached_tokens_total"),
    )


def read_counters(client: httpx.Client) -> ServerCounters | None:
    """Return the counters, or None where the server runs without `--enable-metrics`."""
    response = client.get("/metrics")
    if response.status_code == httpx.codes.NOT_FOUND or not response.is_success:
        return None
    return parse_counters(response.text)


def settled_counters(
    client: httpx.Client, enough: Callable[[ServerCounters], bool], *, timeout_s: float = 5.0
) -> ServerCounters | None:
    """Read the counters until `enough` holds, since they are written after an answer has gone out."""
    deadline = time.monotonic() + timeout_s
    while True:
        counters = read_counters(client)
        if counters is None or enough(counters) or time.monotonic() > deadline:
            return counters
        time.sleep(0.1)


def flush_cache(client: httpx.Client, *, timeout_s: float = 30.0) -> None:
    """Empty the server's cache, so that an arm profits from no other.

    Raises:
        ReplayError: the server did not do it, for instance because others use it.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        response = client.post("/flush_cache")
        if response.is_success:
            return
        if time.monotonic() > deadline:
            raise ReplayError(
                f"POST /flush_cache answered {response.status_code} for {timeout_s:.0f} s "
                f"({response.text.strip()[:200]!r}); a replay needs a server that nobody else uses"
            )
        # A request that has just been answered may still count as running.
        time.sleep(0.2)
