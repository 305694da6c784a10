"""Explicit directives, with tokenizers that are small enough to check by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from leyline_agent import Client, Conversation, PlanError, Policy, SpliceTransportError, Usage
from leyline_agent.chat_template import template_tools
from leyline_agent.core.plan import apply_directives
from leyline_agent.core.protocol import hash_token_ids
from leyline_agent.tokenizers import LocalTokenizer, ServerTokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "read f"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "r", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "a long output that is about to go"},
]
ANSWER = "it says that the port is 80, which is long enough for a run of tokens that is worth to keep"


class CharTokenizer:
    """A token a character; an answer ends with `;`, which the model generates, and `~`, which the template adds."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        text = "".join(f"{message['role'][0]}:{message['content'] or ''};~" for message in messages)
        return [ord(char) for char in text + ("a:" if add_generation_prompt else "")]


def edited_turn(usage: Usage | None) -> tuple[list[int], list[int], Any]:
    """Answer a turn, edit its tool output, and return prompt and new prompt in ids, and the second note."""
    tokenizer = CharTokenizer()
    conversation = Conversation(plan="client", tokenizer=tokenizer)
    first = conversation.prepare({"messages": MESSAGES})
    assert first.note is not None
    assert first.note.directives is None
    answer = {"role": "assistant", "content": ANSWER}
    conversation.commit(first, answer, usage=usage)
    conversation.edit(2, "[x]")
    second = conversation.prepare({"messages": [*MESSAGES, answer, {"role": "user", "content": "go on"}]})
    return tokenizer.render(MESSAGES), tokenizer.render(second.body["messages"]), second.note


def test_directives_lead_from_the_servers_sequence_to_a_prefix_of_the_prompt() -> None:
    prompt_ids = CharTokenizer().render(MESSAGES)
    base_ids = [*prompt_ids, *map(ord, ANSWER + ";")]
    _, new_ids, note = edited_turn(Usage(len(prompt_ids), len(ANSWER) + 1, None))
    assert (note.base_len, note.base_hash) == (len(base_ids), hash_token_ids(base_ids))
    result = apply_directives(base_ids, note.directives)
    assert note.directives
    assert result == new_ids[: len(result)]
    assert "".join(map(chr, result)).endswith(f"a:{ANSWER};")


def test_base_ends_with_its_prompt_where_the_server_did_not_count() -> None:
    prompt_ids, new_ids, note = edited_turn(None)
    assert (note.base_len, note.base_hash) == (len(prompt_ids), hash_token_ids(prompt_ids))
    result = apply_directives(prompt_ids, note.directives)
    assert result == new_ids[: len(result)]


def test_reprefill_carries_no_directives() -> None:
    conversation = Conversation(plan="client", tokenizer=CharTokenizer())
    first = conversation.prepare({"messages": MESSAGES})
    conversation.commit(first, {"role": "assistant", "content": "ok"})
    note = conversation.prepare({"messages": [{"role": "user", "content": "another"}]}).note
    assert note is not None
    assert (note.mode, note.directives) == ("reprefill", None)


def test_diff_that_is_too_much_work_is_left_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(old_ids: Any, new_ids: Any) -> Any:
        raise PlanError("too much work", reason="diff_budget")

    monkeypatch.setattr("leyline_agent.client_plan.diff_token_ids", too_much)
    _, _, note = edited_turn(None)
    assert (note.mode, note.directives) == ("amortize", None)


def test_client_plan_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="give a tokenizer"):
        Conversation(plan="client")


