"""What rules do to a conversation. Each action goes over the candidates, oldest first, and edits what is left of them.

A call and its results are never parted: they go together or not at all, and a call that waits for its result stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from leyline_agent.policy.collapse import collapse_turns
from leyline_agent.policy.content import (
    blocks_of,
    entry_with_arguments,
    entry_with_texts,
    has_other_parts,
    map_texts,
    parsed_arguments,
    text_of,
    with_entries,
    with_text,
    without_entries,
    without_reasoning,
)
from leyline_agent.policy.history import History, HistoryCall, Item
from leyline_agent.policy.patterns import Pattern, compile_pattern
from leyline_agent.policy.schema import ClearArguments, Truncate
from leyline_agent.policy.stub import count_lines, is_stub, parse_stub, render_stub, shorten_args
from leyline_agent.policy.values import Amount
from leyline_agent.policy.work import Work


def carry_out(work: Work, candidates: Sequence[Item]) -> None:
    """Carry out a rule's action."""
    work.start_tokens = work.history.tokens
    rule = work.rule
    if rule.collapse is not None:
        collapse_turns(work, rule.collapse, candidates)
    elif rule.drop is not None:
        _drop(work, candidates)
    else:
        stops = work.state.keep.stop_after_tokens is not None
        for item in candidates:
            if stops and work.is_enough():
                return
            _rewrite(work, item)


def _rewrite(work: Work, item: Item) -> None:
    rule = work.rule
    if rule.replace is not None:
        work.done.add(item.number)
        _replace(work, item, rule.replace)
    elif rule.clear_arguments is not None:
        _clear_arguments(work, item, rule.clear_arguments)
    elif rule.drop_reasoning is not None:
        _drop_reasoning(work, item)
    else:
        work.done.add(item.number)
        if rule.truncate is not None:
            _truncate(work, item, rule.truncate)
        elif rule.redact is not None:
            assert rule.select.matches is not None
            _redact(work, item, compile_pattern(rule.select.matches), rule.redact)


def _replace(work: Work, item: Item, template: str) -> None:
    assert item.raw is not None
    # Nearly always a content is one string: then there are no parts to ask for.
    is_plain = isinstance(item.raw.get("content"), str)
    text: str = item.raw["content"] if is_plain else text_of(item.raw)
    has_others = not is_plain and has_other_parts(item.raw)
    # A short secret goes like a long one: that a stub saves nothing counts only where saving is the point.
    if not has_others and not text:
        return
    values = _StubValues(work.history, item)
    stub = render_stub(template, values)
    if len(stub) >= len(text) and not work.forgets and not has_others:
        return
    for later in work.later_stubs:
        if values.fill(later) and is_stub(later, values, text):
            return
    work.units.append((item, [item.message_idx]))
    work.write(item, {**item.raw, "content": stub} if is_plain else with_text(item.raw, stub), shortens=True)


def _truncate(work: Work, item: Item, truncate: Truncate) -> None:
    assert item.raw is not None
    text = text_of(item.raw)
    cut = _cut(work.history, text, truncate)
    if cut is None:
        return
    others = [part for part in blocks_of(item.raw) if has_other_parts({"content": [part]})]
    raw = with_text(item.raw, cut)
    if others:
        parts = raw["content"] if isinstance(raw["content"], list) else [{"type": "text", "text": cut}]
        raw = {**raw, "content": [*parts, *others]}
    work.units.append((item, [item.message_idx]))
    work.write(item, raw, shortens=True)


def _cut(history: History, text: str, truncate: Truncate) -> str | None:
    """Return head, stub and tail; None where nothing can be saved."""
    head = _end_of(text, truncate.head, from_start=True)
    tail = _end_of(text, truncate.tail, from_start=False)
    if len(head) + len(tail) >= len(text):
        return None
    middle = text[len(head) : len(text) - len(tail)]
    counts = {"lines": "0", "tokens": "0"}
    if is_stub(truncate.stub, counts, middle.strip("\n")):
        # Cut before: a stub of the stub would say that less is missing.
        return None
    counts = {"lines": str(count_lines(middle)), "tokens": str(history.content_tokens({"content": middle}))}
    stub = render_stub(truncate.stub, counts)
    before = "" if not head or head.endswith("\n") else "\n"
    after = "" if not tail else "\n"
    cut = f"{head}{before}{stub}{after}{tail}"
    return cut if len(cut) < len(text) else None


def _end_of(text: str, amount: Amount | None, *, from_start: bool) -> str:
    if amount is None or amount.number == 0:
        return ""
    if amount.unit == "chars":
        return text[: amount.number] if from_start else text[-amount.number :]
    lines = text.splitlines(keepends=True)
    return "".join(lines[: amount.number] if from_start else lines[-amount.number :])


def _clear_arguments(work: Work, item: Item, how: bool | ClearArguments) -> None:
    if item.role == "tool":
        calls = [item.call] if item.call is not None and item.call.gone_by is None else []
    else:
        calls = [call for call in item.calls if call.gone_by is None and work.state.is_about_tool(call.name)]
    if any(not call.result_idxs for call in calls):
        return
    work.done.add(item.number)
    changed: dict[int, Any] = {}
    for call in calls:
        arguments = parsed_arguments(call.arguments)
        cleared = None if arguments is None and how is not True else _cleared(work.history, arguments or {}, how)
        if cleared is None or len(str(cleared)) >= len(call.arguments):
            continue
        entries = tuple(entry_with_arguments(entry, cleared) for entry in call.entries)
        changed |= {id(old): new for old, new in zip(call.entries, entries, strict=True)}
        work.history.put(call, "entries", entries)
    if changed:
        owner = _owner(work.history, calls[0])
        assert owner.raw is not None
        work.units.append((item, [owner.message_idx]))
        work.write(owner, with_entries(owner.raw, changed))


