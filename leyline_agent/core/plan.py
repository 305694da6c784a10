"""From directives to the runs of cached rows that a splice keeps. Pure arithmetic on positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_agent.core.protocol import Directive, Mode, Reason
from leyline_agent.core.spans import Span
from leyline_agent.errors import PlanError


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run of cached tokens that keeps its KV: `src` in the base, `dst` in the new prompt."""

    src: Span
    dst: Span

    @property
    def position_delta(self) -> int:
        """New minus old position."""
        return self.dst.start - self.src.start


@dataclass(frozen=True, slots=True)
class SpliceStep:
    """One directive: what goes, where R stands in the new prompt, and the run right of it up to the next one."""

    directive_idx: int
    removed: Span
    """In base positions."""
    replacement: Span
    """In positions of the new prompt; `replacement.end` tokens of it must be cached before the run is moved."""
    kept: KeptRun


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """All directives of a turn, left to right.

    Invariants: `prefix_tokens`, the replacements and the kept runs tile `[0, new_tokens)` without gap or overlap,
    and every kept run has equal lengths on both sides.
    """

    prefix_tokens: int
    """Tokens left of the first directive, the same in base and new prompt."""
    steps: tuple[SpliceStep, ...]
    new_tokens: int
    """Length of the base after all directives."""
    first_forget: int | None
    """Index of the first step whose directive forgets; from it on nothing may be spliced."""


def check_directives(directives: Sequence[Directive], *, base_tokens: int, vocab_size: int | None = None) -> None:
    """Check that directives are sorted, disjoint, inside the base and inside the vocabulary.

    Raises:
        PlanError: with reason `bad_directives` or `token_out_of_vocabulary`.
    """
    at = 0
    for idx, directive in enumerate(directives):
        place = f"directive {idx} [{directive.start}, {directive.end})"
        if directive.end < directive.start:
            raise PlanError(f"{place}: end lies before start", reason=Reason.BAD_DIRECTIVES)
        if directive.start < at:
            raise PlanError(
                f"{place} starts before {at}, where the one before it ends; send them sorted and disjoint",
                reason=Reason.BAD_DIRECTIVES,
            )
        if directive.end > base_tokens:
            raise PlanError(f"{place} reaches beyond the base's {base_tokens} tokens", reason=Reason.BAD_DIRECTIVES)
        at = directive.end
        for token_id in directive.replacement_ids:
            if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                raise PlanError(
                    f"{place}: token id {token_id} lies outside the vocabulary of {vocab_size}",
                    reason=Reason.TOKEN_OUT_OF_VOCABULARY,
                )


def make_plan(directives: Sequence[Directive], *, base_tokens: int) -> SplicePlan:
    """Turn checked directives into steps.

    Raises:
        PlanError: as `check_directives`.
    """
    check_directives(directives, base_tokens=base_tokens)
    steps: list[SpliceStep] = []
    shift = 0
    first_forget: int | None = None
    for idx, directive in enumerate(directives):
        if directive.mode is Mode.FORGET and first_forget is None:
            first_forget = idx
        next_start = directives[idx + 1].start if idx + 1 < len(directives) else base_tokens
        new_start = directive.start + shift
        replacement = Span(new_start, new_start + len(directive.replacement_ids))
        shift += directive.position_delta
        src = Span(directive.end, next_start)
        kept = KeptRun(src=src, dst=src.shifted(shift))
        steps.append(SpliceStep(idx, Span(directive.start, directive.end), replacement, kept))
    prefix_tokens = directives[0].start if directives else base_tokens
    return SplicePlan(prefix_tokens, tuple(steps), base_tokens + shift, first_forget)


def apply_directives(base_ids: Sequence[int], directives: Sequence[Directive]) -> list[int]:
    """Return the base with every directive applied.

    Raises:
        PlanError: as `check_directives`.
    """
    check_directives(directives, base_tokens=len(base_ids))
    new_ids: list[int] = []
    at = 0
    for directive in directives:
        new_ids.extend(base_ids[at : directive.start])
        new_ids.extend(directive.replacement_ids)
        at = directive.end
    new_ids.extend(base_ids[at:])
    return new_ids
