"""What LangGraph does with a thread, on the live CPU server: branches, subgraphs, checkpoints, interrupts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from evals.serving import RunningServer
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langgraph import with_leyline

from .live import NUM_LINES, POLICY, Models, answer_of, cat, edited, models, said, thread, turn

pytestmark = pytest.mark.sglang


@pytest.fixture
def live() -> Iterator[Models]:
    with models() as made:
        yield made


def test_parallel_branches_of_a_thread_do_not_prefill_each_others_turns_away(
    cpu_server: RunningServer, live: Models
) -> None:
    """Two branches of one `Send`, each with a history of its own, that call the model at the same time."""
    num_calls = 5
    model = with_leyline(live.chat(cpu_server), POLICY)
    together = threading.Barrier(2, timeout=60)

    def call(state: MessagesState) -> Any:
        together.wait()
        return {"messages": [model.invoke(state["messages"])]}

    def look(state: MessagesState) -> Any:
        name = str(state["messages"][0].content)
        return {"messages": turn(sum(isinstance(m, ToolMessage) for m in state["messages"]), name)}

    def more(state: MessagesState) -> str:
        return "look" if sum(isinstance(m, ToolMessage) for m in state["messages"]) < num_calls else END

    branch: Any = StateGraph(MessagesState)
    branch.add_node("look", look)
    branch.add_node("call", call)
    branch.add_edge(START, "look")
    branch.add_edge("look", "call")
    branch.add_conditional_edges("call", more, ["look", END])
    worker = branch.compile()
    histories: dict[str, list[BaseMessage]] = {}

    def work(state: MessagesState) -> Any:
        name = str(state["messages"][0].content)
        histories[name] = worker.invoke({"messages": state["messages"]})["messages"]
        return {"messages": []}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("work", work)
    graph.add_conditional_edges(
        START, lambda state: [Send("work", {"messages": [HumanMessage(name)]}) for name in ("left", "right")], ["work"]
    )
    graph.compile(checkpointer=InMemorySaver()).invoke({"messages": []}, thread("fork"))

    for name, history in histories.items():
        [last] = [sent for sent in live.sent if said(sent.body["messages"]) == edited(history[:-1])]
        assert last.body["messages"][0]["content"] == name
        assert last.num_evicted == num_calls - 2
    assert set(live.modes) == {"amortize"}
    conversations = model.conversations("fork")
    assert len(conversations) == 2
    assert [conversation.telemetry.fallbacks for conversation in conversations] == [{}, {}]
    assert [conversation.telemetry.splices for conversation in conversations] == [num_calls - 2] * 2


def test_a_subgraph_and_its_parent_are_conversations_of_their_own(cpu_server: RunningServer, live: Models) -> None:
    """They share thread id and model, but not what they say to it."""
    # Each question takes three turns here: the call that it brings, and two answers.
    model = with_leyline(live.chat(cpu_server), POLICY.with_turns(6))

    def node(prompt: str) -> Any:
        return lambda state: {"messages": [model.invoke([SystemMessage(prompt), *state["messages"]])]}

    inner: Any = StateGraph(MessagesState)
    inner.add_node("agent", node("Look closely."))
    inner.add_edge(START, "agent")
    outer: Any = StateGraph(MessagesState)
    outer.add_node("agent", node("Be brief."))
    outer.add_node("expert", inner.compile())
    outer.add_edge(START, "agent")
    outer.add_edge("agent", "expert")
    graph = outer.compile(checkpointer=InMemorySaver())
    for idx in range(4):
        graph.invoke({"messages": turn(idx, "subgraph")}, thread("subgraph"))

    by_prompt: dict[str, list[Any]] = {}
    for sent in live.sent:
        by_prompt.setdefault(sent.body["messages"][0]["content"], []).append(sent)
    assert {prompt: len(calls) for prompt, calls in by_prompt.items()} == {"Be brief.": 4, "Look closely.": 4}
    assert set(live.modes) == {"amortize"}
    assert len({sent.note["conversation"] for sent in live.sent}) == 2
    for calls in by_prompt.values():
        assert [call.note.get("base") for call in calls] == [None, *(call.note["turn"] for call in calls[:-1])]
        assert calls[-1].num_evicted > 0
    for conversation in model.conversations("subgraph"):
        assert conversation.telemetry.splices > 0
        assert conversation.telemetry.fallbacks == {}


def test_time_travel_to_before_an_edit_gives_a_plain_servers_answer(
    cpu_server: RunningServer, unpatched_server: RunningServer, live: Models
) -> None:
    middleware = LeylineMiddleware(POLICY)
    agent = create_agent(live.chat(cpu_server), [cat], middleware=[middleware], checkpointer=InMemorySaver())
    for idx in range(4):
        agent.invoke({"messages": turn(idx, "travel")}, thread("travel"))
    assert live.sent[-1].num_evicted == 2
    history = [snapshot for snapshot in agent.get_state_history(thread("travel")) if not snapshot.next]
    # After the first question: nothing had been evicted.
    then = history[-1]
    assert sum(isinstance(message, ToolMessage) for message in then.values["messages"]) == 1

    state = agent.invoke({"messages": [HumanMessage("Once more, from here.")]}, then.config)
    sent = live.sent[-1]
    assert (live.modes[-1], sent.num_evicted) == ("reprefill", 0)
    assert said(sent.body["messages"]) == edited(state["messages"][:-1])
    assert state["messages"][-1].content == answer_of(unpatched_server, sent)

    # The branch that was left is still one to go on from; it costs one re-prefill, and then both are kept.
    state = agent.invoke({"messages": turn(4, "travel")}, history[0].config)
    assert said(live.sent[-1].body["messages"]) == edited(state["messages"][:-1])
    assert state["messages"][-1].content == answer_of(unpatched_server, live.sent[-1])
    assert len(middleware.conversations("travel")) == 2
    agent.invoke({"messages": turn(5, "travel")}, thread("travel"))
    outcome = middleware.conversation("travel").last_outcome
    assert outcome is not None
    assert outcome.status == "spliced"


_RESUMED = """
import json, sqlite3, sys
from langchain.agents import create_agent
from langgraph.checkpoint.sqlite import SqliteSaver
from leyline_agent.integrations.langchain import LeylineMiddleware
from tests.integrations.live import POLICY, cat, models, thread, turn

