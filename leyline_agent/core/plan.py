"""From directives to the runs of cached rows that a splice keeps. Pure arithmetic on positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class SpliceStep(NamedTuple):
    """One directive: what goes, where R stands in the new prompt, and the run right of it up to the next one.

    Numbers, of which the spans are views: a plan of thousands of steps is one object for each.
    """

    directive_idx: int
    start: int
    """Of what goes, in base positions."""
    end: int
    new_start: int
    """Of R, in positions of the new prompt."""
    new_end: int
    kept_tokens: int

    @property
    def removed(self) -> Span:
        """In base positions."""
        return Span(self.start, self.end)

    @property
    def replacement(self) -> Span:
        """In positions of the new prompt; `replacement.end` tokens of it must be cached before the run is moved."""
        return Span(self.new_start, self.new_end)

    @property
    def kept(self) -> KeptRun:
        """The run right of what goes."""
        src, dst = Span(self.end, self.end + self.kept_tokens), Span(self.new_end, self.new_end + self.kept_tokens)
        return KeptRun(src, dst)


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
        if not at <= directive.start <= directive.end <= base_tokens:
            raise PlanError(_misplaced(idx, directive, at, base_tokens), reason=Reason.BAD_DIRECTIVES)
        at = directive.end
        for token_id in directive.replacement_ids:
            if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                raise PlanError(
                    f"{_place(idx, directive)}: token id {token_id} lies outside the vocabulary of {vocab_size}",
                    reason=Reason.TOKEN_OUT_OF_VOCABULARY,
                )


def _misplaced(idx: int, directive: Directive, at: int, base_tokens: int) -> str:
    """Say what is wrong with a directive that is none behind `at` and within the base."""
    place = _place(idx, directive)
    if directive.end < directive.start:
        return f"{place}: end lies before start"
    if directive.start < at:
        return f"{place} starts before {at}, where the one before it ends; send them sorted and disjoint"
    return f"{place} reaches beyond the base's {base_tokens} tokens"


def _place(idx: int, directive: Directive) -> str:
    return f"directive {idx} [{directive.start}, {directive.end})"


def make_plan(directives: Sequence[Directive], *, base_tokens: int) -> SplicePlan:
    """Turn checked directives into steps.

    Raises:
        PlanError: as `check_directives`.
    """
    check_directives(directives, base_tokens=base_tokens)
    steps: list[SpliceStep] = []
    shift = 0
    first_forget: int | None = None
    next_starts = [*(directive.start for directive in directives[1:]), base_tokens]
    for idx, (directive, next_start) in enumerate(zip(directives, next_starts, strict=False)):
        if directive.mode is Mode.FORGET and first_forget is None:
            first_forget = idx
        start, end = directive.start, directive.end
        new_start = start + shift
        new_end = new_start + len(directive.replacement_ids)
        shift = new_end - end
        steps.append(SpliceStep(idx, start, end, new_start, new_end, next_start - end))
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
