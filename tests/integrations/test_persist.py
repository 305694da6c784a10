"""Edits written into the graph's state: what stands there, and what is made of it in the next turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages

from leyline_agent import Conversation, Policy
from leyline_agent.core.messages import messages_from_openai
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langchain_messages import to_openai
from leyline_agent.integrations.langgraph import with_leyline
from leyline_agent.integrations.persist import persist_edits
from leyline_agent.policy import parse_policy

Make = Callable[..., ChatOpenAI]


def _turn(idx: int, num_calls: int = 1) -> list[BaseMessage]:
    calls = [{"name": "read", "args": {"path": "x" * 90}, "id": f"{idx}.{n}"} for n in range(num_calls)]
    outputs = [
        ToolMessage("a line of output\n" * 20, tool_call_id=f"{idx}.{n}", id=f"tool {idx}.{n}", artifact="raw")
        for n in range(num_calls)
    ]
    return [AIMessage("", tool_calls=calls, id=f"call {idx}", name="me"), *outputs]


class Run:
    """A conversation whose caller keeps the edits, as the adapters do."""

    def __init__(self, policy: Policy) -> None:
        self.conversation = Conversation(policy)
        self.state: list[BaseMessage] = [HumanMessage("Go.", id="go")]

    def ask(self, new: list[BaseMessage]) -> Any:
        self.state += new
        parsed = messages_from_openai(to_openai(self.state))
        prepared = self.conversation.prepare({"messages": parsed})
        ids = frozenset(str(message.id) for message in self.state)
        updates, held = persist_edits(self.state, parsed, prepared, ids)
        merged: Any = add_messages(self.state, updates)  # type: ignore[arg-type]
        self.state = list(merged)
        # What is sent is what the state holds from now on.
        assert [message.to_openai() for message in prepared.messages] == to_openai(self.state)
        self.conversation.commit(prepared, {"role": "assistant", "content": "so"}, expects_outcome=False, held=held)
        self.state.append(AIMessage("so", id=f"answer {len(self.state)}"))
        return prepared

    def texts(self, kind: type[BaseMessage] = ToolMessage) -> list[Any]:
        return [message.content for message in self.state if isinstance(message, kind)]


def _rule(action: str, select: str = "role: tool, older_than: {turns: 2}") -> str:
    return f"version: 1\nrules:\n  - {{name: old, select: {{{select}}}, {action}}}\n"


@pytest.mark.parametrize(
    "action",
    [
        'replace: "[evicted: {tool}, {lines} lines]"',
        "drop: true",
        'collapse: "[{turns} turns]"',
        "truncate: {head: 2 lines, tail: 1 line}",
        "clear_arguments: {longer_than: 50 chars}",
    ],
)
def test_what_is_kept_edited_is_left_alone_and_explains_itself(action: str) -> None:
    """Each turn's note says amortize, and the history that came of it is not edited again."""
    run = Run(parse_policy(_rule(action)))
    notes = []
    for idx in range(5):
        prepared = run.ask(_turn(idx, num_calls=2))
        notes.append((prepared.note.mode, prepared.unexplained))
    assert notes == [("amortize", ())] * 5
    after = to_openai(run.state)
    again = Conversation(parse_policy(_rule(action))).prepare({"messages": after})
    assert [edit for edit in again.edits if edit.start < 3] == []


def test_a_stub_is_not_counted_as_what_it_stands_for() -> None:
    run = Run(parse_policy(_rule('replace: "[{lines} lines, {tokens} tokens]"')))
    for idx in range(4):
        run.ask(_turn(idx))
    assert run.texts()[:2] == ["[20 lines, 85 tokens]"] * 2
    # A new process, that knows of nothing but the state.
    fresh = Conversation(run.conversation.policy)
    prepared = fresh.prepare({"messages": to_openai(run.state)})
    assert [message.text for message in prepared.messages if message.role == "tool"][:2] == run.texts()[:2]


def test_another_rule_may_go_on_from_what_one_left() -> None:
    policy = parse_policy(
        "version: 1\nrules:\n"
        "  - {name: cut, select: {role: tool, older_than: {turns: 1}}, truncate: {head: 2 lines}}\n"
        '  - {name: gone, select: {role: tool, older_than: {turns: 5}}, replace: "[gone]"}\n'
    )
    run = Run(policy)
    for idx in range(4):
        run.ask(_turn(idx))
    assert run.texts()[0] == "[gone]"
    assert run.texts()[-2].startswith("a line of output\na line of output\n[18 lines")


def test_raw_output_beside_the_stub_goes_and_metadata_stays() -> None:
    run = Run(parse_policy(_rule("clear_arguments: true")))
    for idx in range(4):
        run.ask(_turn(idx))
    cleared = next(message for message in run.state if message.id == "call 0")
    assert isinstance(cleared, AIMessage)
    assert (cleared.name, cleared.tool_calls[0]["args"]) == ("me", {})
    run = Run(parse_policy(_rule('replace: "[gone]"')))
    for idx in range(4):
        run.ask(_turn(idx))
    artifacts = [message.artifact for message in run.state if isinstance(message, ToolMessage)]
    assert artifacts == [None, None, None, "raw"]


