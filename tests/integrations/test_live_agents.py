"""Real LangGraph agents with real clients on the live CPU server, patched and unpatched.

The model is random, so the tests bring the agent's tool calls themselves: each turn adds a call and its output to a
thread, and the model's answer is whatever it says.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from evals.serving import SERVED_MODEL_NAME, RunningServer
from leyline_agent import Client, Conversation, load_policy
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langgraph import with_leyline
from leyline_agent.tokenizers import ServerTokenizer

pytestmark = pytest.mark.sglang

NUM_TURNS = 5
# A question takes two turns here, the call that it brings and the model's answer: the last two outputs stay.
POLICY = load_policy("keep_last_tool_outputs").with_turns(4)


@tool
def cat(path: str) -> str:
    """Print a file."""
    return path


def _turn(idx: int, salt: str) -> list[BaseMessage]:
    """A call and its output, then a question. Long enough an output that its eviction shows in the counts."""
    call = {"name": "cat", "args": {"path": f"{idx}.py"}, "id": f"call_{idx}"}
    output = "\n".join(f"{salt} line {line} of file {idx}: value = {line * idx % 97}" for line in range(40))
    return [
        HumanMessage(f"Look at file {idx}."),
        AIMessage("", tool_calls=[call]),
        ToolMessage(output, tool_call_id=f"call_{idx}"),
    ]


@pytest.fixture
def sent() -> list[dict[str, Any]]:
    """Bodies of the chat requests, as they leave."""
    return []


@pytest.fixture
def make_model(sent: list[dict[str, Any]]) -> Iterator[Any]:
    def record(request: httpx.Request) -> None:
        sent.append(json.loads(request.content))

    async def record_async(request: httpx.Request) -> None:
        record(request)

    client = httpx.Client(event_hooks={"request": [record]}, timeout=120)
    # Keeps no connection: it is closed from another event loop than the one it was used in.
    limits = httpx.Limits(max_keepalive_connections=0)
    async_client = httpx.AsyncClient(event_hooks={"request": [record_async]}, timeout=120, limits=limits)

    def make(server: RunningServer, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(
            model=SERVED_MODEL_NAME,
            base_url=server.url + "/v1",
            api_key="none",  # type: ignore[arg-type]
            temperature=0,
            max_tokens=6,  # type: ignore[call-arg]
            max_retries=0,
            http_client=client,
            http_async_client=async_client,
            **options,
        )

    yield make
    client.close()
    asyncio.run(async_client.aclose())


def _flush(server: RunningServer) -> None:
    assert httpx.post(server.url + "/flush_cache", timeout=60).is_success


def _run(agent: Any, salt: str, mode: str) -> list[BaseMessage]:
    """Take the turns of one thread; return the state's messages at the end."""
    config = {"configurable": {"thread_id": salt}}

    async def run_async() -> Any:
        for idx in range(NUM_TURNS):
            state = await agent.ainvoke({"messages": _turn(idx, salt)}, config)
        return state

    if mode == "async":
        state = asyncio.run(run_async())
    else:
        for idx in range(NUM_TURNS):
            if mode == "stream":
                for _chunk in agent.stream({"messages": _turn(idx, salt)}, config, stream_mode="messages"):
                    pass
                state = agent.get_state(config).values
            else:
                state = agent.invoke({"messages": _turn(idx, salt)}, config)
    messages: list[BaseMessage] = state["messages"]
    return messages


@pytest.mark.parametrize("mode", ["sync", "async", "stream"])
def test_create_agent_is_served_from_the_edited_cache(
    cpu_server: RunningServer, make_model: Any, sent: list[dict[str, Any]], mode: str
) -> None:
    _flush(cpu_server)
    middleware = LeylineMiddleware(POLICY)
    agent = create_agent(
        make_model(cpu_server, stream_usage=True), [cat], middleware=[middleware], checkpointer=InMemorySaver()
    )
    messages = _run(agent, f"create_agent {mode}", mode)
    conversation = middleware.conversation(f"create_agent {mode}")
    assert len(sent) == NUM_TURNS
    # The first two questions have nothing to evict; from then on each evicts one output.
    assert conversation.telemetry.splices == NUM_TURNS - 2
    assert conversation.telemetry.fallbacks == {}
    assert conversation.telemetry.moved_tokens > 1000
    assert conversation.telemetry.hit_rate is not None
    assert conversation.telemetry.hit_rate > 0.5
    assert sum("[evicted: cat" in str(message["content"]) for message in sent[-1]["messages"]) == NUM_TURNS - 2
    # The graph's own state is whole.
    outputs = [message.content for message in messages if isinstance(message, ToolMessage)]
    assert outputs == [_turn(idx, f"create_agent {mode}")[2].content for idx in range(NUM_TURNS)]


