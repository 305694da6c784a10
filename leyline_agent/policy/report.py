"""What applying a policy came to: the edits, why each was made, and why other rules made none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leyline_agent.core.edits import Edit, apply_edits
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy.schema import Action


@dataclass(frozen=True, slots=True)
class Made:
    """One edit that a rule made, at the turn at which it made it."""

    rule: str
    action: Action
    mode: Mode
    turn: int
    """How many turns there were."""
    message_idxs: tuple[int, ...]
    """Of the list as given; of a drop also the message of the call, where it lost one."""
    before: tuple[Message, ...]
    """Those messages as the rule found them; earlier rules may have edited them."""
    after: tuple[Message, ...]
    """What it left of them; fewer, or none, where messages went."""
    tokens_before: int
    tokens_after: int
    reason: str
    """For people: what it was about the message, and what fired the rule."""


WhyIdle = Literal["trigger", "nothing_selected", "kept", "below_min_reclaim", "no_gain"]


@dataclass(frozen=True, slots=True)
class Idle:
    """A rule that made no edit at a request, and why not."""

    rule: str
    why: WhyIdle
    detail: str
    """For people."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A policy applied to a message list: what stands in the prompt, and how it came about."""

    turn: int
    """Turns in the list as given; an assistant message begins one."""
    original: tuple[Message, ...]
    """The list as given."""
    edits: tuple[Edit, ...]
    """All of them, sorted and disjoint, for `apply_edits`."""
    made: tuple[Made, ...]
    """Every edit that was ever made, in the order in which they were made."""
    new: tuple[Made, ...]
    """Those of them that were made at this request."""
    idle: tuple[Idle, ...]
    """One for each rule that made none at this request."""
    tokens_before: int
    """Of the list as given, tools included."""
    tokens_after: int
    """Of the edited prompt, tools included."""
    counted: str
    """By what the tokens were counted."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The edited prompt; made when asked for, since most callers want the edits."""
        return tuple(apply_edits(self.original, self.edits))
