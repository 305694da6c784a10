"""Hand-built graphs on a fake server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from leyline_agent import Policy
from leyline_agent.integrations.langgraph import LeylineModel, with_leyline

Make = Callable[..., ChatOpenAI]
ASK: Any = {"messages": [{"role": "user", "content": "Read two files."}]}
CONFIG: Any = {"configurable": {"thread_id": "t"}}


def graph_of(model: Any, read_tool: Any) -> Any:
    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def agent_async(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", RunnableLambda(agent, agent_async))
    graph.add_node("tools", ToolNode([read_tool]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "agent")
    return graph.compile()


@pytest.fixture
def model(make_model: Make, read_tool: Any, stub_old_outputs: Policy) -> LeylineModel:
    return with_leyline(make_model().bind_tools([read_tool]), stub_old_outputs)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_graph_sends_edited_messages_and_keeps_its_state(
    server: Any, model: LeylineModel, make_model: Make, read_tool: Any, asynchronous: bool
) -> None:
    plain = graph_of(make_model().bind_tools([read_tool]), read_tool).invoke(ASK, CONFIG)
    server.requests.clear()
    graph = graph_of(model, read_tool)
    state = await graph.ainvoke(ASK, CONFIG) if asynchronous else graph.invoke(ASK, CONFIG)
    assert server.bodies[2]["messages"][2]["content"] == "[gone]"
    first, second, third = server.notes
    assert (first.get("base"), second["base"], third["base"]) == (None, first["turn"], second["turn"])
    assert [m.model_dump(exclude={"id"}) for m in state["messages"]] == [
        m.model_dump(exclude={"id"}) for m in plain["messages"]
    ]
    assert model.conversation("t").telemetry.splices == 3


def test_streaming_graph_sees_the_outcome(server: Any, model: LeylineModel, read_tool: Any) -> None:
    chunks = list(graph_of(model, read_tool).stream(ASK, CONFIG, stream_mode="messages"))
    assert any(chunk.content == "done" for chunk, _ in chunks)
    assert all(body["stream"] for body in server.bodies)
    assert (model.conversation("t").telemetry.turns, model.conversation("t").telemetry.fallbacks) == (3, {})


def test_threads_are_conversations_and_no_thread_is_found_by_its_messages(
    server: Any, model: LeylineModel, read_tool: Any
) -> None:
    graph = graph_of(model, read_tool)
    for config in (CONFIG, {"configurable": {"thread_id": "u"}}, {}):
        graph.invoke(ASK, config)
    ids = [note["conversation"] for note in server.notes]
    assert ids == [i for i in dict.fromkeys(ids) for _ in range(3)]
    assert len(set(ids)) == 3


def test_scrub_reaches_the_notes(server: Any, make_model: Make, read_tool: Any, forget_old_outputs: Policy) -> None:
    model = with_leyline(make_model().bind_tools([read_tool]), forget_old_outputs, scrub=True)
    graph_of(model, read_tool).invoke(ASK, CONFIG)
    assert [(note.get("mode"), note.get("scrub")) for note in server.notes] == [(None, None)] * 2 + [("forget", True)]


def test_bound_and_called_settings_survive(server: Any, make_model: Make, read_tool: Any) -> None:
    bare = make_model(extra_body={"top_k": 1}).bind_tools(
        [read_tool], extra_body={"top_k": 2}, extra_headers={"x-a": "1"}
    )
    extra = {"chat_template_kwargs": {"t": 1}, "custom_params": {"thinking_budget": 4}}
    for kwargs in ({}, {"extra_body": extra}):
        server.requests.clear()
        bare.invoke("hello", **kwargs)
        with_leyline(bare).invoke("hello", **kwargs)
        plain, ours = server.bodies
        assert ours["custom_params"].pop("leyline")
        assert ours == {"custom_params": {}, **plain}
        assert server.requests[1].headers["x-a"] == "1"
