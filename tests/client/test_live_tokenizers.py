"""The ids of a local tokenizer are those of the server, tools included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evals.replay.record import DEMO_TRAJECTORY
from evals.serving import SERVED_MODEL_NAME, RunningServer
from leyline_agent import Client, Conversation
from leyline_agent.errors import RenderError, SpliceTransportError
from leyline_agent.policy import load_policy
from leyline_agent.tokenizers import LocalTokenizer, ServerTokenizer

pytestmark = pytest.mark.sglang

_DEMO = json.loads(DEMO_TRAJECTORY.read_text(encoding="utf-8"))
MESSAGES: list[dict[str, Any]] = _DEMO["messages"][:20]
TOOLS: list[dict[str, Any]] = _DEMO["tools"]
_BARE: list[dict[str, Any]] = [
    {"type": "function", "function": {"strict": True, "name": "f", "returns": {}}},
    {"type": "function", "function": {"description": "d", "name": "g", "defer_loading": True}},
]


@pytest.fixture(scope="module")
def local(model_dir: Path) -> LocalTokenizer:
    """The tokenizer in the folder of the served model."""
    return LocalTokenizer.from_pretrained(str(model_dir))


@pytest.fixture(scope="module")
def server(cpu_server: RunningServer) -> Iterator[ServerTokenizer]:
    """The server's `/tokenize`."""
    with closing(ServerTokenizer(cpu_server.url)) as tokenizer:
        yield tokenizer


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_demos_first_messages(server: ServerTokenizer, local: LocalTokenizer, add_generation_prompt: bool) -> None:
    asked: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    token_ids = server.render(MESSAGES, TOOLS, **asked)
    assert local.render(MESSAGES, TOOLS, **asked) == token_ids
    assert len(token_ids) > len(server.render(MESSAGES, **asked))


@pytest.mark.parametrize(
    "tool_choice",
    [
        pytest.param("auto", id="auto"),
        pytest.param("required", id="required"),
        pytest.param("none", id="none"),
        pytest.param({"type": "function", "function": {"name": "g"}}, id="one"),
    ],
)
def test_tools_whose_fields_the_server_changes(
    server: ServerTokenizer, local: LocalTokenizer, tool_choice: str | dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"tool_choice": tool_choice}
    assert local.render(MESSAGES[:2], _BARE, **asked) == server.render(MESSAGES[:2], _BARE, **asked)


_USER = {"role": "user", "content": "Say it."}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}],
}
_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([_USER, _CALL, {"role": "tool", "tool_call_id": "c", "content": _PARTS}], id="tool_parts"),
        pytest.param([{"role": "user", "content": _PARTS}], id="user_parts"),
        pytest.param([{"role": "user", "content": "u", "name": "n", "unknown": 1}], id="fields_of_its_own"),
        pytest.param([_USER, {"role": "assistant", "content": "I say"}], id="ends_with_an_answer"),
        pytest.param([_USER, {"role": "assistant", "content": _PARTS}], id="ends_with_an_answer_in_parts"),
        pytest.param([_USER, {"role": "assistant", "content": None, "reasoning_content": "r"}], id="reasoning_alone"),
    ],
)
@pytest.mark.parametrize("continues", [False, True])
def test_messages_that_the_server_changes(
    server: ServerTokenizer, local: LocalTokenizer, messages: list[dict[str, Any]], continues: bool
) -> None:
    asked: dict[str, Any] = {"continue_final_message": continues}
    assert local.render(messages, **asked) == server.render(messages, **asked)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(
            {**_CALL, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}, id="half_json"
        ),
        pytest.param({**_CALL, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}, id="empty"),
        pytest.param(
            {**_CALL, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[1]"}}]}, id="a_list"
        ),
        pytest.param({**_CALL, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "NaN"}}]}, id="nan"),
    ],
)
def test_what_the_server_refuses_is_refused(
    server: ServerTokenizer, local: LocalTokenizer, message: dict[str, Any]
) -> None:
    with pytest.raises(SpliceTransportError, match="400"):
        server.render([_USER, message, _USER])
    with pytest.raises(RenderError, match="the server refuses such a message"):
        local.render([_USER, message, _USER])


def test_plan_made_with_it_is_spliced_in_a_conversation_with_tools(
    cpu_server: RunningServer, local: LocalTokenizer
) -> None:
    # The recorded call and the answer are two turns of each request: an output goes two requests after its own.
    policy = load_policy("keep_last_tool_outputs").with_turns(3)
    conversation = Conversation(policy, plan="client", tokenizer=local)
    # A text of its own: nobody else has these prompts cached.
    messages = [{"role": "system", "content": "Explicit directives, with tools."}, MESSAGES[1]]
    outcomes = []
    with Client(cpu_server.url, timeout=120) as client:
        for call, output in zip(MESSAGES[2:10:2], MESSAGES[3:10:2], strict=True):
            messages = [*messages, call, output]
            # One token: more would often be tokenized otherwise than they were generated.
            asked = {"model": SERVED_MODEL_NAME, "temperature": 0, "max_tokens": 1, "tools": TOOLS}
            reply = client.chat(conversation, messages, **asked)
            assert reply.outcome is not None
            outcomes.append((str(reply.outcome.status), reply.outcome.reason))
            messages = [*messages, reply.message, {"role": "user", "content": "Go on."}]
    assert outcomes[2:] == [("spliced", None)] * 2
