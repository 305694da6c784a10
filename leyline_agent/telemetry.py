"""Counters of a conversation, a turn's attributes, the one warning a reason, and what `strict` raises.

Warnings go to `logging`, not to `warnings`: a fall-back is the state of a server at run time, which no change of the
calling line mends, and `python -W error` must not turn an answer that was received into an exception.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leyline_agent.core.protocol import Outcome, Reason, Status
from leyline_agent.errors import SpliceRejectedError, UnsupportedServerError

logger = logging.getLogger("leyline_agent")

Attribute = str | int | float
"""What LangSmith and OpenTelemetry take as a value."""

ByTemplate = Literal["all", "answer", "none"]
"""Which differences between a prompt and its base the chat template alone can be behind: all of them, where the history
is as it was; those within the base's answer, where something else was changed, but not the answer; or none for sure."""

_FALLBACKS = (Status.REFUSED, Status.PARTIAL)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, as the response counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None where the server does not say; SGLang says it with `--enable-cache-report`."""

    @classmethod
    def from_openai(cls, usage: Mapping[str, Any] | None) -> Usage | None:
        """Read a chat response's `usage`; None where there is none."""
        if not usage or usage.get("prompt_tokens") is None:
            return None
        details = usage.get("prompt_tokens_details") or {}
        return cls(usage["prompt_tokens"], usage.get("completion_tokens") or 0, details.get("cached_tokens"))


