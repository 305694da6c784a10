"""Other middleware, other models and other ways to answer, on the live CPU server."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
)
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain.chat_models import init_chat_model
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai.chat_models.base import BaseChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, PrivateAttr
from tokenizers import Tokenizer

from evals.serving import SERVED_MODEL_NAME, RunningServer, free_port
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langgraph import with_leyline

from .live import POLICY, Models, cat, edited, models, said, thread, turn

pytestmark = pytest.mark.sglang

NUM_QUESTIONS = 4


@pytest.fixture
def live() -> Iterator[Models]:
    with models() as made:
        yield made


def _ask(agent: Any, name: str, num_questions: int = NUM_QUESTIONS) -> list[BaseMessage]:
    for idx in range(num_questions):
        state = agent.invoke({"messages": turn(idx, name)}, thread(name))
    messages: list[BaseMessage] = state["messages"]
    return messages


def _agent(model: Any, *middleware: Any, **options: Any) -> Any:
    return create_agent(model, [cat], middleware=middleware, checkpointer=InMemorySaver(), **options)


def test_policy_none_is_the_unwrapped_agent_token_for_token(cpu_server: RunningServer, live: Models) -> None:
    runs = []
    for middleware in ([], [LeylineMiddleware("none")]):
        live.sent.clear()
        messages = _ask(_agent(live.chat(cpu_server), *middleware), "none")
        runs.append(([sent.body for sent in live.sent], [(m.type, m.content) for m in messages]))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) == NUM_QUESTIONS


class _Heard(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.told: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.told.append(data)

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("start")

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.events.append("end")
        self.metadata = response.generations[0][0].message.response_metadata


def test_callbacks_see_what_they_see_without_us(cpu_server: RunningServer, live: Models) -> None:
    seen = []
    for middleware in ([], [LeylineMiddleware(POLICY)]):
        of_model, of_run = _Heard(), _Heard()
        agent = _agent(live.chat(cpu_server, callbacks=[of_model]), *middleware)
        agent.invoke({"messages": turn(0, "callbacks")}, {**thread("callbacks"), "callbacks": [of_run]})
        seen.append([of_model.events, of_run.events, *map(sorted, (of_model.metadata, of_run.metadata))])
    assert seen[0] == seen[1]
    assert seen[0][:2] == [["start", "end"]] * 2
    # And beside it, what the server did.
    assert of_model.told == []
    assert [told["leyline.status"] for told in of_run.told] == ["unchanged"]
    assert of_run.told[0]["leyline.prompt_tokens"] > of_run.told[0]["leyline.recomputed_tokens"] >= 0


class _Settings(AgentMiddleware[Any, Any, Any]):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings=self.settings))


@pytest.mark.parametrize("how", ["model_settings", "bound", "called"])
def test_prompt_ids_are_those_without_us_whatever_the_user_set(
    cpu_server: RunningServer, live: Models, how: str
) -> None:
    template = {"chat_template_kwargs": {"enable_thinking": False}, "return_prompt_token_ids": True}
    settings = {"extra_body": template, "extra_headers": {"x-mine": "1"}, "stop": ["never said"]}
    history = turn(0, how)
    bare = live.chat(cpu_server, extra_body={"top_k": 5})
    if how == "model_settings":
        for ours in ([], [LeylineMiddleware(POLICY)]):
            _agent(bare, _Settings(**settings), *ours).invoke({"messages": history}, thread(how))
    else:
        bound, called = (bare.bind(**settings), {}) if how == "bound" else (bare, settings)
        for model in (bound, with_leyline(bound, POLICY)):
            model.invoke(history, thread(how), **called)
    without, noted = live.sent
    assert noted.plain == without.body
    assert template.items() <= without.body.items()
    ids = [
        httpx.post(cpu_server.url + "/v1/chat/completions", json=sent.body, timeout=60).json()["choices"][0]
        for sent in (without, noted)
    ]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"]
    assert len(ids[0]["prompt_token_ids"]) > 200


@pytest.mark.parametrize("order", ["before", "after"])
def test_retries(cpu_server: RunningServer, live: Models, order: str) -> None:
    ours, retry = LeylineMiddleware(POLICY), ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    agent = _agent(live.chat(cpu_server), *([retry, ours] if order == "before" else [ours, retry]))
    _ask(agent, f"retry {order}", 3)
    live.refuse_next.append(503)
    state = agent.invoke({"messages": turn(3, f"retry {order}")}, thread(f"retry {order}"))
    answered = live.notes[:3] + live.notes[-1:]
    assert len(live.sent) == 5
    assert [note.get("base") for note in answered] == [None, *(note["turn"] for note in answered[:-1])]
    assert live.modes == ["amortize"] * 5
    assert said(live.sent[-1].body["messages"]) == edited(state["messages"][:-1])
    telemetry = ours.conversation(f"retry {order}").telemetry
    assert (telemetry.turns, telemetry.splices, telemetry.fallbacks) == (4, 2, {})

    # With no more retries left, LangChain answers in the model's place. That is no turn of the server's.
    live.refuse_next += [503, 503]
    state = agent.invoke({"messages": [HumanMessage("And?")]}, thread(f"retry {order}"))
    assert "Model call failed" in state["messages"][-1].content
    agent.invoke({"messages": [HumanMessage("And now?")]}, thread(f"retry {order}"))
    assert live.notes[-1]["base"] == answered[-1]["turn"]
    assert telemetry.turns == 5


@pytest.mark.parametrize("order", ["before", "after"])
def test_fallback_models(cpu_server: RunningServer, live: Models, order: str) -> None:
    """The first server cannot be reached, the second one is ours."""
    ours = LeylineMiddleware(POLICY)
    fallback = ModelFallbackMiddleware(live.chat(cpu_server))
    dead = live.chat(f"http://127.0.0.1:{free_port()}")
    agent = _agent(dead, *([fallback, ours] if order == "before" else [ours, fallback]))
    messages = _ask(agent, f"fallback {order}")
    served = [sent for sent in live.sent if sent.url == cpu_server.url]
    assert len(served) == NUM_QUESTIONS
    assert said(served[-1].body["messages"]) == edited(messages[:-1])
    [spliced] = {c.telemetry.splices for c in ours.conversations(f"fallback {order}") if c.telemetry.turns}
    assert spliced == NUM_QUESTIONS - 2
    # Each server has a conversation of its own, and learns of no other's, where we know which one is asked.
    ids = {(sent.url, sent.note["conversation"]) for sent in live.sent}
    assert len(ids) == 2
    assert len({conversation for _, conversation in ids}) == (2 if order == "before" else 1)


def test_wrapped_models_can_stand_in_for_each_other(cpu_server: RunningServer, live: Models) -> None:
    dead = with_leyline(live.chat(f"http://127.0.0.1:{free_port()}"), POLICY)
    ours = with_leyline(live.chat(cpu_server), POLICY)
    model = dead.with_fallbacks([ours])
    history: list[BaseMessage] = []
    for idx in range(3):
        history += turn(idx, "stand in")
        history.append(model.invoke(history, thread("stand in")))
    assert said(live.sent[-1].body["messages"]) == edited(history[:-1])
    assert ours.conversation("stand in").telemetry.splices == 1


def test_a_server_that_refuses_the_note_is_asked_without_it(
    unpatched_server: RunningServer, live: Models, caplog: pytest.LogCaptureFixture
) -> None:
    live.refuse_next.append(400)
    with caplog.at_level(logging.WARNING, logger="leyline_agent"):
        messages = _ask(_agent(live.chat(unpatched_server), LeylineMiddleware(POLICY)), "refusing")
    assert len(live.sent) == NUM_QUESTIONS + 1
    assert ["custom_params" in sent.body for sent in live.sent] == [True] + [False] * NUM_QUESTIONS
    assert said(live.sent[-1].body["messages"]) == edited(messages[:-1])
    assert len([record for record in caplog.records if "refuses" in record.message]) == 1


class _Reminder(AgentMiddleware[Any, Any, Any]):
    """Puts what time it is at the end of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        self.num_calls += 1
        return handler(request.override(messages=[*request.messages, HumanMessage(f"It is {self.num_calls}:00.")]))


