"""A conversation while a policy is replayed over it: what each message was, and what is left of it.

What a policy speaks of are items: a message, or one of several results in a message of Anthropic's form. Items are
made once, from the left, when their message arrives, so nothing that is appended later changes what was found before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy.content import (
    Raw,
    block_type,
    blocks_of,
    calls_of,
    parsed_arguments,
    text_of,
    with_calls_apart,
)
from leyline_agent.policy.counting import TokenCounter
from leyline_agent.policy.schema import Action
from leyline_agent.policy.stub import count_lines
from leyline_agent.policy.turns import Call, Pairing

# What programs print when they fail, at the start of the output; and the exit codes that agents' shells report.
_ERROR_START = re.compile(
    r"\s*(?:<(?:tool_use_)?error>|\[?(?:fatal|\w*error|\w*exception|traceback \(most recent call last\))\b\]?)", re.I
)
# Its first letter, of whichever case, is asked for first: then the search skips to it.
_EXIT_CODE = re.compile(r"[eErR](?i:(?<=e)xit(?:ed with)?(?: status| code)?|(?<=r)eturncode|(?<=e)xit_code)[:= ]+(\d+)")
_one_form = json.JSONEncoder(sort_keys=True, default=str).encode
_TAIL_CHARS = 200
"""An exit code stands at the end of an output; a longer output is not searched for one."""


@dataclass(slots=True, eq=False)
class HistoryCall(Call):
    """A call, and whether it is still there. `result_idxs` are numbers of items."""

    entries: tuple[Any, ...] = ()
    """The parts of the current message that say it."""
    gone_by: tuple[str, Action, Mode] | None = None
    """Rule, action and mode that took it away."""
    key: str | None = None
    """Tool and arguments in one form for equal ones; made when asked for."""


@dataclass(init=False, eq=False)
class Item:
    """What a rule can select.

    Made for every message, so only what differs from the defaults is set; those are the class's.
    """

    number: int
    message_idx: int
    role: str
    turn: int
    """How many turns had begun: its own included."""
    original: Raw
    raw: Raw | None
    """What is left of it; None where it is gone."""
    block_idx: int | None = None
    """Of a result within a message: which part of the content."""
    call: HistoryCall | None = None
    """Of a result: the call that it answers."""
    calls: tuple[HistoryCall, ...] = ()
    """Of an assistant message."""
    ref: str = ""
    tool: str = ""
    tags: tuple[str, ...] = ()
    opening: bool = False
    """A user message that sets the task."""
    ordinal: int | None = None
    """Of a result: how many of its kind came before."""
    results_before_tokens: int = 0
    """Of a result: the tokens of all results before it."""
    shortened: bool = False
    """A rule has replaced or cut its content."""
    reread: bool = False
    """The output of a call that was made again after its output had been edited away, and the newest such."""

    _is_error: bool | None = None

    def __init__(self, number: int, message_idx: int, role: str, turn: int, original: Raw) -> None:
        self.number = number
        self.message_idx = message_idx
        self.role = role
        self.turn = turn
        self.original = self.raw = original

    @property
    def is_error(self) -> bool:
        """Whether it is a result that reports an error."""
        if self._is_error is None:
            self._is_error = self.role == "tool" and _is_error(self.original)
        return self._is_error

    @property
    def num_chars(self) -> int:
        """Characters of the original text, and of the calls' names and arguments."""
        return len(text_of(self.original)) + sum(len(call.name) + len(call.arguments) for call in self.calls)

    @property
    def lines(self) -> int:
        """Lines of the original text."""
        return count_lines(text_of(self.original))


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive turns `[start, end)` that became one stub."""

    start: int
    end: int
    stub: Message
    tokens: int
    """Of the stub."""
    num_turns: int
    lines: int
    taken_tokens: int
    """Of what it stands for."""
    ref: str
    """Of the first result that it took."""
    mode: Mode
    rule: str


@dataclass(slots=True, eq=False)
class Slot:
    """A message of the list."""

    message: Message
    items: list[Item]
    current: Message | None
    """What is left of it; None where it is gone, into a run too."""
    tokens: int
    mode: Mode | None = None
    """Of the strongest edit that touched it."""
    rule: str = ""
    run: Run | None = None


@dataclass(slots=True, eq=False)
class History:
    """All messages so far. Everything that rules change goes through `put`, so that a rule can be taken back."""

    counter: TokenCounter
    slots: list[Slot] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    num_turns: int = 0
    tokens_before: int = 0
    """Of the list as given."""
    tokens: int = 0
    """Of the prompt as edits leave it."""
    num_messages: int = 0
    """In the prompt as edits leave it."""
    num_tool_uses: int = 0
    """Tool outputs in the prompt that no rule has shortened."""
    num_results: dict[str, int] = field(default_factory=lambda: {"tool": 0, "user": 0})
    result_tokens: int = 0
    rereads: bool = False
    """Whether to look for calls that are made again."""
    _pairing: Pairing = field(default_factory=Pairing)
    _has_task: bool = False
    _last_of_key: dict[Hashable, Item] = field(default_factory=dict)
    reversible: bool = False
    """Whether what is put now may be taken back; to remember it costs as much as to do it."""
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)
    _overhead: int | None = None

    def append(self, message: Message) -> Slot:
        """Take the next message; return it with its items."""
        tokens = self.counter.count_message(message.raw)
        slot = Slot(message, [], message, tokens)
        self.slots.append(slot)
        self.num_messages += 1
        self.tokens += tokens
        self.tokens_before += tokens
        if message.role == "assistant":
            self.num_turns += 1
            raw = with_calls_apart(message.raw)
            item = self._item(slot, "assistant", raw)
            item.calls = tuple(
                [
                    HistoryCall(item.message_idx, call.id, call.name, call.arguments, entries=call.entries)
                    for call in calls_of(raw)
                ]
            )
            self._pairing.call(item.calls)
        elif message.role == "user":
            self._append_user(slot)
        elif message.role == "tool":
            self._result(self._item(slot, "tool", message.raw), message.tool_call_id)
        else:
            self._item(slot, message.role, message.raw)
        return slot

    def put(self, target: object, attribute: str, value: object) -> None:
        """Set an attribute so that `take_back` can restore it, where the history is `reversible`."""
        if self.reversible:
            self._undo.append((target, attribute, getattr(target, attribute)))
        setattr(target, attribute, value)

    def keep(self, target: object, *attributes: str) -> None:
        """Remember attributes for `take_back` before they are set; to be called where the history is `reversible`."""
        self._undo += [(target, attribute, getattr(target, attribute)) for attribute in attributes]

    def settle(self, *, reversible: bool = False) -> None:
        """Make what was put since the last time final, and say whether what comes may be taken back."""
        self._undo.clear()
        self.reversible = reversible
        if reversible:
            self.keep(self, "num_tool_uses", "num_messages", "tokens")

    def take_back(self) -> None:
        """Restore everything that was put since `settle`."""
        while self._undo:
            target, attribute, value = self._undo.pop()
            setattr(target, attribute, value)

    def write(self, item: Item, raw: Raw | None, *, shortens: bool = False) -> None:
        """Put something in an item's place, or nothing."""
        slot = self.slots[item.message_idx]
        if self.reversible:
            self.keep(item, "shortened", "raw")
        if item.role == "tool" and not item.shortened and (shortens or raw is None) and item.raw is not None:
            self.num_tool_uses -= 1
        item.shortened = item.shortened or shortens
        item.raw = raw
        self.put_message(slot, self._assembled(slot))

    def put_message(self, slot: Slot, message: Message | None) -> None:
        """Put a message in a slot's place and count it; whoever may take it back has kept how the slot was."""
        tokens = 0 if message is None else self.counter.count_message(message.raw)
        if (message is None) != (slot.current is None):
            self.num_messages += 1 if slot.current is None else -1
        self.tokens += tokens - slot.tokens
        slot.tokens = tokens
        slot.current = message

    def content_tokens(self, raw: Raw) -> int:
        """Count the tokens of a content alone, without what the template puts around it."""
        if self._overhead is None:
            self._overhead = self.counter.count_message({"role": "tool", "content": ""})
        return self.counter.count_message({"role": "tool", "content": raw.get("content")}) - self._overhead

    def item_tokens(self, item: Item) -> int:
        """Count what is left of an item."""
        slot = self.slots[item.message_idx]
        if len(slot.items) == 1 and item.block_idx is None:
            return slot.tokens
        return 0 if item.raw is None else self.content_tokens(item.raw)

    def _append_user(self, slot: Slot) -> None:
        raw = slot.message.raw
        blocks = blocks_of(raw)
        results = [idx for idx, block in enumerate(blocks) if block_type(block) == "tool_result"]
        for block_idx in results:
            item = self._item(slot, "tool", blocks[block_idx])
            item.block_idx = block_idx
            call_id = blocks[block_idx].get("tool_use_id")
            self._result(item, call_id if isinstance(call_id, str) else None)
        if len(results) == len(blocks) and results:
            return
        others = [block for idx, block in enumerate(blocks) if idx not in results]
        item = self._item(slot, "user", {**raw, "content": others} if results else raw)
        if not results and (self.num_turns == 0 or not self._has_task):
            item.opening = self._has_task = True
        elif not results:
            self._count_result(item)

    def _item(self, slot: Slot, role: str, raw: Raw) -> Item:
        item = Item(len(self.items), len(self.slots) - 1, role, self.num_turns, raw)
        whole = slot.message.raw
        given = whole.get("id")
        item.ref = given if isinstance(given, str) and given else f"message {item.message_idx}"
        tags = whole.get("tags")
        if tags and isinstance(tags, (list, tuple, set, frozenset)):
            item.tags = tuple(tag for tag in tags if isinstance(tag, str))
        self.items.append(item)
        slot.items.append(item)
        return item

    def _result(self, item: Item, call_id: str | None) -> None:
        answered = self._pairing.answer(call_id or None, item.number)
        assert answered is None or isinstance(answered, HistoryCall)
        item.call = answered
        item.ref = call_id or item.ref
        name = item.original.get("name")
        item.tool = (answered.name if answered else "") or (name if isinstance(name, str) else "") or "tool"
        self.num_tool_uses += 1
        self._count_result(item)
        if self.rereads and answered is not None:
            key = call_key(answered)
            earlier = self._last_of_key.get(key)
            if earlier is not None:
                item.reread = earlier.reread or earlier.shortened or earlier.raw is None
                earlier.reread = False
            self._last_of_key[key] = item

    def _count_result(self, item: Item) -> None:
        item.ordinal = self.num_results[item.role]
        self.num_results[item.role] += 1
        item.results_before_tokens = self.result_tokens
        self.result_tokens += self.item_tokens(item)

    def _assembled(self, slot: Slot) -> Message | None:
        """Make the message that is left of a slot's items."""
        if len(slot.items) == 1 and slot.items[0].block_idx is None:
            raw = slot.items[0].raw
            return None if raw is None else Message(slot.message.role, raw)
        results = {item.block_idx: item.raw for item in slot.items if item.block_idx is not None}
        body = next((item for item in slot.items if item.block_idx is None), None)
        blocks: list[Any] = []
        for idx, block in enumerate(blocks_of(slot.message.raw)):
            if idx in results:
                blocks += [] if results[idx] is None else [results[idx]]
            elif body is not None and body.raw is body.original:
                blocks.append(block)
        if body is not None and body.raw is not None and body.raw is not body.original:
            content = body.raw.get("content")
            blocks += [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        return Message(slot.message.role, {**slot.message.raw, "content": blocks}) if blocks else None


def call_key(call: HistoryCall, arguments: Sequence[str] = ()) -> Hashable:
    """Return what two calls share that ask for the same: tool and arguments, or tool and the first named argument.

    "" where a call has none of the named arguments.
    """
    if arguments:
        given = parsed_arguments(call.arguments) or {}
        for name in arguments:
            if name in given:
                value = given[name]
                return (call.name, name, value) if isinstance(value, str) else _one_form([call.name, name, value])
        return ""
    if call.key is None:
        parsed = parsed_arguments(call.arguments)
        call.key = _one_form([call.name, call.arguments if parsed is None else parsed])
    return call.key


def _is_error(raw: Raw) -> bool:
    """Tell whether a result reports an error: by its flag, else by what it starts or ends with."""
    flag = raw.get("is_error")
    if isinstance(flag, bool):
        return flag
    status = raw.get("status")
    if status in ("error", "success"):
        return bool(status == "error")
    text = text_of(raw)
    if _ERROR_START.match(text) or "Traceback (most recent call last)" in text:
        return True
    codes = _EXIT_CODE.findall(text[-_TAIL_CHARS:])
    return bool(codes) and int(codes[-1][:9]) != 0