@dataclass(slots=True)
class Telemetry:
    """Running counts of one conversation. Read them at any time; only `record` writes."""

    turns: int = 0
    """Answered requests."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """As the responses count them, what splices prefilled included; `hit_rate` and `recomputed_tokens` subtract it."""
    kept_tokens: int = 0
    moved_tokens: int = 0
    prefilled_tokens: int = 0
    """Prefilled by splices."""
    splices: int = 0
    """Turns in which at least one directive was carried out."""
    saved_ms: float = 0.0
    """What the splices saved, as far as the server knew (`Outcome.saved_ms`)."""
    template_changes: int = 0
    """Turns in which the server found its cached tokens rendered otherwise, with tokens worth keeping right of that,
    and no edit is behind it: the JSON of a call, reasoning that is left out. Where something else changes in the same
    turn, only differences within the last answer are told apart from it."""
    template_moved_tokens: int = 0
    """Of `moved_tokens`, those right of such a difference, which without a splice would have been prefilled."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Turns that were re-prefilled, wholly or in part, although the note did not ask for it, by reason."""
    _later_prompt_tokens: int = 0
    _later_hit_tokens: int = 0

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were prefilled, by a splice or by the request itself."""
        return self.prompt_tokens - self.cached_tokens + self.prefilled_tokens

    @property
    def hit_rate(self) -> float | None:
        """Cached over prompt tokens from the second turn on, less what splices prefilled; None before it."""
        return self._later_hit_tokens / self._later_prompt_tokens if self._later_prompt_tokens else None

    def record(
        self, usage: Usage | None, outcome: Outcome | None, *, expects_outcome: bool, by_template: ByTemplate = "none"
    ) -> str | None:
        """Count one answered turn; return the reason if it is the first fall-back for that reason.

        Args:
            usage: what the response counted.
            outcome: what the server did with the note.
            expects_outcome: the request had a note, and its response would show the outcome if there was one.
            by_template: which differences from the turn before the chat template is behind.
        """
        prefilled_tokens = 0
        reason: str | None = None
        if outcome is not None:
            prefilled_tokens = outcome.prefilled_tokens
            self.kept_tokens += outcome.kept_tokens
            self.moved_tokens += outcome.moved_tokens
            self.prefilled_tokens += prefilled_tokens
            self.saved_ms += outcome.saved_ms or 0.0
            changes, moved_tokens = _template_counts(outcome, by_template)
            self.template_changes += changes > 0
            self.template_moved_tokens += moved_tokens
            self.splices += outcome.status in (Status.SPLICED, Status.PARTIAL)
            if outcome.status in _FALLBACKS:
                reason = outcome.reason or Reason.INTERNAL_ERROR
        elif expects_outcome:
            reason = Reason.UNSUPPORTED_SERVER
        if usage is not None:
            cached_tokens = usage.cached_tokens or 0
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += cached_tokens
            if self.turns:
                self._later_prompt_tokens += usage.prompt_tokens
                self._later_hit_tokens += cached_tokens - prefilled_tokens
        self.turns += 1
        if reason is None:
            return None
        self.fallbacks[str(reason)] += 1
        return str(reason) if self.fallbacks[str(reason)] == 1 else None


def _template_counts(outcome: Outcome, by_template: ByTemplate) -> tuple[int, int]:
    """Return how many directives the template is behind, and how many tokens were moved because of them."""
    if by_template == "all":
        return outcome.num_directives, outcome.moved_tokens
    return (outcome.answer_directives, outcome.answer_moved_tokens) if by_template == "answer" else (0, 0)


def turn_attributes(
    outcome: Outcome | None, usage: Usage | None = None, *, conversation_id: str | None = None
) -> dict[str, Attribute]:
    """Return what became of one turn as flat attributes: for a LangSmith run's metadata, a span, a log record.

    What is not known is left out. No text and no ids of conversations are among them.

    Args:
        outcome: what the server did with the note; None where it did not say.
        usage: the tokens that the response counted.
        conversation_id: hashed, as the server's log has it.
    """
    attributes: dict[str, Attribute] = {}
    if conversation_id is not None:
        attributes["leyline.conversation_hash"] = hashlib.sha256(conversation_id.encode()).hexdigest()[:32]
    prefilled_tokens = 0
    if outcome is not None:
        prefilled_tokens = outcome.prefilled_tokens
        attributes |= {
            "leyline.status": str(outcome.status),
            "leyline.directives": outcome.num_directives,
            "leyline.kept_tokens": outcome.kept_tokens,
            "leyline.moved_tokens": outcome.moved_tokens,
            "leyline.prefilled_tokens": prefilled_tokens,
            "leyline.ms": outcome.ms,
            "leyline.scheduler_ms": outcome.scheduler_ms,
        }
        if outcome.saved_ms is not None:
            attributes["leyline.saved_ms"] = outcome.saved_ms
        if outcome.reason is not None:
            attributes["leyline.reason"] = str(outcome.reason)
        if outcome.purge is not None:
            attributes["leyline.dropped_tokens"] = outcome.purge.dropped_tokens
    if usage is not None:
        attributes["leyline.prompt_tokens"] = usage.prompt_tokens
        if usage.cached_tokens is not None:
            attributes["leyline.cached_tokens"] = usage.cached_tokens
            attributes["leyline.recomputed_tokens"] = usage.prompt_tokens - usage.cached_tokens + prefilled_tokens
    return attributes


def warn_fallback(reason: str, outcome: Outcome | None) -> None:
    """Log a fall-back. Call it once a conversation and reason."""
    if outcome is None:
        logger.warning(
            "the server answered without an outcome, so it runs no Leyline plugin: edited prompts are right but "
            "prefilled again; install the plugin beside SGLang (docs/install.md), or use the policy 'none'"
        )
    else:
        logger.warning(
            "an edited prompt was prefilled again (%s: %s); the answer is right, it only took longer. Further ones "
            "are counted in Conversation.telemetry.fallbacks",
            reason,
            outcome.message or "the server gave no more detail",
        )


def raise_fallback(outcome: Outcome | None) -> None:
    """Raise if a note was not wholly carried out. The answer stays in `Conversation.last_answer`.

    Raises:
        UnsupportedServerError: there is no outcome.
        SpliceRejectedError: the server refused the splice or a part of it.
    """
    if outcome is None:
        raise UnsupportedServerError(
            "got an answer without an outcome, expected one, since strict=True: the server runs no Leyline plugin. "
            "The answer is in Conversation.last_answer"
        )
    if outcome.status in _FALLBACKS:
        reason = str(outcome.reason or Reason.INTERNAL_ERROR)
        raise SpliceRejectedError(
            f"the splice was {outcome.status} ({reason}: {outcome.message or 'no more detail'}) and strict=True. "
            "The prompt was answered all the same; the answer is in Conversation.last_answer",
            reason=reason,
        )
