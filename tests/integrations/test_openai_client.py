"""Which models are sent a note, and how their answers are heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from pydantic import PrivateAttr

from leyline_agent import Policy
from leyline_agent.integrations.chat_turn import ChatRequest
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langgraph import with_leyline
from leyline_agent.integrations.openai_client import listening, server_of

Make = Callable[..., ChatOpenAI]
HISTORY = [
    HumanMessage("Read."),
    AIMessage("", tool_calls=[{"name": "read", "args": {}, "id": "a"}]),
    ToolMessage("a line\n" * 9, tool_call_id="a"),
    AIMessage("Done."),
    HumanMessage("And?"),
]


class Foreign(FakeListChatModel):
    """A chat model of another kind."""

    _asked: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    def _call(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> str:
        assert not kwargs.get("extra_body")
        self._asked.append(messages)
        return super()._call(messages, *args, **kwargs)

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def test_a_model_without_an_openai_style_client_gets_edited_messages_and_is_named_once(
    stub_old_outputs: Policy, read_tool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Foreign(responses=["x"])
    config: Any = {"configurable": {"thread_id": "t"}}
    with caplog.at_level(logging.WARNING, logger="leyline_agent"):
        model = with_leyline(foreign, stub_old_outputs)
        for _ in range(2):
            assert model.invoke(HISTORY, config).content == "x"
        agent = create_agent(foreign, [read_tool], middleware=[LeylineMiddleware(stub_old_outputs, persist=True)])
        state = agent.invoke({"messages": HISTORY}, config)
    assert [messages[2].content for messages in foreign._asked] == ["[gone]"] * 3
    assert state["messages"][2].content == "[gone]"
    assert [record.message.split(",")[0] for record in caplog.records] == ["got a Foreign"] * 2


def test_a_model_that_is_chosen_at_run_time_gets_no_note(
    server: Any, stub_old_outputs: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    with httpx.Client(transport=httpx.MockTransport(server)) as client:
        chosen = init_chat_model(
            "m",
            model_provider="openai",
            configurable_fields=("model",),
            base_url="http://server/v1",
            api_key="k",
            http_client=client,
        )
        assert with_leyline(chosen, stub_old_outputs).invoke(HISTORY).content == "done"
    [body] = server.bodies
    assert body["messages"][2]["content"] == "[gone]"
    assert "custom_params" not in body
    assert "got a _ConfigurableModel" in caplog.text


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a chat model"):
        with_leyline("gpt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model\.update"):
        with_leyline(Foreign(responses=["x"]), persist=True)


@pytest.mark.parametrize(
    ("options", "server"),
    [
        ({"base_url": "http://127.0.0.1:30000/v1"}, "http://127.0.0.1:30000/v1"),
        ({"base_url": "https://gateway.example/models/v1"}, "https://gateway.example/models/v1"),
        ({"base_url": "https://me:secret@gateway.example/v1?k=1"}, "https://gateway.example/v1"),
        ({}, None),
        ({"base_url": "https://eu.api.openai.com/v1"}, None),
        ({"base_url": "https://notopenai.com/v1"}, "https://notopenai.com/v1"),
    ],
    ids=["sglang", "gateway", "credentials", "default", "OpenAI's", "not OpenAI's"],
)
def test_openais_own_servers_get_no_note(
    options: dict[str, Any], server: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    with httpx.Client() as client:
        assert server_of(ChatOpenAI(model="m", api_key="k", http_client=client, **options)) == server


def test_azure_gets_no_note() -> None:
    with httpx.Client() as client:
        model = AzureChatOpenAI(
            azure_endpoint="https://mine.openai.azure.com",
            api_version="2024-10-21",
            azure_deployment="m",
            api_key="k",  # type: ignore[arg-type]
            http_client=client,
        )
        assert server_of(model) is None


@pytest.mark.parametrize(
    ("options", "settings"),
    [({"use_responses_api": True}, {}), ({"model": "gpt-5-codex"}, {}), ({}, {"reasoning": {"effort": "low"}})],
    ids=["option", "model", "call"],
)
def test_the_responses_api_gets_no_note(make_model: Make, options: dict[str, Any], settings: dict[str, Any]) -> None:
    model = make_model(**{key: value for key, value in options.items() if key != "model"})
    model.model_name = options.get("model", "m")
    request = ChatRequest(model, HISTORY, settings)
    assert request.server(request.body([])) is None
    plain = ChatRequest(make_model(), HISTORY, {})
    assert plain.server(plain.body([])) == "http://server/v1"


async def test_calls_at_once_hear_each_its_own_answer() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"x-for": request.headers["x-smg-routing-key"]}, json={})

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport) as connection:
        client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="k", http_client=connection, max_retries=0)
        model = type("Model", (), {"async_client": client.chat.completions})()

        async def call(key: str) -> Any:
            with listening(model, key) as heard:
                await asyncio.sleep(0)
                for other in (key, "nobody"):
                    await client.chat.completions.create(
                        model="m", messages=[], extra_headers={"x-smg-routing-key": other}
                    )
            return heard

        heard = await asyncio.gather(*(call(f"key {idx}") for idx in range(5)))
        assert [(one.headers or {}).get("x-for") for one in heard] == [f"key {idx}" for idx in range(5)]
        assert all(one.is_success and one.is_connected for one in heard)
        assert len(connection.event_hooks["response"]) == 1
