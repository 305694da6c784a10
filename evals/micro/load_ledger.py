"""What came of a run of `under_load`: streams against streams, turns by kind, rows, and what of it does not hold."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.micro.result_rows import percentile
from evals.micro.row_check import Fresh, Moved

MAX_LOGPROB_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one stream gave."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Streams of a round against those of another."""

    streams: int
    equal: int
    """Streams all of whose token ids are equal."""
    max_logprob_difference: float
    """Over all positions up to the first token that differs."""
    first_difference: int | None
    """The least position at which a stream differs."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a row."""
        return {
            "streams_total": self.streams,
            "streams_equal": self.equal,
            "max_logprob_difference": self.max_logprob_difference,
            "first_difference": self.first_difference,
        }


def compare(streams: Sequence[Decoded], others: Sequence[Decoded]) -> Comparison:
    """Compare stream by stream."""
    equal, worst, first = 0, 0.0, None
    for one, other in zip(streams, others, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        differs = next((idx for idx, (a, b) in pairs if a != b), None)
        equal += differs is None
        if differs is not None:
            first = differs if first is None else min(first, differs)
        # Behind a token that differs the two are about different texts.
        upto = len(one.logprobs) if differs is None else differs
        for a, b in zip(one.logprobs[:upto], other.logprobs[:upto], strict=True):
            worst = max(worst, abs(a - b))
    return Comparison(len(streams), equal, worst, first)


def merge(comparisons: Sequence[Comparison]) -> Comparison:
    """Return one for all of them."""
    firsts = [c.first_difference for c in comparisons if c.first_difference is not None]
    return Comparison(
        sum(c.streams for c in comparisons),
        sum(c.equal for c in comparisons),
        max((c.max_logprob_difference for c in comparisons), default=0.0),
        min(firsts, default=None),
    )


@dataclass
class Ledger:
    """What became of the editors' turns; used by all of their threads."""

    splices: Counter[str] = field(default_factory=Counter)
    """Turns that were spliced, by kind."""
    forgets: int = 0
    not_done: Counter[str] = field(default_factory=Counter)
    """Turns that were not, by kind, status and reason."""
    moved_tokens: int = 0
    scheduler_ms: list[float] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    fresh: list[Fresh] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    conversations: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """Splices so far."""
        return self.splices.total()

    def turn(self, kind: str, outcome: dict[str, Any]) -> bool:
        """Enter a turn; tell whether it did what its kind is about."""
        status, reason = outcome["status"], outcome.get("reason")
        with self._lock:
            if kind == "forget":
                done = status == "reprefill" and outcome.get("purge") is not None
                self.forgets += done
            else:
                done = status == "spliced" and outcome["moved_tokens"] > 0
                if done:
                    self.splices[kind] += 1
                    self.moved_tokens += outcome["moved_tokens"]
                    self.scheduler_ms.append(outcome["scheduler_ms"])
            if not done:
                self.not_done[f"{kind}: {status}, {reason}"] += 1
        return done

    def rows(self, *checks: Moved | Fresh) -> None:
        """Enter rows that were compared."""
        with self._lock:
            for check in checks:
                (self.moved if isinstance(check, Moved) else self.fresh).append(check)  # type: ignore[arg-type]

    def add(self, what: str) -> None:
        """Enter something that went wrong."""
        with self._lock:
            self.errors.append(what[:500])

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a row."""
        return {
            "splices": self.total,
            "splices_by_kind": dict(sorted(self.splices.items())),
            "forgets": self.forgets,
            "not_done": dict(self.not_done),
            "conversations": self.conversations,
            "moved_tokens": self.moved_tokens,
            "scheduler_p50_ms": round(percentile(self.scheduler_ms, 50), 3) if self.scheduler_ms else None,
            "scheduler_p95_ms": round(percentile(self.scheduler_ms, 95), 3) if self.scheduler_ms else None,
            "rows_moved": rows_moved(self.moved),
            "rows_fresh": rows_fresh(self.fresh),
            "errors": self.errors[:10],
        }


def rows_moved(checks: Sequence[Moved]) -> dict[str, Any]:
    """Return what the comparisons with the rows before an edit came to."""
    return {
        "comparisons": len(checks),
        "hold": sum(check.holds for check in checks),
        "rows": sum(check.rows for check in checks),
        "unequal_latents": sum(check.unequal_latents for check in checks),
        "max_k_pe_error": max((check.k_pe_error for check in checks), default=None),
    }


def rows_fresh(checks: Sequence[Fresh]) -> dict[str, Any]:
    """Return what the comparisons with a fresh prefill came to."""
    return {
        "comparisons": len(checks),
        "hold": sum(check.holds for check in checks),
        "rows": sum(check.rows for check in checks),
        "unequal_latents": sum(check.unequal_latents for check in checks),
        "max_latent_error": max((check.latent_error for check in checks), default=None),
        "max_k_pe_error": max((check.k_pe_error for check in checks), default=None),
        "max_k_pe_error_over_bound": max((check.k_pe_error / check.bound for check in checks), default=None),
        "max_k_pe_error_of_one_move": max((check.k_pe_error for check in checks if check.moves == 1), default=None),
        "max_moves": max((check.moves for check in checks), default=None),
    }


def faults(row: dict[str, Any], wanted_splices: int) -> list[str]:
    """Return what of a row does not hold; empty where all does."""
    edits = row["edits"]
    found = {
        "no round with edits": not edits["streams_total"],
        "streams beside edits differ in token ids": edits["streams_equal"] != edits["streams_total"],
        "log probabilities beside edits differ": edits["max_logprob_difference"] > MAX_LOGPROB_DIFFERENCE,
        "decode batches were not the streams alone": {int(size) for size in row["decode_batches"]} != {row["streams"]},
        "fewer splices than asked for": row["splices"] < wanted_splices,
        "turns that were not done": bool(row["not_done"]),
        "moved rows": _fails(row["rows_moved"]),
        "rows of layer 0 against a fresh prefill": _fails(row["rows_fresh"]),
        "slots are lost or held": bool(row["slots_lost"] or row["slots_protected"]),
        "the server does not answer": not row["healthy"],
        "errors in the log": bool(row["log_problems"]),
        "errors of editors": bool(row["errors"]),
    }
    return [what for what, is_wrong in found.items() if is_wrong]


def _fails(rows: dict[str, Any]) -> bool:
    return not rows["comparisons"] or rows["hold"] < rows["comparisons"]
