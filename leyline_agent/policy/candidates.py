"""Which items a rule may edit now: what it selects, less what it leaves alone.

What never changes about an item is asked once, when it arrives. The rest is asked from the oldest item on, and mostly
only until the first that is too new, so a turn costs what is new, not the length of the conversation.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from leyline_agent.core.messages import Message
from leyline_agent.errors import PolicyError
from leyline_agent.policy.conditions import Keep, When
from leyline_agent.policy.content import text_of
from leyline_agent.policy.history import History, Item, call_key
from leyline_agent.policy.patterns import Pattern, compile_pattern
from leyline_agent.policy.prose import describe_selection
from leyline_agent.policy.schema import Action, Detector, Policy, Rule
from leyline_agent.policy.selecting import IndexRange, Superseded


@dataclass(slots=True, eq=False)
class RuleState:
    """A rule while it is replayed over a conversation."""

    idx: int
    rule: Rule
    when: When | None
    keep: Keep
    detector: Detector | None
    pattern: Pattern | None
    index: IndexRange | None
    action: Action
    min_age: int
    pending: list[Item] = field(default_factory=list)
    """What it may come to edit, in order; what it has edited is in it no more."""
    unanswered: dict[Hashable, list[Item]] = field(default_factory=dict)
    """For `superseded`: outputs by what their calls asked for, none of them superseded yet."""
    what: str = field(init=False)
    """What it selects, in words."""
    roles: Sequence[str] = field(init=False)
    only_role: bool = field(init=False)
    """Whether of a new item nothing but its role matters."""
    keeps: bool = field(init=False)
    """Whether it leaves anything alone."""
    always_fits: bool = field(init=False)
    """Whether what is left of an item does not matter."""
    one_line: bool = field(init=False)
    """Whether what is too new, or kept as new, is so to the end of `pending`: of several roles it is not one line."""

    def __post_init__(self) -> None:
        select, keep = self.rule.select, self.keep
        self.what = describe_selection(select)
        self.roles = select.role
        conditions = (select.is_error, select.tool, select.exclude_tool, select.id, select.tag, select.index)
        self.only_role = (
            all(condition is None for condition in (*conditions, keep.first, keep.tagged)) and not keep.errors
        )
        only_when = {"min_reclaim_tokens", "stop_after_tokens"}
        self.keeps = keep.model_copy(update=dict.fromkeys(only_when)) != Keep()
        self.always_fits = self.index is None and select.larger_than is None and self.pattern is None
        self.one_line = len(select.role) == 1 and select.superseded is None

    @classmethod
    def of(cls, policy: Policy, idx: int) -> RuleState:
        """Make the state of a policy's rule.

        Raises:
            PolicyError: it selects by a function that is not allowed.
        """
        rule = policy.rules[idx]
        select = rule.select
        index = select.index
        if isinstance(index, int):
            index = IndexRange.model_construct(from_=index, to=index)
        # A rule that redacts looks for its pattern everywhere, as it goes over the message.
        pattern = compile_pattern(select.matches) if select.matches and rule.redact is None else None
        return cls(
            idx,
            rule,
            policy.when_of(rule),
            policy.keep_of(rule),
            policy.detector(rule),
            pattern,
            index,
            rule.action,
            select.min_age,
        )

    def arrive(self, item: Item) -> None:
        """Take a new item, if the rule can ever be about it."""
        superseded = self.rule.select.superseded
        if superseded is not None and item.role == "tool" and item.call is not None:
            key = call_key(item.call, superseded.argument if isinstance(superseded, Superseded) else ())
            if key:
                if not item.is_error:
                    for earlier in self.unanswered.pop(key, ()):
                        if self._is_about(earlier):
                            insort(self.pending, earlier, key=lambda other: other.number)
                self.unanswered.setdefault(key, []).append(item)
        elif superseded is None and self._is_about(item):
            self.pending.append(item)

    def kept_by(self, item: Item, history: History) -> str:
        """Say what keeps an item from this rule; "" where nothing does."""
        keep = self.keep
        if item.ordinal is not None:
            num_results = history.num_results[item.role]
            if keep.last is not None and item.ordinal >= num_results - keep.last:
                return f"the last {_counted(keep.last, 'result')}"
            if keep.first is not None and item.ordinal < keep.first:
                return f"the first {_counted(keep.first, 'result')}"
            newer_tokens = history.result_tokens - item.results_before_tokens
            if keep.last_tokens is not None and newer_tokens <= keep.last_tokens:
                return f"the last {keep.last_tokens:,} tokens of results"
        if keep.last_turns is not None and history.num_turns - item.turn < keep.last_turns:
            return f"the last {_counted(keep.last_turns, 'turn')}"
        if keep.errors and item.is_error:
            return "errors"
        if keep.tagged is not None and _any_glob(keep.tagged, item.tags):
            return "what is tagged"
        if keep.rereads and item.reread:
            return "what was asked for again"
        return ""

    def too_new(self, item: Item, history: History) -> bool:
        """Tell whether an item is younger than the rule's age."""
        return history.num_turns - item.turn < self.min_age

    def candidates(self, history: History) -> tuple[list[Item], str]:
        """Return what to edit now, oldest first, and what kept the first item that was kept.

        Items that can never come into question again are taken out of `pending`.
        """
        wanted = None if self.detector is None else self._detected(history)
        if not self.pending:
            return [], ""
        found: list[Item] = []
        done: set[int] = set()
        kept = ""
        newest_turn = history.num_turns - self.min_age
        ends = self.index is not None and self.index.to < 0
        for item in self.pending:
            if item.raw is None:
                done.add(item.number)
                continue
            if item.turn > newest_turn or (ends and self._beyond_index(item, history)):
                if self.one_line:
                    break
                continue
            keeper = self.kept_by(item, history) if self.keeps else ""
            if keeper:
                kept = kept or keeper
                if self.one_line and keeper.startswith("the last"):
                    break
                continue
            if wanted is not None and item.message_idx not in wanted:
                continue
            if self.always_fits or self._fits(item, history):
                found.append(item)
            else:
                done.add(item.number)
        self.dismiss(done)
        return found, kept

    def dismiss(self, numbers: set[int]) -> None:
        """Take items out of `pending` for good."""
        if numbers:
            self.pending = [item for item in self.pending if item.number not in numbers]

    def _is_about(self, item: Item) -> bool:
        """Ask what can be known when an item arrives."""
        select = self.rule.select
        if item.role not in self.roles or (item.opening and not select.opening):
            return False
        if self.only_role:
            return True
        if select.is_error and not item.is_error:
            return False
        if select.tool is not None or select.exclude_tool is not None:
            tools = (item.tool,) if item.role == "tool" else tuple(call.name for call in item.calls)
            if not any(self.is_about_tool(tool) for tool in tools):
                return False
        if select.id is not None and not _any_glob(select.id, (item.ref,)):
            return False
        if select.tag is not None and not _any_glob(select.tag, item.tags):
            return False
        if self.index is not None and not _within(self.index, item.message_idx):
            return False
        keep = self.keep
        if (keep.errors and item.is_error) or (keep.tagged is not None and _any_glob(keep.tagged, item.tags)):
            return False
        return keep.first is None or item.ordinal is None or item.ordinal >= keep.first

    def is_about_tool(self, tool: str) -> bool:
        """Tell whether the rule selects calls of a tool."""
        select = self.rule.select
        if select.exclude_tool is not None and _any_glob(select.exclude_tool, (tool,)):
            return False
        return select.tool is None or _any_glob(select.tool, (tool,))

    def _beyond_index(self, item: Item, history: History) -> bool:
        """Tell whether an item lies after the last selected place, counted from the end of the list as it is now."""
        return self.index is not None and item.message_idx > len(history.slots) + self.index.to

    def _fits(self, item: Item, history: History) -> bool:
        """Ask what depends on what is left of an item, once it is old enough; an answer of no is final."""
        select = self.rule.select
        assert item.raw is not None
        if self.index is not None and self.index.from_ < 0 and item.message_idx < len(history.slots) + self.index.from_:
            return False
        if select.larger_than is not None and history.item_tokens(item) <= select.larger_than.tokens:
            return False
        return self.pattern is None or self.pattern.search(text_of(item.raw))

    def _detected(self, history: History) -> set[int]:
        assert self.detector is not None
        messages: Sequence[Message] = [slot.message for slot in history.slots]
        returned = self.detector(messages)
        # A function that forgets to return anything returns None.
        wanted = list(returned) if isinstance(returned, Iterable) else [returned]
        wrong = [idx for idx in wanted if type(idx) is not int or not 0 <= idx < len(messages)]
        if wrong or not isinstance(returned, Iterable):
            got = (wrong or wanted)[0]
            raise PolicyError(
                f"rule {self.rule.name!r}: {self.rule.select.python} returned {got!r}, expected indices of the "
                f"{len(messages)} messages that it was given"
            )
        return set(wanted)


def _within(index: IndexRange, message_idx: int) -> bool:
    """Ask of a range what does not depend on how long the list is."""
    return not (0 <= index.to < message_idx or (index.from_ >= 0 and message_idx < index.from_))


def _any_glob(globs: Sequence[str], names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


def _counted(number: int, noun: str) -> str:
    return noun if number == 1 else f"{number} {noun}s"