def _cleared(history: History, arguments: dict[str, Any], how: bool | ClearArguments) -> dict[str, Any] | None:
    if not isinstance(how, ClearArguments):
        return {}
    cleared = dict(arguments)
    for name, value in arguments.items():
        text = value if isinstance(value, str) else str(value)
        size = count_lines(text) if how.longer_than.unit == "lines" else len(text)
        if size <= how.longer_than.number or is_stub(how.stub, {"lines": "", "tokens": ""}, text):
            continue
        counts = {"lines": str(count_lines(text)), "tokens": str(history.content_tokens({"content": text}))}
        cleared[name] = render_stub(how.stub, counts)
    return None if cleared == arguments else cleared


def _drop_reasoning(work: Work, item: Item) -> None:
    assert item.raw is not None
    if any(not call.result_idxs for call in item.calls):
        # The model is still at it: some servers refuse the results of a call without the thought that led to it.
        return
    work.done.add(item.number)
    raw = without_reasoning(item.raw)
    if raw is None:
        return
    if raw.get("content") == []:
        raw["content"] = ""
    work.units.append((item, [item.message_idx]))
    work.write(item, raw)


def _redact(work: Work, item: Item, pattern: Pattern, stub: str) -> None:
    assert item.raw is not None

    def change(text: str) -> str:
        spans = pattern.spans(text)
        if not spans:
            return text
        at, parts = 0, []
        for start, end in spans:
            parts += [text[at:start], stub]
            at = end
        return "".join((*parts, text[at:]))

    raw: dict[str, Any] = map_texts(item.raw, change)
    changed: dict[int, Any] = {}
    for call in item.calls:
        if call.gone_by is not None:
            continue
        entries = tuple(entry_with_texts(entry, change) for entry in call.entries)
        if any(new is not old for old, new in zip(call.entries, entries, strict=True)):
            changed |= {id(old): new for old, new in zip(call.entries, entries, strict=True)}
            work.history.put(call, "entries", entries)
            # Else a stub's {args} would say it again.
            work.history.put(call, "arguments", change(call.arguments))
    raw = with_entries(raw, changed) if changed else raw
    if raw == item.raw:
        return
    if raw.get("content") == []:
        # It was one thought, which had to go as it is signed; an API refuses a list of nothing.
        raw["content"] = ""
    work.units.append((item, [item.message_idx]))
    work.write(item, raw)


def _drop(work: Work, candidates: Sequence[Item]) -> None:
    """Drop messages; tool outputs with their calls, assistant messages with the results of theirs."""
    history = work.history
    chosen = {item.number for item in candidates}
    for item in candidates:
        if work.is_enough():
            return
        if item.raw is None:
            continue
        if item.role != "tool":
            _drop_message(work, item)
        elif item.call is None:
            _take_away(work, item, [item], [])
        elif chosen.issuperset(item.call.result_idxs):
            results = [history.items[number] for number in item.call.result_idxs]
            _take_away(work, item, results, [item.call])


def _drop_message(work: Work, item: Item) -> None:
    history, state = work.history, work.state
    calls = [call for call in item.calls if call.gone_by is None]
    results = [history.items[number] for call in calls for number in call.result_idxs]
    if any(not call.result_idxs for call in calls):
        return
    if any(state.too_new(result, history) or state.kept_by(result, history) for result in results):
        return
    _take_away(work, item, [item, *results], calls)


def _take_away(work: Work, item: Item, items: Iterable[Item], calls: Sequence[HistoryCall]) -> None:
    history = work.history
    idxs: list[int] = []
    for gone in items:
        if gone.raw is not None:
            work.write(gone, None)
            idxs.append(gone.message_idx)
        work.done.add(gone.number)
    for call in calls:
        history.put(call, "gone_by", (work.rule.name, "drop", work.rule.mode))
        owner = _owner(history, call)
        if owner.raw is not None:
            work.write(owner, without_entries(owner.raw, call.entries))
            idxs.append(owner.message_idx)
    work.units.append((item, sorted(set(idxs))))


def _owner(history: History, call: HistoryCall) -> Item:
    """Return the assistant message that makes a call."""
    return history.slots[call.message_idx].items[0]


class _StubValues(dict[str, str]):
    """What the placeholders of a stub stand for, each made when a template asks for it."""

    __slots__ = ("_history", "_item")

    def __init__(self, history: History, item: Item) -> None:
        self._history = history
        self._item = item

    def fill(self, template: str) -> bool:
        """Tell whether a template needs nothing but these values; another rule's may be about another role."""
        is_tool = self._item.role == "tool"
        return is_tool or all(name not in ("tool", "args") for _, name in parse_stub(template))

    def __missing__(self, name: str) -> str:
        item = self._item
        if name == "lines":
            value = str(item.lines)
        elif name == "tokens":
            value = str(self._history.content_tokens(item.original))
        elif name == "turns":
            value = str(self._history.num_turns - item.turn)
        elif name == "ref":
            value = item.ref
        elif name == "tool":
            value = item.tool
        else:
            assert name == "args"
            value = shorten_args(item.call.arguments if item.call else "")
        self[name] = value
        return value
