"""An agent on the `openai` package whose old tool outputs a policy drops, while the server keeps its KV.

It looks through the files of a folder, one call a turn, and prints what each turn cost.

    python docs/examples/openai_agent.py http://127.0.0.1:30000 leyline_agent/core
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

from leyline_agent import Conversation, load_policy
from leyline_agent.answers import ChatReply, read_reply

READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Returns a file's text.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def ask(client: OpenAI, conversation: Conversation, messages: list[dict[str, Any]], **options: Any) -> ChatReply:
    """Send one turn: the policy edits what is sent, the note tells the server, `messages` stay whole."""
    turn = conversation.prepare({"messages": messages, **options})
    response = client.chat.completions.with_raw_response.create(**turn.openai_arguments())
    reply = read_reply(response.headers, json.loads(response.text))
    conversation.commit(turn, reply.message, reply.outcome, reply.usage)
    return reply


def main(base_url: str, folder: Path, *, num_files: int = 6) -> Conversation:
    """Have the model look at some files, and return the conversation."""
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
    # Of each file there are two turns, the call and the answer: the outputs of the last two files stay.
    conversation = Conversation(load_policy("keep_last_tool_outputs").with_turns(4))
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Review the files of {folder.name}."}]
    for number, path in enumerate(sorted(folder.glob("*.py"))[:num_files]):
        # The program calls the tool itself, so that it does the same with any model.
        arguments = json.dumps({"path": path.name})
        call = {"id": f"call-{number}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": path.read_text()[:2000]},
            {"role": "user", "content": "What does it do?"},
        ]
        reply = ask(client, conversation, messages, model="default", tools=[READ], max_tokens=24, temperature=0)
        messages.append(reply.message)
        outcome = reply.outcome
        told = f"{outcome.status}, {outcome.moved_tokens} tokens moved" if outcome else "no plugin on this server"
        print(f"{path.name}: {told}")
    hit_rate = conversation.telemetry.hit_rate
    print(f"hit rate: {hit_rate:.1%}" if hit_rate is not None else "hit rate: unknown")
    return conversation


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent))