_OTHERS = {
    "context editing": lambda summary: ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=500, keep=1)]),
    "summarization": lambda summary: SummarizationMiddleware(summary, trigger=("messages", 9), keep=("messages", 5)),
    "reminder": lambda summary: _Reminder(),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("other", _OTHERS)
def test_prompts_beside_other_middleware_are_those_without_us(
    cpu_server: RunningServer, live: Models, other: str, order: str
) -> None:
    prompts = []
    for ours in ([], [LeylineMiddleware()]):
        live.sent.clear()
        summary = live.scripted(cpu_server, [AIMessage("What was said.")] * NUM_QUESTIONS)
        middleware: list[Any] = [_OTHERS[other](summary), *ours]
        model = live.scripted(cpu_server, [AIMessage(f"I see {idx}.") for idx in range(NUM_QUESTIONS)])
        _ask(_agent(model, *(middleware if order == "before" else reversed(middleware))), f"{other} {order}")
        prompts.append([sent.plain for sent in live.sent])
        if ours:
            [conversation] = ours[0].conversations(f"{other} {order}")
            assert conversation.telemetry.fallbacks == {}
            assert conversation.telemetry.turns == NUM_QUESTIONS
    assert prompts[0] == prompts[1]


class Verdict(BaseModel):
    """What comes of it."""

    good: bool
    mark: Literal["a", "b"]


