"""Real agents of langchain.agents.create_agent on a fake server."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from leyline_agent import Policy, UnsupportedServerError
from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langchain_messages import apply_edits_to_langchain, to_openai

Make = Callable[..., ChatOpenAI]
ASK = {"messages": [{"role": "user", "content": "Read two files."}]}


def run(model: Any, read_tool: Any, *middleware: Any, thread: str = "t", saver: Any = None) -> dict[str, Any]:
    agent = create_agent(model, [read_tool], system_prompt="Be brief.", middleware=middleware, checkpointer=saver)
    result: dict[str, Any] = agent.invoke(ASK, {"configurable": {"thread_id": thread}})
    return result


def without_note(body: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    del body["custom_params"]["leyline"]
    if not body["custom_params"]:
        del body["custom_params"]
    return body


def test_requests_are_those_without_us_but_for_the_note_and_the_policys_edits(
    server: Any, make_model: Make, read_tool: Any, stub_old_outputs: Policy
) -> None:
    run(make_model(), read_tool)
    plain = server.bodies
    server.requests.clear()
    run(make_model(), read_tool, LeylineMiddleware(stub_old_outputs))
    ours = [without_note(body) for body in server.bodies]
    assert len(ours) == len(plain) == 3
    assert ours[:2] == plain[:2]
    assert ours[2]["messages"][3]["content"] == "[gone]"
    ours[2]["messages"][3]["content"] = plain[2]["messages"][3]["content"]
    assert ours[2] == plain[2]


def test_notes_chain_turns_and_amortize(
    server: Any, make_model: Make, read_tool: Any, stub_old_outputs: Policy
) -> None:
    middleware = LeylineMiddleware(stub_old_outputs)
    run(make_model(), read_tool, middleware)
    first, second, third = server.notes
    assert (second["base"], third["base"]) == (first["turn"], second["turn"])
    assert all(note.get("mode", "amortize") == "amortize" for note in server.notes)
    assert len({request.headers["x-smg-routing-key"] for request in server.requests}) == 1
    conversation = middleware.conversation("t")
    assert conversation.last_outcome is not None
    assert conversation.last_outcome.directives[0].edit_id == "e3"
    assert conversation.telemetry.cached_tokens == 3 * 40


def test_scrub_reaches_the_notes(server: Any, make_model: Make, read_tool: Any, forget_old_outputs: Policy) -> None:
    run(make_model(), read_tool, LeylineMiddleware(forget_old_outputs, scrub=True))
    assert [(note.get("mode"), note.get("scrub")) for note in server.notes] == [(None, None)] * 2 + [("forget", True)]


def test_state_is_what_it_is_without_us(make_model: Make, read_tool: Any, stub_old_outputs: Policy) -> None:
    def dump(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [message.model_dump(exclude={"id"}) for message in state["messages"]]

    plain = run(make_model(), read_tool)
    ours = run(make_model(), read_tool, LeylineMiddleware(stub_old_outputs), saver=InMemorySaver())
    assert dump(ours) == dump(plain)
    assert set(ours) == set(plain)


def test_headers_stay_where_the_user_asked_for_them(make_model: Make, read_tool: Any) -> None:
    state = run(make_model(include_response_headers=True), read_tool, LeylineMiddleware())
    assert "x-leyline" in state["messages"][-1].response_metadata["headers"]


class Settings(AgentMiddleware[Any, Any, Any]):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings=self.settings))


BODY = {"chat_template_kwargs": {"enable_thinking": False}, "custom_params": {"thinking_budget": 9}, "top_k": 3}
HEADERS = {"x-mine": "1"}


@pytest.mark.parametrize(
    ("model_options", "settings"),
    [
        ({"extra_body": BODY, "default_headers": HEADERS}, {}),
        ({"extra_body": BODY, "model_kwargs": {"extra_headers": HEADERS}}, {}),
        ({}, {"extra_body": BODY, "extra_headers": HEADERS}),
        ({"extra_body": {"top_k": 1}}, {"extra_body": BODY, "extra_headers": HEADERS, "temperature": 0.5}),
    ],
    ids=["model", "model_kwargs", "settings", "settings over model"],
)
def test_what_the_user_set_survives(
    server: Any, make_model: Make, read_tool: Any, model_options: dict[str, Any], settings: dict[str, Any]
) -> None:
    before = copy.deepcopy((model_options, settings))
    model = make_model(**model_options)
    run(model, read_tool, Settings(**settings))
    plain = server.bodies
    server.requests.clear()
    run(model, read_tool, Settings(**settings), LeylineMiddleware())
    assert [without_note(body) for body in server.bodies] == plain
    assert plain[0]["custom_params"] == {"thinking_budget": 9}
    assert all(request.headers["x-mine"] == "1" for request in server.requests)
    assert (model_options, settings) == before
    assert model.include_response_headers is False


async def test_async_agent(server: Any, make_model: Make, read_tool: Any, stub_old_outputs: Policy) -> None:
    middleware = LeylineMiddleware(stub_old_outputs)
    agent = create_agent(make_model(), [read_tool], middleware=[middleware])
    await agent.ainvoke(ASK, {"configurable": {"thread_id": "t"}})
    assert [note.get("base") for note in server.notes] == [None, *(note["turn"] for note in server.notes[:2])]
    assert server.bodies[2]["messages"][2]["content"] == "[gone]"
    assert middleware.conversation("t").telemetry.fallbacks == {}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_streaming_agent_sees_the_outcome(
    server: Any, make_model: Make, read_tool: Any, stub_old_outputs: Policy, asynchronous: bool
) -> None:
    middleware = LeylineMiddleware(stub_old_outputs)
    agent = create_agent(make_model(), [read_tool], middleware=[middleware])
    config: Any = {"configurable": {"thread_id": "t"}}
    if asynchronous:
        chunks = [chunk async for chunk in agent.astream(ASK, config, stream_mode="messages")]
    else:
        chunks = list(agent.stream(ASK, config, stream_mode="messages"))
    assert any(chunk.content == "done" for chunk, _ in chunks)
    assert not any("headers" in chunk.response_metadata for chunk, _ in chunks)
    assert all(body["stream"] for body in server.bodies)
    telemetry = middleware.conversation("t").telemetry
    assert (telemetry.turns, telemetry.splices, telemetry.fallbacks) == (3, 3, {})
    assert telemetry.cached_tokens == 3 * 40
    assert [note.get("mode", "amortize") for note in server.notes] == ["amortize"] * 3


def test_each_thread_is_a_conversation_and_goes_on(server: Any, make_model: Make, read_tool: Any) -> None:
    middleware, saver = LeylineMiddleware(), InMemorySaver()
    for thread in ("a", "b", "a"):
        run(make_model(), read_tool, middleware, thread=thread, saver=saver)
    ids = [note["conversation"] for note in server.notes]
    # The third run goes on from the results in the thread's state, so it takes one request.
    assert ids == [middleware.conversation("a").id] * 3 + [middleware.conversation("b").id] * 3 + ids[:1]
    assert server.notes[-1]["base"] == server.notes[2]["turn"]
    assert server.notes[-1].get("mode", "amortize") == "amortize"


def test_key_makes_ids_survive_a_restart(server: Any, make_model: Make, read_tool: Any) -> None:
    for _ in range(2):
        run(make_model(), read_tool, LeylineMiddleware(key=b"0123456789abcdef"))
    assert len({note["conversation"] for note in server.notes}) == 1
    assert server.notes[3]["mode"] == "reprefill"
    with pytest.raises(ValueError, match="expected 16"):
        LeylineMiddleware(key="short")


def test_without_a_thread_id_requests_are_chained_by_their_messages(
    server: Any, make_model: Make, read_tool: Any
) -> None:
    middleware = LeylineMiddleware()
    agent = create_agent(make_model(), [read_tool], middleware=[middleware])
    agent.invoke(ASK)
    agent.invoke(ASK)
    ids = [note["conversation"] for note in server.notes]
    assert ids == [ids[0]] * 3 + [ids[3]] * 3
    assert ids[0] != ids[3]
    assert server.notes[1]["base"] == server.notes[0]["turn"]


def test_number_of_conversations_is_bounded() -> None:
    middleware = LeylineMiddleware(max_conversations=2)
    first = middleware.conversation("a")
    for thread in "bc":
        middleware.conversation(thread)
    assert middleware.conversation("c") is middleware.conversation("c")
    assert middleware.conversation("a") is not first


def test_policy_none_sends_what_is_sent_without_us(server: Any, make_model: Make, read_tool: Any) -> None:
    run(make_model(), read_tool)
    plain = server.bodies
    server.requests.clear()
    run(make_model(), read_tool, LeylineMiddleware("none"))
    assert server.bodies == plain
    assert all("x-smg-routing-key" not in request.headers for request in server.requests)


def test_strict_raises_on_an_unpatched_server_and_keeps_the_answer(
    server: Any, make_model: Make, read_tool: Any
) -> None:
    server.patched = False
    middleware = LeylineMiddleware(strict=True)
    with pytest.raises(UnsupportedServerError):
        run(make_model(), read_tool, middleware)
    answer = middleware.conversation("t").last_answer
    assert answer is not None
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"path": "f0"}


def test_changed_system_prompt_says_reprefill(server: Any, make_model: Make, read_tool: Any) -> None:
    middleware, saver = LeylineMiddleware(), InMemorySaver()
    for prompt in ("Port 80.", "Port 81."):
        agent = create_agent(
            make_model(), [read_tool], system_prompt=prompt, middleware=[middleware], checkpointer=saver
        )
        agent.invoke(ASK, {"configurable": {"thread_id": "t"}})
    assert server.notes[-1]["mode"] == "reprefill"


HISTORY = [
    SystemMessage("s"),
    HumanMessage([{"type": "text", "text": "look"}], id="h"),
    AIMessage(
        "", tool_calls=[{"id": "a", "name": "read", "args": {}}, {"id": "b", "name": "read", "args": {}}], id="i"
    ),
    ToolMessage("A", tool_call_id="a", id="ta"),
    ToolMessage("B", tool_call_id="b", id="tb"),
]


def test_edits_are_made_on_copies_of_langchain_messages() -> None:
    before = copy.deepcopy(HISTORY)
    dicts = to_openai(HISTORY)
    one_call = {**dicts[2], "tool_calls": dicts[2]["tool_calls"][1:]}
    edits = [
        Edit(1, 2, (Message.from_openai(dicts[1]).with_text("seen"),)),
        Edit(2, 3, (Message.from_openai(one_call),)),
        Edit(3, 4),
        Edit(4, 5, (Message.from_openai(dicts[4]).with_text("[b]"),)),
    ]
    edited = apply_edits_to_langchain(HISTORY, messages_from_openai(dicts), edits)
    assert before == HISTORY
    assert edited[0] is HISTORY[0]
    assert edited[1] == HumanMessage("seen", id="h")
    assert isinstance(edited[2], AIMessage)
    assert [call["id"] for call in edited[2].tool_calls] == ["b"]
    assert edited[3:] == [ToolMessage("[b]", tool_call_id="b", id="tb")]


def test_collapse_becomes_a_user_message_and_block_contents_stay_blocks() -> None:
    dicts = to_openai(HISTORY)
    assert dicts[1]["content"] == [{"type": "text", "text": "look"}]
    stub = Message.from_openai({"role": "user", "content": "[1 turn]"})
    edited = apply_edits_to_langchain(HISTORY, messages_from_openai(dicts), [Edit(2, 5, (stub,))])
    assert edited[2:] == [HumanMessage("[1 turn]")]