def test_server_tokenizer_asks_for_a_chat_requests_ids(server: Any, stub_old_outputs: Policy) -> None:
    asked: list[dict[str, Any]] = []

    def tokenize(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/tokenize"
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"tokens": [1, 2], "count": 2})

    tokenizer = ServerTokenizer("http://server/v1", transport=httpx.MockTransport(tokenize))
    conversation = Conversation(stub_old_outputs, plan="client", tokenizer=tokenizer)
    client = Client("http://server", transport=httpx.MockTransport(server))
    body = {"model": "m", "tools": [{"type": "function", "function": {"name": "r"}}], "temperature": 0.5}
    reply = client.chat(conversation, MESSAGES, **body, chat_template_kwargs={"t": 1})
    client.chat(conversation, [*MESSAGES, reply.message], **body, chat_template_kwargs={"t": 1})
    base, new = asked
    assert base.pop("add_generation_prompt") is False
    assert "add_generation_prompt" not in new
    for one in asked:
        assert one.pop("messages")
        assert one == {"model": "m", "tools": body["tools"], "chat_template_kwargs": {"t": 1}}


def test_server_without_tokenize_is_reported() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(404))
    with pytest.raises(SpliceTransportError, match="not a gateway"):
        ServerTokenizer("http://server", transport=transport).render([{"role": "user", "content": "u"}])


def test_local_tokenizer_gives_the_template_what_sglang_gives_it() -> None:
    seen: dict[str, Any] = {}

    class Template:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages: Any, **arguments: Any) -> list[int]:
            seen.update(arguments, messages=messages)
            return [1]

    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": None,
        "tool_calls": [{"function": {"name": "r", "arguments": '{"p": 1}'}}],
    }
    LocalTokenizer(Template()).render(
        [message, {"role": "user", "content": "u"}], chat_template_kwargs={"t": 1}, tool_choice="auto"
    )
    assert seen["messages"][0]["content"] == ""
    assert "reasoning_content" not in seen["messages"][0]
    assert seen["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"p": 1}
    assert message["content"] is None
    assert (seen["t"], seen["add_generation_prompt"], seen["tools"]) == (1, True, None)
    assert "tool_choice" not in seen


_SCHEMA = {"type": "object"}


# What `ChatCompletionRequest.model_validate(body).tools[0].model_dump()` of SGLang 0.5.23 gives, its order included.
@pytest.mark.parametrize(
    ("tool", "function", "defer_loading"),
    [
        pytest.param(
            {"function": {"name": "f"}}, {"name": "f", "description": None, "parameters": None}, None, id="bare"
        ),
        pytest.param(
            {"type": "function", "function": {"parameters": _SCHEMA, "strict": True, "description": "d", "name": "f"}},
            {"parameters": _SCHEMA, "strict": True, "description": "d", "name": "f"},
            None,
            id="order_is_kept",
        ),
        pytest.param(
            {"function": {"strict": None, "name": "f", "defer_loading": None, "returns": {}}, "extra": 1},
            {"name": "f", "description": None, "parameters": None},
            None,
            id="nulls_and_unknown_fields_go",
        ),
        pytest.param(
            {"defer_loading": True, "function": {"name": "f"}},
            {"name": "f", "description": None, "parameters": None, "defer_loading": True},
            True,
            id="defer_loading_is_handed_down",
        ),
        pytest.param(
            {"defer_loading": True, "function": {"defer_loading": False, "name": "f"}},
            {"defer_loading": False, "name": "f", "description": None, "parameters": None},
            True,
            id="defer_loading_of_its_own",
        ),
    ],
)
def test_template_sees_a_tool_as_sglang_passes_it(
    tool: dict[str, Any], function: dict[str, Any], defer_loading: bool | None
) -> None:
    expected = [{"type": "function", "function": function, "defer_loading": defer_loading}]
    # As JSON, since a template writes fields in their order.
    assert json.dumps(template_tools([tool])) == json.dumps(expected)


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        (None, ["f", "g"]),
        ("auto", ["f", "g"]),
        ("required", ["f", "g"]),
        ("none", None),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
    ],
)
def test_template_sees_the_tools_that_may_be_called(tool_choice: Any, names: list[str] | None) -> None:
    seen = template_tools([{"function": {"name": "f"}}, {"function": {"name": "g"}}], tool_choice)
    assert (seen and [tool["function"]["name"] for tool in seen]) == names