def test_what_the_state_does_not_hold_is_edited_in_each_request() -> None:
    messages = [*_turn(0), *_turn(1)]
    parsed = messages_from_openai(to_openai(messages))
    prepared = Conversation(parse_policy(_rule('replace: "[x]"', "role: tool"))).prepare({"messages": parsed})
    # The first turn was put in by another middleware.
    updates, held = persist_edits(messages, parsed, prepared, frozenset({"call 1", "tool 1.0"}))
    assert [(message.id, message.content) for message in updates] == [("tool 1.0", "[x]")]
    assert list(held.prompt.covers) == [1]


def test_a_removal_is_asked_of_the_reducer() -> None:
    messages = [HumanMessage("Go.", id="go"), *_turn(0), *_turn(1), AIMessage("so", id="so")]
    parsed = messages_from_openai(to_openai(messages))
    prepared = Conversation(parse_policy(_rule("drop: true", "role: tool"))).prepare({"messages": parsed})
    updates, _ = persist_edits(messages, parsed, prepared, frozenset(str(message.id) for message in messages))
    assert {message.id for message in updates if isinstance(message, RemoveMessage)} == {
        message.id for message in messages[1:5]
    }


def test_what_is_kept_edited_can_be_forgotten_later() -> None:
    """Ids of the edits that took a message away are known by what stands in its place, too."""
    run = Run(parse_policy(_rule('replace: "[gone]"')))
    for idx in range(4):
        run.ask(_turn(idx))
    stub = next(message for message in run.state if isinstance(message, ToolMessage))
    run.conversation.edit(to_openai([stub])[0], "", mode="forget")
    prepared = run.ask([HumanMessage("And?", id="and")])
    # No outcome told the ids, so all are named.
    assert (prepared.note.mode, prepared.note.forget) == ("forget", "all")


def test_what_is_written_into_the_state_is_not_streamed(
    make_model: Make, read_tool: Any, stub_old_outputs: Policy
) -> None:
    streamed = []
    for persist in (False, True):
        middleware = LeylineMiddleware(stub_old_outputs, persist=persist)
        agent = create_agent(make_model(), [read_tool], middleware=[middleware], checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "t"}}
        asked: Any = {"messages": [{"role": "user", "content": "Read two files."}]}
        streamed.append(
            [(chunk.type, chunk.content) for chunk, _ in agent.stream(asked, config, stream_mode="messages")]
        )
    assert streamed[0] == streamed[1]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_middleware_writes_the_state_and_the_notes_chain(
    server: Any, make_model: Make, read_tool: Any, stub_old_outputs: Policy, asynchronous: bool
) -> None:
    middleware = LeylineMiddleware(stub_old_outputs, persist=True)
    agent = create_agent(
        make_model(), [read_tool], system_prompt="Be brief.", middleware=[middleware], checkpointer=InMemorySaver()
    )
    config: Any = {"configurable": {"thread_id": "t"}}
    for question in ("Read two files.", "And?"):
        asked: Any = {"messages": [{"role": "user", "content": question}]}
        state = await agent.ainvoke(asked, config) if asynchronous else agent.invoke(asked, config)
    contents = [message.content for message in state["messages"] if isinstance(message, ToolMessage)]
    assert contents == ["[gone]", "[gone]"]
    assert [note.get("mode", "amortize") for note in server.notes] == ["amortize"] * 4
    assert [note.get("base") for note in server.notes] == [None, *(note["turn"] for note in server.notes[:-1])]


@pytest.mark.parametrize("at_once", [False, True], ids=["in steps", "at once"])
@pytest.mark.parametrize("other", ["trims", "persists"])
def test_no_other_node_of_the_same_step_may_remove_what_is_kept_edited(
    make_model: Make, at_once: bool, other: str
) -> None:
    """LangGraph merges the updates of a step one after the other, and refuses to remove what is gone."""
    model = with_leyline(make_model(), parse_policy(_rule("drop: true", "role: tool, older_than: {turns: 0}")))

    def persists(state: MessagesState) -> dict[str, Any]:
        return {"messages": model.update(state["messages"])}

    def trims(state: MessagesState) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id=message.id) for message in state["messages"] if message.id == "tool 0.0"]}

    graph = StateGraph(MessagesState)
    graph.add_node("first", persists)
    graph.add_node("second", trims if other == "trims" else persists)
    graph.add_edge(START, "first")
    graph.add_edge(START if at_once else "first", "second")
    history = [HumanMessage("Go.", id="go"), *_turn(0), AIMessage("so", id="so"), HumanMessage("And?", id="and")]
    asked: Any = {"messages": history}
    if at_once:
        with pytest.raises(ValueError, match="ID that doesn't exist"):
            graph.compile().invoke(asked)
    else:
        kept = [message.id for message in graph.compile().invoke(asked)["messages"]]
        assert kept[:3] == ["go", "so", "and"]