with models() as live, SqliteSaver.from_conn_string(sys.argv[2]) as saver:
    middleware = LeylineMiddleware(POLICY, key=b"0123456789abcdef")
    agent = create_agent(live.chat(sys.argv[1]), [cat], middleware=[middleware], checkpointer=saver)
    outcomes = []
    for idx in (3, 4):
        state = agent.invoke({"messages": turn(idx, "resumed")}, thread("resumed"))
        outcomes.append(middleware.conversation("resumed").last_outcome.status)
    answers = [m.content for m in state["messages"] if m.type == "ai" and not m.tool_calls][-2:]
    print(json.dumps({"bodies": [s.body for s in live.sent], "outcomes": outcomes, "answers": answers}))
"""


def test_a_thread_resumed_in_a_new_process_goes_on(
    cpu_server: RunningServer, unpatched_server: RunningServer, live: Models, tmp_path: Path
) -> None:
    file = str(tmp_path / "checkpoints.sqlite")
    with SqliteSaver.from_conn_string(file) as saver:
        agent = create_agent(
            live.chat(cpu_server),
            [cat],
            middleware=[LeylineMiddleware(POLICY, key=b"0123456789abcdef")],
            checkpointer=saver,
        )
        for idx in range(3):
            agent.invoke({"messages": turn(idx, "resumed")}, thread("resumed"))
    resumed = subprocess.run(
        [sys.executable, "-c", _RESUMED, cpu_server.url, file],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert resumed.returncode == 0, resumed.stderr
    told = json.loads(resumed.stdout)
    # What it cannot know of is prefilled; from then on it splices.
    assert told["outcomes"] == ["reprefill", "spliced"]
    here = live.sent[-1]
    there = [type(here)(cpu_server.url, body) for body in told["bodies"]]
    assert {sent.note["conversation"] for sent in [*live.sent, *there]} == {here.note["conversation"]}
    assert told["answers"][0] == answer_of(unpatched_server, there[0])
    with SqliteSaver.from_conn_string(file) as saver:
        saved = saver.get(thread("resumed"))
    assert saved is not None
    history = saved["channel_values"]["messages"]
    assert said(there[1].body["messages"]) == edited(history[:-1])
    assert there[1].num_evicted == 3


def test_an_agent_goes_on_after_a_human_has_decided(cpu_server: RunningServer, live: Models) -> None:
    calls = [AIMessage("", tool_calls=[{"name": "cat", "args": {"path": path}, "id": path}]) for path in ("a", "b")]
    middleware = LeylineMiddleware(POLICY)
    agent = create_agent(
        live.scripted(cpu_server, calls),
        [cat],
        middleware=[HumanInTheLoopMiddleware(interrupt_on={"cat": True}), middleware],
        checkpointer=InMemorySaver(),
    )
    change = {"type": "edit", "edited_action": {"name": "cat", "args": {"path": "c"}}}
    asked: list[Any] = [{"messages": turn(0, "human")}]
    asked += [Command(resume={"decisions": [decision]}) for decision in ({"type": "approve"}, change)]
    states = [agent.invoke(question, thread("human")) for question in asked]
    assert ["__interrupt__" in state for state in states] == [True, True, False]
    outputs = [str(message.content) for message in states[-1]["messages"] if isinstance(message, ToolMessage)]
    assert outputs[1] == "contents of a"
    assert outputs[2].endswith("contents of c")
    # LangChain leaves the call as the model made it, and tells of the change in its result: nothing is edited.
    assert live.modes == ["amortize"] * 3
    assert said(live.sent[-1].body["messages"]) == edited(states[-1]["messages"][:-1])
    assert len(middleware.conversations("human")) == 1


def test_what_a_human_changed_in_the_state_is_prefilled_again(cpu_server: RunningServer, live: Models) -> None:
    middleware = LeylineMiddleware(POLICY)
    agent = create_agent(live.chat(cpu_server), [cat], middleware=[middleware], checkpointer=InMemorySaver())
    for idx in range(3):
        state = agent.invoke({"messages": turn(idx, "changed")}, thread("changed"))
    wrong = state["messages"][-1]
    agent.update_state(thread("changed"), {"messages": [AIMessage("No: it is 97.", id=wrong.id)]})
    state = agent.invoke({"messages": [HumanMessage("Sure?")]}, thread("changed"))
    assert live.modes == ["amortize"] * 3 + ["reprefill"]
    assert said(live.sent[-1].body["messages"]) == edited(state["messages"][:-1])
    outcome = middleware.conversation("changed").last_outcome
    assert outcome is not None
    assert outcome.status == "reprefill"
    assert len(middleware.conversations("changed")) == 1


def test_a_node_that_is_run_again_after_an_interrupt_stays_in_its_conversation(
    cpu_server: RunningServer, live: Models
) -> None:
    model = with_leyline(live.chat(cpu_server), POLICY)

    def agent(state: MessagesState) -> Any:
        answer = model.invoke(state["messages"])
        interrupt("May I say it?")
        return {"messages": [answer]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_edge(START, "agent")
    app = graph.compile(checkpointer=InMemorySaver())
    for idx in range(3):
        app.invoke({"messages": turn(idx, "again")}, thread("again"))
        state = app.invoke(Command(resume=True), thread("again"))
    assert len(live.sent) == 6
    assert len({sent.note["conversation"] for sent in live.sent}) == 1
    assert said(live.sent[-1].body["messages"]) == edited(state["messages"][:-1])
    assert model.conversation("again").telemetry.fallbacks == {}


def test_11_edits_are_neither_lost_nor_kept_against_expectation_across_a_checkpoint(
    cpu_server: RunningServer, live: Models
) -> None:
    """langchain#39265, agent-framework#8099: by default the checkpoint holds the whole history, with `persist` what
    was edited; a new agent on either sends the same prompt."""
    prompts, outputs = [], []
    for persist in (False, True):
        saver, name = InMemorySaver(), f"checkpoint {persist}"
        for turns in (range(3), range(3, 4)):
            middleware = LeylineMiddleware(POLICY, persist=persist)
            agent = create_agent(live.chat(cpu_server), [cat], middleware=[middleware], checkpointer=saver)
            for idx in turns:
                live.sent.clear()
                state = agent.invoke({"messages": turn(idx, "checkpoint")}, thread(name))
            prompts.append([message for message in said(live.sent[-1].body["messages"]) if message[0] == "tool"])
        outputs.append([message.content for message in state["messages"] if isinstance(message, ToolMessage)])
    whole = [str(turn(idx, "checkpoint")[2].content) for idx in range(4)]
    stub = f"[evicted: cat, {NUM_LINES} lines]"
    assert outputs == [whole, [stub] * 2 + whole[2:]]
    assert prompts[:2] == prompts[2:]
    assert [message[1] for message in prompts[1]] == [stub] * 2 + whole[2:]


def test_persisted_edits_are_spliced_as_others_are(cpu_server: RunningServer, live: Models) -> None:
    """The history that comes back is edited already, and no one else has changed it."""
    middleware = LeylineMiddleware(POLICY, persist=True)
    agent = create_agent(live.chat(cpu_server), [cat], middleware=[middleware], checkpointer=InMemorySaver())
    for idx in range(4):
        state = agent.invoke({"messages": turn(idx, "persist")}, thread("persist"))
    assert live.modes == ["amortize"] * 4
    telemetry = middleware.conversation("persist").telemetry
    assert (telemetry.splices, telemetry.fallbacks) == (2, {})
    assert said(live.sent[-1].body["messages"]) == said(_dicts(state["messages"][:-1]))
    assert live.sent[-1].num_evicted == 2


def test_a_node_writes_the_edits_into_the_state_with_update(cpu_server: RunningServer, live: Models) -> None:
    model = with_leyline(live.chat(cpu_server), POLICY)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": model.update(state["messages"])})
    graph.add_edge(START, "agent")
    app = graph.compile(checkpointer=InMemorySaver())
    for idx in range(4):
        state = app.invoke({"messages": turn(idx, "update")}, thread("update"))
    assert live.modes == ["amortize"] * 4
    assert model.conversation("update").telemetry.splices == 2
    assert said(live.sent[-1].body["messages"]) == said(_dicts(state["messages"][:-1]))
    assert not any(isinstance(message, RemoveMessage) for message in state["messages"])


def _dicts(history: list[BaseMessage]) -> Any:
    return convert_to_openai_messages(history)
