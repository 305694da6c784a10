"""Invented conversations: agents of every kind, with all that clients get wrong, from a seed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from leyline_agent.core.messages import Message
from leyline_agent.policy import TextTokens

TOOLS = ("bash", "read_file", "view", "edit", "think", "skill")
PATHS = ("src/a.py", "src/b.py", "README.md")
TEXTS = (
    "",
    "ok",
    "one\ntwo\nthree\n" * 6,
    "Error: no such file",
    "Traceback (most recent call last):\n  File x\nValueError: y",
    "sk-" + "a1B2" * 8,
    "x" * 400,
    "出力です。" * 20,
    "[evicted: bash, 9 lines]",
    "line\n" * 900,
)


def loud_counter(factor: int = 60) -> TextTokens:
    """A counter to which short conversations are long, so that policies for long ones fire."""
    return TextTokens(lambda text: factor * len(text), "loud")


def history(seed: int) -> list[dict[str, Any]]:
    """Return one conversation. Every third is tidy, every third in Anthropic's form; the others have faults."""
    rng = random.Random(seed)
    if seed % 3 == 1:
        return _anthropic(rng)
    return _openai(rng, faulty=seed % 3 == 2)


def _openai(rng: random.Random, *, faulty: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.7:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    messages.append({"role": "user", "content": "the task"})
    late: list[dict[str, Any]] = []
    num_turns = rng.randrange(9)
    for turn in range(num_turns):
        calls = [_call(rng, f"{turn}.{idx}", faulty=faulty) for idx in range(rng.choice((0, 1, 1, 1, 2, 3)))]
        message: dict[str, Any] = {"role": "assistant", "content": rng.choice((None, "", "I look.", "I look. " * 9))}
        if rng.random() < 0.3:
            message["reasoning_content"] = "a thought " * rng.randrange(1, 20)
        if calls:
            message["tool_calls"] = calls
        messages.append(message)
        results = [_result(rng, call) for call in calls]
        rng.shuffle(results)
        if faulty and results and rng.random() < 0.25:
            late.append(results.pop())
        if faulty and results and rng.random() < 0.15:
            (results if rng.random() < 0.5 else late).append({**results[0], "content": "again"})
        if faulty and rng.random() < 0.1:
            results.append({"role": "tool", "tool_call_id": "nobody", "content": rng.choice(TEXTS)})
        if faulty and late and rng.random() < 0.4:
            results.append(late.pop())
        if turn == num_turns - 1 and rng.random() < 0.3:
            results = results[: rng.randrange(len(results) + 1)]
        messages += results
        if not calls or rng.random() < 0.2:
            messages.append({"role": "user", "content": rng.choice(TEXTS)})
    return messages


def _call(rng: random.Random, call_id: str, *, faulty: bool) -> dict[str, Any]:
    arguments: str | dict[str, Any] = json.dumps({"path": rng.choice(PATHS), "text": rng.choice(TEXTS)})
    if faulty and rng.random() < 0.1:
        arguments = rng.choice(["", "{broken", {"path": "src/a.py"}, "[1]"])
    call: dict[str, Any] = {"id": call_id, "type": "function", "function": {"name": rng.choice(TOOLS)}}
    call["function"]["arguments"] = arguments
    if faulty and rng.random() < 0.3:
        call["id"] = rng.choice(["a", "b", "", None])
    return call


def _result(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    content: Any = rng.choice(TEXTS)
    if rng.random() < 0.1:
        content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": "x"}}]
    result = {"role": "tool", "tool_call_id": call["id"], "content": content}
    if rng.random() < 0.1:
        result["tags"] = [rng.choice(["keep_output", "remove_output"])]
    return result


def _anthropic(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "the task"}]
    num_turns = rng.randrange(9)
    for turn in range(num_turns):
        uses = [
            {"type": "tool_use", "id": f"{turn}.{idx}", "name": rng.choice(TOOLS), "input": {"path": rng.choice(PATHS)}}
            for idx in range(rng.choice((0, 1, 1, 2, 3)))
        ]
        said = [{"type": "thinking", "thinking": "hm " * 9, "signature": "s"}] if rng.random() < 0.5 else []
        if not uses or rng.random() < 0.5:
            said.append({"type": "text", "text": rng.choice(TEXTS) or "so"})
        messages.append({"role": "assistant", "content": [*said, *uses]})
        if turn == num_turns - 1 and rng.random() < 0.3:
            break
        blocks: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": rng.choice(TEXTS)} for use in uses
        ]
        rng.shuffle(blocks)
        if not blocks or rng.random() < 0.2:
            blocks.append({"type": "text", "text": rng.choice(TEXTS) or "go on"})
        messages.append({"role": "user", "content": blocks})
    return messages


def unpaired(messages: Sequence[Message]) -> tuple[Counter[str], Counter[str]]:
    """Return ids of calls without results, and of results without calls, by how often; both forms of message.

    Written against the API's rule, not with the engine's pairing: a result answers the nearest open call of its id
    before it; where ids are missing it answers any.
    """
    open_calls: list[str] = []
    answered: list[str] = []
    orphans: Counter[str] = Counter()
    for kind, call_id in _calls_and_results(messages):
        if kind == "call":
            open_calls.append(call_id)
        elif call_id in open_calls:
            open_calls.reverse()
            open_calls.remove(call_id)
            open_calls.reverse()
            answered.append(call_id)
        elif call_id not in answered and not (("" in open_calls) or (call_id == "" and open_calls)):
            orphans[call_id] += 1
        elif call_id not in answered:
            open_calls.remove("" if "" in open_calls else open_calls[0])
    return Counter(open_calls), orphans


def _calls_and_results(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    for message in messages:
        content = message.raw.get("content")
        blocks = content if isinstance(content, list) else []
        if message.role == "assistant":
            for call in message.raw.get("tool_calls") or ():
                yield "call", call.get("id") or ""
        for block in blocks:
            if block["type"] == "tool_use":
                yield "call", block["id"]
            elif block["type"] == "tool_result":
                yield "result", block["tool_use_id"]
        if message.role == "tool":
            yield "result", message.raw.get("tool_call_id") or ""
