"""The rows and totals of a replay. Pure arithmetic; a row is one line of `turns.jsonl`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evals.replay.server_counters import ServerCounters

Arm = Literal["none", "reprefill", "splice"]
ARMS: tuple[Arm, ...] = ("none", "reprefill", "splice")

FALLBACK_STATUSES = ("refused", "partial")
SPLICE_STATUSES = ("spliced", "partial")
"""`partial` is both: the directives left of the refused one were carried out."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One request of one arm."""

    arm: Arm
    turn: int
    """From 1."""
    prompt_tokens: int
    reported_cached_tokens: int
    """As the response says."""
    prefilled_tokens: int
    """What the splice itself prefilled; the response counts these tokens as cached."""
    ms: float
    """The model call as the agent sees it: policy, note, request and answer."""
    http_ms: float
    """The request and its answer alone."""
    num_requests: int
    """HTTP requests that this model call sent."""
    status: str | None = None
    """What became of the note; None without an outcome."""
    reason: str | None = None
    num_directives: int = 0
    moved_tokens: int = 0
    splice_ms: float = 0.0
    """The server's time for the splice, part of `http_ms`."""
    ideal_cached_tokens: int | None = None
    """See `ideal.py`; None where no tokenizer is at hand."""
    ideal_prompt_tokens: int | None = None
    """The prompt as the local tokenizer counts it."""
    edited_messages: int | None = None
    """Messages of the previous prompt that are not in this one."""
    edited_tokens: int | None = None

    @property
    def cached_tokens(self) -> int:
        """Return the cached tokens less what the splice prefilled."""
        return max(0, self.reported_cached_tokens - self.prefilled_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON, `cached_tokens` included."""
        row = dataclasses.asdict(self)
        return {**row, "cached_tokens": self.cached_tokens, "ms": round(self.ms, 2), "http_ms": round(self.http_ms, 2)}


@dataclass(frozen=True, slots=True)
class ArmResult:
    """All rows of an arm, and the server's view of it."""

    arm: Arm
    rows: tuple[TurnRow, ...]
    stopped_at: str | None = None
    """Why the arm ended before the trajectory did."""
    server: ServerCounters | None = None
    """What the server counted meanwhile; None without `--enable-metrics`."""
    prompt_digests: tuple[str, ...] = field(default=(), repr=False)
    """Of each request's messages, to compare arms."""


def summarize(result: ArmResult) -> dict[str, Any]:
    """Return an arm's totals.

    Tokens count from the second request on, as `hit_rate` does: the first can hit nothing after a flush. `ms_total`
    and `turns` are those of all requests.
    """
    later = result.rows[1:]
    prompt_tokens = sum(row.prompt_tokens for row in later)
    cached_tokens = sum(row.cached_tokens for row in later)
    totals: dict[str, Any] = {
        "hit_rate": _rate(cached_tokens, prompt_tokens),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "computed_tokens": prompt_tokens - cached_tokens,
        "ms_total": round(sum(row.ms for row in result.rows), 1),
        "http_ms_total": round(sum(row.http_ms for row in result.rows), 1),
        "turns": len(result.rows),
        "http_requests": sum(row.num_requests for row in result.rows),
        "first_request": {"prompt_tokens": result.rows[0].prompt_tokens if result.rows else 0},
        "last_prompt_tokens": result.rows[-1].prompt_tokens if result.rows else 0,
    }
    if result.stopped_at is not None:
        totals["stopped_at"] = result.stopped_at
    if all(row.edited_tokens is not None for row in result.rows):
        totals["edited_messages"] = sum(row.edited_messages or 0 for row in result.rows)
        totals["edited_tokens"] = sum(row.edited_tokens or 0 for row in result.rows)
        totals["tokenizer_mismatches"] = sum(row.ideal_prompt_tokens != row.prompt_tokens for row in result.rows)
    if result.arm == "splice":
        totals |= _splice_totals(result.rows)
    totals["crosscheck"] = crosscheck(result)
    return totals


def _splice_totals(rows: Sequence[TurnRow]) -> dict[str, Any]:
    later = rows[1:]
    # A turn without an outcome was served plain, though a note went out: that is a fallback too.
    fallbacks = Counter(
        row.reason or row.status or "no_outcome"
        for row in rows
        if row.status is None or row.status in FALLBACK_STATUSES
    )
    ideal, gap = None, None
    if all(row.ideal_cached_tokens is not None for row in later):
        ideal = _rate(sum(row.ideal_cached_tokens or 0 for row in later), sum(row.prompt_tokens for row in later))
        above = [row.cached_tokens - (row.ideal_cached_tokens or 0) for row in later]
        # Apart, since they do not make up for each other: a turn above the ideal reused rows of a message that the
        # policy took out, where a new one holds nearly the same text.
        gap = {
            "missed_tokens": -sum(tokens for tokens in above if tokens < 0),
            "extra_tokens": sum(tokens for tokens in above if tokens > 0),
        }
    return {
        "hit_rate_ideal": ideal,
        "ideal_gap": gap,
        "splices": sum(row.status in SPLICE_STATUSES for row in rows),
        "fallbacks": sum(fallbacks.values()),
        "fallbacks_by_reason": dict(sorted(fallbacks.items())),
        "statuses": dict(sorted(Counter(row.status or "no_outcome" for row in rows).items())),
        "moved_tokens": sum(row.moved_tokens for row in rows),
        "prefilled_tokens": sum(row.prefilled_tokens for row in rows),
        "ms_by_stage": {
            "splice": round(sum(row.splice_ms for row in rows), 1),
            "request": round(sum(row.http_ms - row.splice_ms for row in rows), 1),
            "client": round(sum(row.ms - row.http_ms for row in rows), 1),
        },
    }


def crosscheck(result: ArmResult) -> dict[str, Any]:
    """Compare what the responses said with what the server counted, over all requests of the arm.

    They must be equal, tokens and requests: the plugin keeps a splice's internal prefills out of the counters.
    """
    client = {
        "requests": sum(row.num_requests for row in result.rows),
        "prompt_tokens": sum(row.prompt_tokens for row in result.rows),
        "cached_tokens": sum(row.reported_cached_tokens for row in result.rows),
    }
    if result.server is None:
        return {"client": client, "server": None, "agrees": None}
    server = dataclasses.asdict(result.server)
    internal = result.server.finished_requests - len(result.rows)
    extra_prompt = result.server.prompt_tokens - client["prompt_tokens"]
    extra_cached = result.server.cached_tokens - client["cached_tokens"]
    return {
        "client": client,
        "server": server,
        "internal_requests": internal,
        "internal_prompt_tokens": extra_prompt,
        "internal_cached_tokens": extra_cached,
        "agrees": internal == extra_prompt == extra_cached == 0
        and result.server.http_chat_requests == client["requests"],
    }


def _rate(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
