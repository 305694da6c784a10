"""Time the plan of an edited turn: `python -m evals.micro.plan [--json]`.

From an agent's history and the base's ids to the directives: the policy's edits (`PolicyRun`, going on from the turn
before), the diff of the base's and the prompt's ids, and the kept runs. Rendering is the tokenizer's time and left out.
One row for each case and length; 500 messages are 32,000 tokens. In "mostly kept" nine of ten outputs are still there,
in "all at once" every output but three goes in the turn that is timed. Before a row is timed its directives are applied
and compared with the prompt. `edit_ms` is `PolicyRun.apply` alone, as in `evals.micro.policy`.

`growth` is the plan's time over that at the shortest length, over how many times longer the history is: 1 is linear.
`growth_without_gc` is the same while Python's garbage collector rests. Its full collections go over everything else
that the process holds, here the messages of the benchmark itself; they come with the number of objects that were made,
in this turn and in those before. `growth_in_steps` is the same of `plan_steps`, the bytecode instructions that run:
no cache and no load is in it. What is longer than a core's cache takes more time for each message; `evals.micro.policy`
has a bare comparison of the messages beside it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from evals.micro.policy import agent_history
from evals.micro.steps import count_steps
from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.messages import Message
from leyline_agent.core.plan import apply_directives, make_plan
from leyline_agent.core.protocol import Directive
from leyline_agent.policy import Applied, Policy, PolicyRun, load_policy, parse_policy, request_points

LENGTHS = (500, 1000, 2000, 5000)
CASES = ("keep_last_tool_outputs", "mostly kept", "batched", "token_budget", "superseded_file_views", "all at once")
_GROWTHS = {
    "plan_ms": "growth",
    "plan_ms_without_gc": "growth_without_gc",
    "plan_steps": "growth_in_steps",
}
_ALL_AT_ONCE = """
version: 1
when: {turns: TURNS}
keep: {last: 3}
rules: [{name: r, select: {role: tool}, replace: "[evicted: {tool}, {lines} lines]"}]
"""


def policy_of(case: str, num_turns: int) -> Policy:
    """Return the policy of a case, for a history of so many turns."""
    if case == "mostly kept":
        return load_policy("keep_last_tool_outputs").with_turns(num_turns * 9 // 10)
    if case == "all at once":
        return parse_policy(_ALL_AT_ONCE.replace("TURNS", str(num_turns)))
    return load_policy(case)


class _Ids:
    """Random ids, the same for the same message: for each estimated token one, and four around a message."""

    def __init__(self) -> None:
        self._known: dict[str, array[int]] = {}

    def render(self, messages: Sequence[Message]) -> array[int]:
        """Return the ids of a prompt, in the form in which the server has them."""
        token_ids = array("i")
        for message in messages:
            key = message.digest()
            if key not in self._known:
                rng = random.Random(key)
                size = max(1, len(message.text) // 4 + sum(len(call.arguments) // 4 for call in message.tool_calls))
                # Messages of a role begin and end alike, as chat templates have them.
                role = len(message.role)
                words = (rng.randrange(10, 100_000) for _ in range(size))
                self._known[key] = array("i", [1, role, *words, 2, 3])
            token_ids += self._known[key]
        return token_ids


def measure(case: str, num_messages: int, *, repeats: int) -> dict[str, Any]:
    """Return one row: times with Python's garbage collector, the plan's without, and its steps."""
    row = _measure(case, num_messages, repeats)
    row["plan_steps"] = plan_steps(case, num_messages)
    gc.disable()
    try:
        row["plan_ms_without_gc"] = _measure(case, num_messages, repeats)["plan_ms"]
    finally:
        gc.enable()
    return row


@dataclass
class _Turn:
    """An edited turn: a run that has seen the one before, and the prompt that this left in the cache."""

    run: PolicyRun
    history: list[Message]
    base_ids: array[int]
    ids: _Ids

    def edit(self) -> Applied:
        return self.run.apply(self.history)

    def plan(self, new_ids: array[int]) -> list[Directive]:
        directives = diff_token_ids(self.base_ids, new_ids)
        make_plan(directives, base_tokens=len(self.base_ids))
        return directives


def _turns(case: str, num_messages: int, repeats: int) -> Iterator[_Turn]:
    history = agent_history(num_messages)
    points = request_points(history)
    policy = policy_of(case, len(points) - 1)
    if case == "all at once":
        # Each time the same turn, by a run that has seen the one before.
        pairs, fresh = [(points[-2], points[-1])] * min(repeats, 5), True
    else:
        pairs, fresh = list(itertools.pairwise(points[-repeats - 1 :])), False
    ids, run = _Ids(), PolicyRun(policy)
    for earlier, point in pairs:
        if fresh:
            run = PolicyRun(policy)
        base_ids = ids.render([*run.apply(history[:earlier]).messages, history[earlier]])
        yield _Turn(run, history[:point], base_ids, ids)


def _measure(case: str, num_messages: int, repeats: int) -> dict[str, Any]:
    edit_ms, plan_ms, num_directives, num_edits, prompt_tokens = [], [], [], [], 0
    for turn in _turns(case, num_messages, repeats):
        start = time.perf_counter()
        applied = turn.edit()
        edited = time.perf_counter()
        new_ids = turn.ids.render(applied.messages)
        began = time.perf_counter()
        directives = turn.plan(new_ids)
        planned = time.perf_counter()
        _check(turn.base_ids, new_ids, directives)
        edit_ms.append((edited - start) * 1e3)
        plan_ms.append((edited - start + planned - began) * 1e3)
        num_directives.append(len(directives))
        num_edits.append(len(applied.new))
        prompt_tokens = len(new_ids)
    return {
        "op": "plan_turn",
        "case": case,
        "messages": num_messages,
        "history_tokens": applied.tokens_before,
        "prompt_tokens": prompt_tokens,
        "turns": len(plan_ms),
        "max_new_edits": max(num_edits),
        "max_directives": max(num_directives),
        "edit_ms": _quantiles(edit_ms),
        "plan_ms": _quantiles(plan_ms),
        "python": platform.python_version(),
    }


def plan_steps(case: str, num_messages: int, *, turns: int = 5) -> int:
    """Return how many bytecode instructions the plan of an edited turn takes, the mean of some turns."""
    counts = []
    for turn in _turns(case, num_messages, turns):
        edit_steps, applied = count_steps(turn.edit)
        new_ids = turn.ids.render(applied.messages)
        diff_steps, _ = count_steps(partial(turn.plan, new_ids))
        counts.append(edit_steps + diff_steps)
    return round(statistics.mean(counts))


def _check(base_ids: array[int], new_ids: array[int], directives: list[Directive]) -> None:
    result = array("i", apply_directives(base_ids, directives))
    if result != new_ids[: len(result)]:
        raise AssertionError("the directives do not lead to the prompt, so they are not timed")


def _quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {name: round(value, 3) for name, value in (("p20", cuts[1]), ("p50", cuts[4]), ("p80", cuts[7]))}


def _value(measured: dict[str, float] | int) -> float:
    return measured["p50"] if isinstance(measured, dict) else measured


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each policy and length."""
    parser = argparse.ArgumentParser(prog="python -m evals.micro.plan", description="Time the plan of an edited turn.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--repeats", type=int, default=30, help="turns to time (default: 30)")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.repeats < 2:
        parser.error(f"--repeats: percentiles need 2 turns or more, got {options.repeats}")
    for case in CASES:
        shortest: dict[str, Any] | None = None
        for num_messages in LENGTHS:
            row = measure(case, num_messages, repeats=options.repeats)
            shortest = shortest or row
            times_longer = num_messages / shortest["messages"]
            for name, growth in _GROWTHS.items():
                row[growth] = round(_value(row[name]) / _value(shortest[name]) / times_longer, 3)
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{case:<24} {num_messages:>5} messages {row['history_tokens']:>8,} tokens, sent "
                    f"{row['prompt_tokens']:>8,}  edit p50 {row['edit_ms']['p50']:>6.2f} ms  plan p50 "
                    f"{row['plan_ms']['p50']:>7.2f} ms  growth {row['growth']:.2f} "
                    f"({row['growth_without_gc']:.2f} without gc, {row['growth_in_steps']:.2f} in steps)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
