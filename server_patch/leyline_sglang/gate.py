"""The cost gate: whether a splice is the quicker way to answer a turn, by what this server has measured.

In the tokenizer process, which learns what prefill costs from the scheduler's replies and what a splice costs from its
own turns. What is not known yet is spliced, so that it becomes known.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from leyline_sglang.prefill_cost import Cost, saved_by_moving

_REMEMBERED = 16
"""Splices of one size whose median is what one costs."""
_TRIED_AGAIN = 32
"""After so many turns of a size that were held back, one is spliced: what a splice costs may have been measured while
the server was held up, and would never be measured again. What it took then stands alone for its size."""

Size = tuple[bool, int]
"""In one step or not, and the bits of the number of moved tokens."""


@dataclass(slots=True)
class Gate:
    """What prefill and splices cost, as this process knows it."""

    prefill_cost: Cost | None = None
    """As the scheduler said it last."""
    _splices: dict[Size, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_REMEMBERED)))
    """Milliseconds."""
    _held_back: Counter[Size] = field(default_factory=Counter)
    """Turns since the last that was tried."""

    def observe(self, *, moved_tokens: int, one_step: bool, ms: float) -> None:
        """Take note of what a splice took; in one step without the prefill of R, which its request's batch computes."""
        size = one_step, moved_tokens.bit_length()
        if self._held_back[size] > _TRIED_AGAIN:
            self._held_back[size] = 0
            self._splices[size].clear()
        self._splices[size].append(ms)

    def why_not(
        self, *, prompt_tokens: int, kept_tokens: int, moved_tokens: int, replacement_tokens: int, one_step: bool
    ) -> str | None:
        """Return why a turn is better prefilled again; None where a splice is quicker, or where that is not known.

        Args:
            prompt_tokens: all of the request's.
            kept_tokens: those left of the first difference, which are taken to be cached.
            moved_tokens: what a splice would move.
            replacement_tokens: what it would prefill beside that.
            one_step: whether in the batch of the request itself.
        """
        splice_ms = self._splice_ms(moved_tokens, one_step)
        saved_ms = saved_by_moving(
            self.prefill_cost,
            prompt_tokens=prompt_tokens,
            kept_tokens=kept_tokens,
            moved_tokens=moved_tokens,
            prefilled_tokens=0 if one_step else replacement_tokens,
            ms=0.0,
        )
        if splice_ms is None or saved_ms is None or saved_ms > splice_ms:
            return None
        size = one_step, moved_tokens.bit_length()
        self._held_back[size] += 1
        if self._held_back[size] > _TRIED_AGAIN:
            return None
        return (
            f"moving {moved_tokens} tokens would take {splice_ms:.1f} ms and save {saved_ms:.1f} ms of prefill; a note "
            "with gate: off has them moved all the same"
        )

    def _splice_ms(self, moved_tokens: int, one_step: bool) -> float | None:
        """Return what splices by the same path took, of the size nearest to this one."""
        size = moved_tokens.bit_length()
        sizes = [known for path, known in self._splices if path == one_step]
        return median(self._splices[one_step, min(sizes, key=lambda known: abs(known - size))]) if sizes else None
