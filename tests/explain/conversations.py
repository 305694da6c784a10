"""Small conversations and a tokenizer for tests of `explain`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline_agent.core.messages import messages_from_openai
from leyline_agent.explain import RecordedConversation


def agent(num_turns: int, *, lines: int = 12) -> list[dict[str, Any]]:
    """A task, then calls of `bash` with outputs of so many lines, then a last answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "the task"}]
    for turn in range(num_turns):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "bash", "arguments": f'{{"n": {turn}}}'}}
        messages.append({"role": "assistant", "content": f"step {turn}", "tool_calls": [call]})
        output = "".join(f"output {turn} line {line}\n" for line in range(lines))
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": output})
    return [*messages, {"role": "assistant", "content": "done"}]


def recorded(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> RecordedConversation:
    return RecordedConversation("a.json", "a test", tuple(messages_from_openai(messages)), tuple(tools))


def write_conversation(folder: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    file = folder / "conversation.json"
    file.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    return str(file)


class WordTokenizer:
    """One id a word, a chat template of two words a message."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        words = json.dumps(tools).split() if tools else []
        for message in messages:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            words += [f"<{message['role']}>", *str(message.get("content") or "").split(), *calls.split(), "<end>"]
        if add_generation_prompt:
            words.append("<assistant>")
        return [zlib.crc32(word.encode()) >> 1 for word in words]