def _no_spaces(model_dir: Path) -> dict[str, int]:
    """Keep a random model from filling the room that JSON leaves for spaces."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = {idx: tokenizer.decode([idx], skip_special_tokens=False) for idx in range(tokenizer.get_vocab_size())}
    return {str(idx): -100 for idx, text in texts.items() if text and not text.strip()}


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_structured_output_of_the_provider(
    cpu_server: RunningServer, live: Models, model_dir: Path, streaming: bool
) -> None:
    """The server's grammar makes the answer; the outcome is seen beside it."""
    options = {"extra_body": {"logit_bias": _no_spaces(model_dir)}, "max_tokens": 64, "stream_usage": True}
    ours, name = LeylineMiddleware(POLICY), f"provider {streaming}"
    agent = _agent(live.chat(cpu_server, **options), ours, response_format=ProviderStrategy(Verdict))
    for idx in range(3):
        asked = {"messages": turn(idx, name)}
        if streaming:
            list(agent.stream(asked, thread(name), stream_mode="messages"))
        else:
            agent.invoke(asked, thread(name))
    assert isinstance(agent.get_state(thread(name)).values["structured_response"], Verdict)
    assert [bool(sent.body.get("stream")) for sent in live.sent] == [streaming] * 3
    assert ours.conversation(name).telemetry.splices == 1


def test_structured_output_by_a_tool(cpu_server: RunningServer, live: Models) -> None:
    """The random model writes no call, so its answers are scripted; what is sent is real."""
    made = [
        AIMessage("", tool_calls=[{"name": "Verdict", "args": {"good": True, "mark": "a"}, "id": f"v{idx}"}])
        for idx in range(3)
    ]
    ours = LeylineMiddleware(POLICY)
    agent = _agent(live.scripted(cpu_server, made), ours, response_format=ToolStrategy(Verdict))
    for idx in range(3):
        state = agent.invoke({"messages": turn(idx, "tool")}, thread("tool"))
        assert state["structured_response"] == Verdict(good=True, mark="a")
    assert said(live.sent[-1].body["messages"]) == edited(state["messages"][:-2])
    assert (ours.conversation("tool").telemetry.splices, live.modes) == (1, ["amortize"] * 3)


class OwnClient(BaseChatModel):
    """A chat model as somebody writes it around openai-python."""

    url: str
    _client: Any = PrivateAttr()

    @property
    def client(self) -> openai.OpenAI:
        client: openai.OpenAI = self._client
        return client

    @property
    def _llm_type(self) -> str:
        return "own"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        kwargs.pop("tool_choice", None)
        return self.bind(**kwargs)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        said: Any = convert_to_openai_messages(messages)
        response = self._client.chat.completions.create(
            model=SERVED_MODEL_NAME, messages=said, temperature=0, max_tokens=6, **kwargs
        )
        answer = AIMessage(response.choices[0].message.content or "")
        return ChatResult(generations=[ChatGeneration(message=answer)])


def _own_client(live: Models, server: RunningServer) -> OwnClient:
    model = OwnClient(url=server.url)
    model._client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", http_client=live.client)
    return model


_MODELS: dict[str, Any] = {
    "own client": _own_client,
    "BaseChatOpenAI": lambda live, server: BaseChatOpenAI(**live.options(server)),
    "init_chat_model": lambda live, server: init_chat_model(model_provider="openai", **live.options(server)),
}


@pytest.mark.parametrize("made_by", _MODELS)
def test_any_model_with_an_openai_style_client_is_spliced(
    cpu_server: RunningServer, live: Models, made_by: str
) -> None:
    ours = LeylineMiddleware(POLICY)
    messages = _ask(_agent(_MODELS[made_by](live, cpu_server), ours), made_by)
    telemetry = ours.conversation(made_by).telemetry
    assert (telemetry.turns, telemetry.splices, telemetry.fallbacks) == (NUM_QUESTIONS, NUM_QUESTIONS - 2, {})
    assert said(live.sent[-1].body["messages"]) == edited(messages[:-1])


async def test_a_wrapped_model_streams_by_itself(cpu_server: RunningServer, live: Models) -> None:
    """Without a graph around it, sync and async; no chunk differs in kind from those without us."""
    bare = live.chat(cpu_server, stream_usage=True)
    model = with_leyline(bare, POLICY)
    history: list[BaseMessage] = []
    for idx in range(4):
        history += turn(idx, "stream")
        if idx % 2:
            chunks = list(model.stream(history, thread("stream")))
        else:
            chunks = [chunk async for chunk in model.astream(history, thread("stream"))]
        assert len(chunks) > 2
        history.append(AIMessage("".join(str(chunk.content) for chunk in chunks)))
    telemetry = model.conversation("stream").telemetry
    assert (telemetry.turns, telemetry.splices, telemetry.fallbacks) == (4, 2, {})
    plain = list(bare.stream(history))
    assert [sorted(chunk.response_metadata) for chunk in chunks[:1]] == [sorted(plain[0].response_metadata)]
    assert said(live.sent[3].body["messages"]) == edited(history[:-1])
