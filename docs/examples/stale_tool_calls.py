"""A detector of stale tool calls in ten lines that drives the cache, without a policy file.

A program reads the same sensor again and again and asks a model about it. Each new reading makes the one before
stale; `Conversation.edit` takes it out of the prompt, and the server keeps the KV of everything after it.

    python docs/examples/stale_tool_calls.py http://127.0.0.1:30000
"""

from __future__ import annotations

import sys
from typing import Any

import httpx

from leyline_agent import Client, Conversation


def stale_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of calls that were made again later with the same arguments."""
    calls, latest, stale = {}, {}, []
    for message in messages:
        for call in message.get("tool_calls") or ():
            calls[call["id"]] = (call["function"]["name"], call["function"]["arguments"])
        if message["role"] == "tool":
            call_made = calls[message["tool_call_id"]]
            stale += [latest[call_made]] if call_made in latest else []
            latest[call_made] = message
    return stale


def main(base_url: str, *, num_turns: int = 4, transport: httpx.BaseTransport | None = None) -> Conversation:
    """Run a few turns, print what each one kept, and return the conversation."""
    conversation = Conversation()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You watch a sensor. Answer in one sentence."}]
    with Client(base_url, transport=transport) as client:
        for turn in range(num_turns):
            messages += _reading(turn)
            for message in stale_results(messages):
                conversation.edit(message, "[an older reading, replaced by the one below]")
            reply = client.chat(conversation, messages, model="default", max_tokens=32)
            messages.append(reply.message)
            outcome = reply.outcome
            print(f"turn {turn}:", outcome.status if outcome else "no plugin", outcome and outcome.moved_tokens)
    return conversation


def _reading(turn: int) -> list[dict[str, Any]]:
    """Return a call that the program makes itself, its result, and the question."""
    call = {"id": f"call-{turn}", "type": "function", "function": {"name": "read_sensor", "arguments": "{}"}}
    lines = "\n".join(f"channel {channel}: {(channel * 7 + turn * 13) % 100}" for channel in range(60))
    return [
        {"role": "user", "content": f"Reading {turn}."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call-{turn}", "content": lines},
    ]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000")
