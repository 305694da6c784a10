"""Consecutive tool turns become one message, which grows as further turns join it.

Its stub changes each time, and lies near the top of the prompt: what follows moves, or is prefilled again. No other
action edits a message twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy.history import History, Item, Run
from leyline_agent.policy.stub import render_stub
from leyline_agent.policy.work import Work


def collapse_turns(work: Work, template: str, candidates: Sequence[Item]) -> None:
    """Put one stub in the place of each stretch of consecutive turns whose results are all selected."""
    history = work.history
    chosen = {item.number for item in candidates}
    of_turn: dict[int, Item] = {}
    for item in candidates:
        if item.call is not None:
            of_turn.setdefault(item.call.message_idx, item)
    turns: list[tuple[int, int, Run | None]] = []
    for start in sorted(of_turn):
        end = _tool_turn_end(history, start, chosen)
        if end is not None:
            turns.append((start, end, None))
    if not turns:
        return
    pieces = sorted([*turns, *((run.start, run.end, run) for run in work.runs)], key=lambda piece: piece[0])
    stretch: list[tuple[int, int, Run | None]] = []
    for piece in [*pieces, None]:
        if piece is not None and (not stretch or _is_gap(history, stretch[-1][1], piece[0])):
            stretch.append(piece)
            continue
        if any(run is None for _, _, run in stretch) and not work.is_enough():
            _put_run(work, template, stretch, of_turn)
        stretch = [] if piece is None else [piece]


def _put_run(
    work: Work, template: str, stretch: Sequence[tuple[int, int, Run | None]], of_turn: dict[int, Item]
) -> None:
    """Put one stub in the place of new turns and of the runs that they adjoin, into the first of which all go."""
    history = work.history
    start, end = stretch[0][0], stretch[-1][1]
    runs = [run for _, _, run in stretch if run is not None]
    taken = _outside_of_runs(stretch)
    slots = [history.slots[idx] for idx in taken]
    items = [item for slot in slots for item in slot.items if item.raw is not None]
    num_turns = len(stretch) - len(runs) + sum(run.num_turns for run in runs)
    lines = sum(item.lines for item in items if item.role == "tool") + sum(run.lines for run in runs)
    taken_tokens = sum(slot.tokens for slot in slots) + sum(run.taken_tokens for run in runs)
    ref = of_turn[start].ref if start in of_turn else runs[0].ref
    stub = render_stub(
        template, {"turns": str(num_turns), "lines": str(lines), "tokens": str(taken_tokens), "ref": ref}
    )
    num_chars = sum(item.num_chars for item in items) + sum(len(run.stub.text) for run in runs)
    if not work.forgets and len(stub) >= num_chars:
        return
    # A user message: an assistant message would be the model's own words, which it goes on to imitate, a system
    # message is only allowed first in many chat templates, and a tool message needs a call.
    message = Message("user", {"role": "user", "content": stub})
    tokens = history.counter.count_message(message.raw)
    forgets = any(slot.mode is Mode.FORGET for slot in slots) or any(run.mode is Mode.FORGET for run in runs)
    mode = Mode.FORGET if forgets else work.rule.mode
    newest = max(turn for turn, _, run in stretch if run is None)
    before = [(run.stub, run.tokens) for run in runs]
    new_run = Run(start, end, message, tokens, num_turns, lines, taken_tokens, ref, mode, work.rule.name)
    history.put(history, "tokens", history.tokens + tokens - sum(run.tokens for run in runs))
    history.put(history, "num_messages", history.num_messages + 1 - len(runs))
    run = new_run
    if runs:
        run = runs[0]
        for attribute in Run.__slots__:
            history.put(run, attribute, getattr(new_run, attribute))
    for other in runs[1:]:
        for slot in history.slots[other.start : other.end]:
            history.put(slot, "run", run)
    for idx, slot in zip(taken, slots, strict=True):
        work.touch(idx)
        for item in slot.items:
            if item.raw is not None:
                history.write(item, None)
            work.done.add(item.number)
            for call in item.calls:
                if call.gone_by is None:
                    history.put(call, "gone_by", (work.rule.name, "collapse", mode))
        history.put(slot, "run", run)
    work.runs[:] = sorted([*(old for old in work.runs if old not in runs), run], key=lambda run: run.start)
    work.collapsed.append((of_turn[newest], run, taken, before))


def _outside_of_runs(stretch: Sequence[tuple[int, int, Run | None]]) -> list[int]:
    """Return the places of a stretch that belong to no run yet: its new turns, and what was dropped between."""
    places: list[int] = []
    at = stretch[0][0]
    for start, end, run in stretch:
        places += range(at, start if run is not None else end)
        at = end
    return places


def _tool_turn_end(history: History, start: int, chosen: set[int]) -> int | None:
    """Where a turn ends, if it is an assistant message with results that are all chosen and nothing else."""
    item = history.slots[start].items[0]
    calls = [call for call in item.calls if call.gone_by is None]
    if item.raw is None or not calls or any(not call.result_idxs for call in calls):
        return None
    results = {number for call in calls for number in call.result_idxs}
    if not results <= chosen:
        return None
    end = max(history.items[number].message_idx for number in results) + 1
    for slot in history.slots[start + 1 : end]:
        if slot.run is not None or any(left.raw is not None and left.number not in results for left in slot.items):
            return None
    return end


def _is_gap(history: History, start: int, end: int) -> bool:
    """Tell whether nothing is left of `[start, end)`, so that its neighbours are consecutive."""
    return all(slot.current is None and slot.run is None for slot in history.slots[start:end])
