"""What applying a policy came to: the edits, why each was made, and why other rules made none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from leyline_agent.core.edits import Edit, apply_edits
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy.history import Item
from leyline_agent.policy.schema import Action

State = tuple[Message | None, int]
"""A message and its tokens; None where it is gone."""


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


@dataclass(slots=True, eq=False)
class Batch:
    """What a rule did at one request: enough to tell of each edit when somebody asks.

    An agent sends the edits and asks for no report, and to write it takes longer than to make them.
    """

    rule: str
    action: Action
    mode: Mode
    turn: int
    why: str
    """What the reasons say beside what the messages are."""
    units: Sequence[tuple[Item, list[int]]]
    """Each edit: the item it was about, and the messages that it touched."""
    before: Mapping[int, State]
    """Each touched message as the rule found it."""
    after: Mapping[int, State]
    """And as it left it."""
    collapsed: Sequence[tuple[Item, range, list[State], State]] = ()
    """Each run that was made or enlarged: its newest item, its messages, what went into it, and its stub."""
    _made: tuple[Made, ...] | None = None

    @property
    def made(self) -> tuple[Made, ...]:
        """The report of each edit; the same objects each time."""
        if self._made is None:
            self._made = (
                *(
                    self._tell(item, idxs, [self.before[idx] for idx in idxs], [self.after[idx] for idx in idxs])
                    for item, idxs in _merged(self.units)
                ),
                *(self._tell(item, idxs, taken, [stub]) for item, idxs, taken, stub in self.collapsed),
            )
        return self._made

    def _tell(self, item: Item, idxs: Sequence[int], before: Sequence[State], after: Sequence[State]) -> Made:
        return Made(
            rule=self.rule,
            action=self.action,
            mode=self.mode,
            turn=self.turn,
            message_idxs=tuple(idxs),
            before=tuple(message for message, _ in before if message is not None),
            after=tuple(message for message, _ in after if message is not None),
            tokens_before=sum(tokens for _, tokens in before),
            tokens_after=sum(tokens for _, tokens in after),
            reason=_describe(item, self.turn) + self.why,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and (self is other or self.made == other.made)

    __hash__ = None  # type: ignore[assignment]


def _merged(units: Sequence[tuple[Item, list[int]]]) -> list[tuple[Item, list[int]]]:
    """Join edits that touched the same message, such as the calls of one assistant message."""
    merged: list[tuple[Item, list[int]]] = []
    owner: dict[int, int] = {}
    for item, idxs in units:
        at = next((owner[idx] for idx in idxs if idx in owner), None)
        if at is None:
            at = len(merged)
            merged.append((item, list(idxs)))
        else:
            merged[at] = (merged[at][0], sorted({*merged[at][1], *idxs}))
        owner |= dict.fromkeys(idxs, at)
    return merged


def _describe(item: Item, turn: int) -> str:
    """Say what a message is and how old, for people."""
    nouns = {
        "tool": "tool output",
        "user": "user message",
        "assistant": "assistant message",
        "system": "system message",
    }
    noun = nouns.get(item.role, f"{item.role} message")
    age = turn - item.turn
    of_tool = f" of {item.tool}" if item.role == "tool" else ""
    return f"{noun}{of_tool}, {age} turn{'' if age == 1 else 's'} old"


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
    idle: tuple[Idle, ...]
    """One for each rule that made none at this request."""
    tokens_before: int
    """Of the list as given, tools included."""
    tokens_after: int
    """Of the edited prompt, tools included."""
    counted: str
    """By what the tokens were counted."""
    batches: tuple[Batch, ...] = field(repr=False)
    """What `made` is told from."""
    num_batches_before: int
    """How many of them are of earlier requests."""

    @property
    def made(self) -> tuple[Made, ...]:
        """Every edit that was ever made, in the order in which they were made; written when asked for."""
        return tuple(made for batch in self.batches for made in batch.made)

    @property
    def new(self) -> tuple[Made, ...]:
        """Those of them that were made at this request."""
        return tuple(made for batch in self.batches[self.num_batches_before :] for made in batch.made)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The edited prompt; made when asked for, since most callers want the edits."""
        return tuple(apply_edits(self.original, self.edits))
