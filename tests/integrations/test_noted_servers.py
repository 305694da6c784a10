"""Which servers go on being sent notes, and what stays whole where we fail: on a fake server, with real agents."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableGenerator
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from leyline_agent import ConversationPool, Policy, UnsupportedServerError
from leyline_agent.integrations import chat_turn
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langgraph import LeylineModel, with_leyline
from leyline_agent.noted_server import NotedServer

Make = Callable[..., ChatOpenAI]
CONFIG: Any = {"configurable": {"thread_id": "t"}}
ASK = [HumanMessage("q")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds that adapters made from now on go by."""
    now = [0.0]
    monkeypatch.setattr(chat_turn, "NotedServer", lambda: NotedServer(lambda: now[0]))
    return now


def ask(model: LeylineModel, num_times: int = 1) -> None:
    for _ in range(num_times):
        assert model.invoke(ASK, CONFIG).content == "done"


def noted(server: Any) -> list[bool]:
    """For each request since the last look, whether it had a note."""
    found = ["custom_params" in body for body in server.bodies]
    server.requests.clear()
    return found


class Refusing:
    """The fake server, that refuses requests with a note while it is told to."""

    def __init__(self, server: Any) -> None:
        self.server, self.refuses, self.headers = server, False, {}
        self.words = "unknown field: custom_params"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.refuses and b"custom_params" in request.content:
            self.server.requests.append(request)
            return httpx.Response(400, headers=self.headers, json={"message": self.words, "code": 400})
        answered: httpx.Response = self.server(request)
        return answered


@pytest.fixture
def refusing(server: Any) -> Refusing:
    return Refusing(server)


@pytest.fixture
def model(refusing: Refusing, clock: list[float]) -> Any:
    with httpx.Client(transport=httpx.MockTransport(refusing)) as client:
        chat = ChatOpenAI(model="m", base_url="http://server/v1", api_key="k", http_client=client, max_retries=0)
        yield with_leyline(chat)


def test_a_server_that_has_answered_a_note_is_sent_notes_for_good(
    server: Any, refusing: Refusing, model: LeylineModel
) -> None:
    ask(model)
    refusing.refuses = True
    ask(model)
    refusing.refuses = False
    server.patched = False
    ask(model, 5)
    assert noted(server) == [True, True, False, *[True] * 5]


