"""One rule at one turn: what it goes over, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy.candidates import RuleState
from leyline_agent.policy.history import History, Item, Run
from leyline_agent.policy.schema import Rule


@dataclass(slots=True)
class Work:
    """One rule at one turn: what it goes over, and what came of it."""

    state: RuleState
    history: History
    later_stubs: Sequence[str]
    """Stub templates of this rule and the ones after it: their text is left alone."""
    rule: Rule
    runs: list[Run]
    """Of this rule, sorted: what it has collapsed so far."""
    units: list[tuple[Item, list[int]]] = field(default_factory=list)
    """Each edit: the item it was about, and the messages that it touched."""
    before: dict[int, tuple[Message | None, int]] = field(default_factory=dict)
    """Each touched message and its tokens as they were."""
    collapsed: list[tuple[Item, Run, list[int], list[tuple[Message, int]]]] = field(default_factory=list)
    """Each edit that made or enlarged a run: its newest item, the messages that it took, and the stubs that stood there
    before, with their tokens."""
    done: set[int] = field(default_factory=set)
    """Numbers of the items that the rule is through with."""
    start_tokens: int = 0

    @property
    def forgets(self) -> bool:
        """Whether nothing of what it edits may survive."""
        return self.rule.mode is Mode.FORGET

    @property
    def reclaimed_tokens(self) -> int:
        """How much smaller the prompt has become."""
        return self.start_tokens - self.history.tokens

    def is_enough(self) -> bool:
        """Tell whether the rule stops here."""
        stop = self.state.keep.stop_after_tokens
        return stop is not None and self.reclaimed_tokens >= stop

    def touch(self, message_idx: int) -> None:
        """Note how a message was, and that this rule edits it."""
        history, rule = self.history, self.rule
        slot = history.slots[message_idx]
        if message_idx not in self.before:
            self.before[message_idx] = (slot.current, slot.tokens)
            if history.reversible:
                history.keep(slot, "mode", "rule", "tokens", "current")
        if slot.mode is not Mode.FORGET:
            slot.mode = rule.mode
        slot.rule = rule.name

    def write(self, item: Item, raw: Any, *, shortens: bool = False) -> None:
        """Put something in an item's place."""
        self.touch(item.message_idx)
        self.history.write(item, raw, shortens=shortens)
