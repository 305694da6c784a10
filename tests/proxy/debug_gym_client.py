"""Runs in `.venv-debug-gym`: debug-gym's own OpenAI client takes the turns of one conversation.

Usage: python -m tests.proxy.debug_gym_client BASE_URL MODEL NAME|- < turns.json   (one list of messages a turn)

With NAME the conversation is named by a header, as debug-gym's configuration can (`generate_kwargs`). Prints a JSON
line a turn: the answer as debug-gym puts it into the history, and the count of tokens.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import evals.debug_gym_env.stand_ins  # noqa: F401 - before debug_gym

from debug_gym.llms.base import LLMConfig  # isort: skip
from debug_gym.llms.openai import OpenAILLM  # isort: skip

TOOL = SimpleNamespace(name="cat", description="Print a file.", arguments={"path": {"type": ["string"]}})


def main() -> None:
    base_url, model, name = sys.argv[1:]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    if name != "-":
        settings["extra_headers"] = {"x-leyline-conversation": name}
    config = LLMConfig(model=model, context_limit=64, api_key="gym", endpoint=base_url, generate_kwargs=settings)
    client = OpenAILLM(model, config)
    messages: list[dict[str, Any]] = []
    for added in json.load(sys.stdin):
        messages += added
        response = client.generate(messages, [TOOL], **settings)
        if response.tool.name == "empty_tool_response":
            # debug-gym would invent a call here, and so another history.
            messages.append({"role": "assistant", "content": response.response})
        else:
            messages.append(client.convert_response_to_message(response))
        print(json.dumps({"message": messages[-1], "prompt_tokens": response.token_usage.prompt}))


main()