def test_a_server_that_refuses_notes_gets_none_for_ten_minutes(
    server: Any, refusing: Refusing, model: LeylineModel, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    refusing.refuses = True
    with caplog.at_level(logging.WARNING, logger="leyline_agent"):
        ask(model, 2)
        clock[0] = 599.0
        ask(model)
        assert noted(server) == [True, False, False, False]
        clock[0] = 600.0
        refusing.refuses = False
        ask(model, 2)
    assert noted(server) == [True, True]
    assert [record.message.split(" ", 1)[1][:7] for record in caplog.records] == ["refuses"]


def test_what_the_server_itself_says_of_a_request_is_not_asked_again(
    server: Any, refusing: Refusing, model: LeylineModel
) -> None:
    refusing.refuses, refusing.headers = True, {"x-leyline": '{"status":"unchanged"}'}
    with pytest.raises(openai.BadRequestError):
        ask(model)
    refusing.refuses = False
    ask(model)
    assert noted(server) == [True, True]


def test_a_server_that_never_gives_an_outcome_gets_three_notes_and_one_each_ten_minutes(
    server: Any, model: LeylineModel, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    server.patched = False
    with caplog.at_level(logging.INFO, logger="leyline_agent"):
        ask(model, 5)
        # Without notes it is the same conversation.
        [conversation] = model.conversations("t")
        assert conversation.telemetry.fallbacks == {"unsupported_server": 3}
        assert noted(server) == [True, True, True, False, False]
        clock[0] = 600.0
        ask(model, 2)
        assert noted(server) == [True, False]
        clock[0], server.patched = 1200.0, True
        ask(model)
        server.patched = False
        ask(model, 5)
    assert noted(server) == [True] * 6
    assert model.conversations("t") == [conversation]
    # The conversation's warning, and when notes stopped.
    assert [record.levelname for record in caplog.records if record.name == "leyline_agent"] == [
        "WARNING",
        "INFO",
        "INFO",
    ]


def test_without_notes_edits_go_on_and_the_next_note_names_the_last_noted_turn(
    server: Any, make_model: Make, stub_old_outputs: Policy, clock: list[float], read_tool: Any
) -> None:
    server.patched = False
    middleware = LeylineMiddleware(stub_old_outputs)
    agent = create_agent(make_model(), [read_tool], middleware=[middleware], checkpointer=InMemorySaver())
    for _ in range(3):
        agent.invoke({"messages": [HumanMessage("Read two files.")]}, CONFIG)
    assert ["custom_params" in body for body in server.bodies] == [True] * 3 + [False] * 2
    assert [message["content"] for message in server.bodies[-1]["messages"] if message["role"] == "tool"] == [
        "[gone]"
    ] * 2
    last = json.loads(server.bodies[2]["custom_params"]["leyline"])
    clock[0], server.patched = 600.0, True
    agent.invoke({"messages": [HumanMessage("And?")]}, CONFIG)
    note = json.loads(server.bodies[-1]["custom_params"]["leyline"])
    assert (note["base"], note["conversation"]) == (last["turn"], last["conversation"])


def test_with_strict_a_server_without_the_plugin_raises_each_time(server: Any, make_model: Make) -> None:
    server.patched = False
    model = with_leyline(make_model(), strict=True)
    for _ in range(5):
        with pytest.raises(UnsupportedServerError):
            model.invoke(ASK, CONFIG)


def test_servers_are_known_each_by_itself() -> None:
    turns = chat_turn.ChatTurns(ConversationPool(), strict=False)
    turns.refused("a")
    assert [turns._server(name).takes_notes for name in "ab"] == [False, True]


def test_an_error_about_something_else_is_not_asked_again_where_a_note_was_answered(
    server: Any, refusing: Refusing, model: LeylineModel
) -> None:
    ask(model)
    refusing.refuses, refusing.words = True, "the prompt is too long"
    with pytest.raises(openai.BadRequestError, match="too long"):
        ask(model)
    assert noted(server) == [True, True]


UNREADABLE = [HumanMessage([{"type": "file", "url": "http://x/a.pdf"}])]


@pytest.mark.parametrize("policy", ["none", None], ids=["policy none", "no policy"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_messages_that_we_cannot_read_are_sent_as_they_came(
    policy: str | None, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[list[BaseMessage]] = []

    class Model(GenericFakeChatModel):
        def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Any:
            sent.append(messages)
            return super()._generate(messages, *args, **kwargs)

    chat = Model(messages=iter(AIMessage("fine") for _ in range(9)))
    middleware = LeylineMiddleware(policy)
    agent = create_agent(chat, [], middleware=[middleware])
    model = with_leyline(chat, policy)
    asked: Any = {"messages": UNREADABLE}
    with caplog.at_level(logging.WARNING, logger="leyline_agent"):
        for _ in range(2):
            if asynchronous:
                state, answer = await agent.ainvoke(asked, CONFIG), await model.ainvoke(UNREADABLE, CONFIG)
            else:
                state, answer = agent.invoke(asked, CONFIG), model.invoke(UNREADABLE, CONFIG)
            assert (state["messages"][-1].content, answer.content) == ("fine", "fine")
    assert [messages[0].content for messages in sent] == [UNREADABLE[0].content] * 4
    # Once for each adapter: what and where, without the message.
    assert len(caplog.records) == 2
    assert "ValueError of ours" in caplog.text
    assert "langchain_messages.py" in caplog.text
    assert "a.pdf" not in caplog.text


def test_a_model_error_is_the_users_own(make_model: Make) -> None:
    class Broken(GenericFakeChatModel):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with_leyline(Broken(messages=iter(()))).invoke(UNREADABLE)


@pytest.mark.parametrize("kept", [False, True], ids=["invoke", "update"])
def test_an_answer_that_we_cannot_read_is_returned(
    server: Any, make_model: Make, monkeypatch: pytest.MonkeyPatch, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_leyline(make_model())

    text = " ".join(["a", "secret"])

    def fail(*args: Any) -> None:
        raise LookupError(text)

    monkeypatch.setattr(chat_turn, "read_outcome", fail)
    for _ in range(2):
        answer = model.update(ASK, CONFIG)[-1] if kept else model.invoke(ASK, CONFIG)
        assert answer.content == "done"
    assert "done" in [chunk.content for chunk in model.stream(ASK, CONFIG)]
    assert "LookupError of ours" in caplog.text
    assert text not in caplog.text
    assert all(note.get("base") is None for note in server.notes)


def test_pieces_that_make_no_answer_are_streamed_all_the_same() -> None:
    def pieces(asked: Any) -> Any:
        list(asked)
        yield AIMessage("one")
        yield AIMessage("two")

    assert [piece.content for piece in with_leyline(RunnableGenerator(pieces)).stream("q")] == ["one", "two"]


def test_a_connection_that_cannot_be_heard_is_used_all_the_same(
    server: Any, make_model: Make, stub_old_outputs: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise LookupError

    monkeypatch.setattr(chat_turn, "listening", fail)
    assert with_leyline(make_model(), stub_old_outputs).invoke(ASK, CONFIG).content == "done"
