"""Time the policy engine: `python -m evals.micro.policy [--json]`.

One row for each policy and length. `edit_ms` is `PolicyRun.apply` for an agent that goes on from its last turn: to see
that it does, to count what is new, to ask each rule, and to make the edits. `replay_ms` is the same from scratch, as
after a restart: every request of the history is gone through. `prepare_ms` is all that a client does of such a turn,
`Conversation.prepare` and the body to send: new messages copied and digested, edits, note. `count_ms` is counting one
new turn. Before a row is timed both ways are compared, so that no wrong edit has a time. A turn that edits hundreds of
messages at once is a case of `evals.micro.plan`.

`compare_ms` is the baseline: nothing but to compare the messages with those of the turn before, the least that shows
that a conversation went on. They are other objects each time; 5,000 are more than a core's cache holds, so each takes
longer to reach. `growth` is the time over that at the shortest length, over how many times longer the history is: 1 is
linear; `compare_growth` is the baseline's. (A `Conversation` compares them itself, in `prepare_ms`, and gives the
engine those that it knows.)
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from typing import Any

from leyline_agent import Conversation
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.policy import EstimatedTokens, PolicyRun, apply_policy, load_policy, request_points

LENGTHS = (500, 1000, 5000)
POLICIES = ("keep_last_tool_outputs", "batched", "token_budget", "superseded_file_views", "collapse_repeats", "secrets")
TOKENS_A_MESSAGE = 64
"""500 messages are 32,000 tokens."""


def agent_history(num_messages: int, seed: int = 1) -> list[Message]:
    """Invent an agent that reads files, again and again, with an output of about 110 tokens a call."""
    rng = random.Random(seed)
    words = [f"w{number:03d}" for number in range(400)]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You repair programs. " * 10},
        {"role": "user", "content": "Find out why the tests fail. " * 10},
    ]
    counter = EstimatedTokens()
    while len(messages) < num_messages:
        turn = len(messages) // 2
        path = f"src/module_{rng.randrange(20)}.py"
        call = {"name": "read_file", "arguments": json.dumps({"path": path})}
        messages.append(
            {
                "role": "assistant",
                "content": " ".join(rng.choices(words, k=6)),
                "tool_calls": [{"id": f"call{turn}", "type": "function", "function": call}],
            }
        )
        lines = [" ".join(rng.choices(words, k=7)) for _ in range(9)]
        output = {"role": "tool", "tool_call_id": f"call{turn}", "content": "\n".join(lines)}
        spare = 2 * TOKENS_A_MESSAGE - counter.count_message(messages[-1]) - counter.count_message(output)
        output["content"] += "\n" + "#" * max(0, 4 * spare - 1)
        messages.append(output)
    return messages_from_openai(messages[:num_messages])


def measure(policy_name: str, num_messages: int, *, repeats: int) -> dict[str, Any]:
    """Return one row."""
    policy = load_policy(policy_name)
    history = agent_history(num_messages)
    points = request_points(history)[-repeats - 1 :]
    run = PolicyRun(policy)
    run.apply(history[: points[0]])
    edit_ms, compare_ms, prepare_ms = [], [], []
    conversation = Conversation(policy)
    conversation.prepare({"messages": [message.to_openai() for message in history[: points[0]]]})
    seen = [message.raw for message in _anew(history[: points[0]])]
    for point in points[1:]:
        # A client makes its messages anew for each request.
        prefix = _anew(history[:point])
        start = time.perf_counter()
        given = [message.raw for message in prefix]
        goes_on = given[: len(seen)] == seen
        compare_ms.append((time.perf_counter() - start) * 1e3)
        assert goes_on
        seen = given
        prefix = _anew(history[:point])
        start = time.perf_counter()
        applied = run.apply(prefix)
        edit_ms.append((time.perf_counter() - start) * 1e3)
        body = {"messages": [message.to_openai() for message in prefix]}
        start = time.perf_counter()
        conversation.prepare(body).openai_arguments()
        prepare_ms.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()
    replayed = apply_policy(policy, history[: points[-1]])
    replay_ms = (time.perf_counter() - start) * 1e3
    if replayed != applied:
        raise AssertionError(f"{policy_name}: going on and starting anew give different edits")
    counter = EstimatedTokens()
    count_ms = []
    for first, second in zip(history[-2 * repeats :: 2], history[1 - 2 * repeats :: 2], strict=False):
        start = time.perf_counter()
        counter.count_message(first.raw)
        counter.count_message(second.raw)
        count_ms.append((time.perf_counter() - start) * 1e3)
    return {
        "op": "policy_edits",
        "policy": policy_name,
        "messages": num_messages,
        "tokens": applied.tokens_before,
        "edits": len(applied.edits),
        "edit_ms": _quantiles(edit_ms),
        "compare_ms": _quantiles(compare_ms),
        "prepare_ms": _quantiles(prepare_ms),
        "replay_ms": round(replay_ms, 1),
        "count_ms": round(statistics.median(count_ms), 4),
        "python": platform.python_version(),
    }


def _anew(messages: list[Message]) -> list[Message]:
    return messages_from_openai([message.to_openai() for message in messages])


def _quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10)
    named = {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7], "max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def main() -> None:
    """Print a row for each policy and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--repeats", type=int, default=40, help="turns to time (default: 40)")
    args = parser.parse_args()
    for policy_name in POLICIES:
        shortest: dict[str, Any] | None = None
        for num_messages in LENGTHS:
            row = measure(policy_name, num_messages, repeats=args.repeats)
            shortest = shortest or row
            for name, growth in (("edit_ms", "growth"), ("compare_ms", "compare_growth")):
                times_longer = num_messages / shortest["messages"]
                row[growth] = round(row[name]["p50"] / shortest[name]["p50"] / times_longer, 3)
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                edit, compare, prepare = (row[name]["p50"] for name in ("edit_ms", "compare_ms", "prepare_ms"))
                print(
                    f"{policy_name:<26} {num_messages:>5} messages {row['tokens']:>7,} tokens  edit p50 {edit:.2f} ms "
                    f"(comparison {compare:.2f})  growth {row['growth']:.2f} ({row['compare_growth']:.2f})  "
                    f"prepare p50 {prepare:.1f} ms  replay {row['replay_ms']:.0f} ms  count {row['count_ms']:.3f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