@pytest.mark.parametrize("mode", ["sync", "async", "stream"])
def test_hand_built_graph(cpu_server: RunningServer, make_model: Any, sent: list[dict[str, Any]], mode: str) -> None:
    _flush(cpu_server)
    model = with_leyline(make_model(cpu_server, stream_usage=True).bind_tools([cat]), POLICY)

    async def agent(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", RunnableLambda(lambda state: {"messages": [model.invoke(state["messages"])]}, agent))
    graph.add_edge(START, "agent")
    _run(graph.compile(checkpointer=InMemorySaver()), f"hand built {mode}", mode)
    telemetry = model.conversation(f"hand built {mode}").telemetry
    assert (telemetry.splices, telemetry.fallbacks) == (NUM_TURNS - 2, {})
    assert len(sent) == NUM_TURNS


def test_what_the_user_set_survives_and_the_prompt_ids_are_those_without_us(
    cpu_server: RunningServer, make_model: Any, sent: list[dict[str, Any]]
) -> None:
    extra = {
        "chat_template_kwargs": {"enable_thinking": False},
        "custom_params": {"thinking_budget": 7},
        "cache_salt": "mine",
        "return_prompt_token_ids": True,
    }
    middleware = LeylineMiddleware("none")
    middleware_with_note = LeylineMiddleware()
    bodies = []
    for used in ([middleware_with_note], [middleware], []):
        sent.clear()
        model = make_model(cpu_server, extra_body=extra, default_headers={"x-mine": "1"})
        agent = create_agent(model, [cat], middleware=used)
        agent.invoke({"messages": _turn(1, "survives")}, {"configurable": {"thread_id": "survives"}})
        bodies.append(sent[0])
    noted, none, plain = bodies
    assert none == plain
    assert "leyline" in noted["custom_params"]
    assert noted["custom_params"]["thinking_budget"] == 7
    assert {key: noted[key] for key in extra if key != "custom_params"} == {
        key: value for key, value in extra.items() if key != "custom_params"
    }
    ids = [
        httpx.post(cpu_server.url + "/v1/chat/completions", json=body, timeout=120).json()["choices"][0]
        for body in (noted, plain)
    ]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"]
    assert len(ids[0]["prompt_token_ids"]) > 500


def test_an_unpatched_server_gives_the_answers_of_a_plain_client_and_one_warning(
    unpatched_server: RunningServer,
    make_model: Any,
    sent: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    middleware = LeylineMiddleware(POLICY)
    agent = create_agent(make_model(unpatched_server), [cat], middleware=[middleware], checkpointer=InMemorySaver())
    with caplog.at_level(logging.WARNING, logger="leyline_agent"):
        messages = _run(agent, "unpatched", "sync")
    assert len([record for record in caplog.records if record.name == "leyline_agent"]) == 1
    telemetry = middleware.conversation("unpatched").telemetry
    # Then it is sent no more notes.
    assert telemetry.fallbacks == {"unsupported_server": 3}
    answers = [message.content for message in messages if isinstance(message, AIMessage) and not message.tool_calls]
    _flush(unpatched_server)
    for body, answer in zip(list(sent), answers, strict=True):
        plain = {key: value for key, value in body.items() if key != "custom_params"}
        response = httpx.post(unpatched_server.url + "/v1/chat/completions", json=plain, timeout=120).json()
        assert (response["choices"][0]["message"]["content"] or "") == answer


def _chat_turns(client: Client, conversation: Conversation, salt: str) -> list[Any]:
    """A plain agent loop whose answers are the recorded calls, so that they render as they were."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    replies = []
    for idx in range(NUM_TURNS):
        output = "\n".join(f"{salt} line {line} of file {idx}" for line in range(40))
        messages.append({"role": "user", "content": f"Look at file {idx}."})
        call = {"name": "cat", "arguments": json.dumps({"path": f"{idx}.py"})}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"c{idx}", "type": "function", "function": call}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": f"c{idx}", "content": output})
        # One token: more would often be tokenized otherwise than they were generated, and the plans would differ.
        reply = client.chat(conversation, messages, model=SERVED_MODEL_NAME, temperature=0, max_tokens=1)
        replies.append(reply)
        messages.append(reply.message)
    return replies


def test_both_plans_give_the_same_rows(cpu_server: RunningServer) -> None:
    """Directives made by the client with the server's tokenizer, and those that the server makes by itself."""
    seen = []
    for plan in ("server", "client"):
        _flush(cpu_server)
        with closing(ServerTokenizer(cpu_server.url)) as tokenizer, Client(cpu_server.url, timeout=120) as client:
            conversation = Conversation(POLICY, plan=plan, tokenizer=tokenizer)
            replies = _chat_turns(client, conversation, "plans")
        prompt = _prompt_ids(cpu_server, conversation)
        rows = httpx.post(
            cpu_server.url + "/probe", json={"ids": prompt, "conversation": conversation.id}, timeout=120
        ).json()
        outcomes = [
            (reply.outcome.status, reply.outcome.moved_tokens, [(d.start, d.end) for d in reply.outcome.directives])
            for reply in replies
        ]
        seen.append((outcomes, rows["rows"], [reply.message["content"] for reply in replies]))
    assert [status for status, *_ in seen[0][0]].count("spliced") == NUM_TURNS - 2
    assert seen[0] == seen[1]


def _prompt_ids(server: RunningServer, conversation: Conversation) -> list[int]:
    """Ids of the last turn's prompt, from the server's own memory of it."""
    body = {"conversation": conversation.id, "last_prompt": True}
    ids: list[int] = httpx.post(server.url + "/probe", json=body, timeout=60).json()["ids"]
    return ids
