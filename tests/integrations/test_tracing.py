"""A turn's attributes, as LangSmith, OpenTelemetry and callback handlers get them. The server is a fake."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.langchain import LangChainTracer
from langchain_openai import ChatOpenAI
from langsmith import Client, tracing_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from leyline_agent import Policy, Usage, turn_attributes
from leyline_agent.core.protocol import Outcome, Purge, Reason, Status
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.integrations.langgraph import with_leyline

Make = Callable[..., ChatOpenAI]
ASK: Any = {"messages": [{"role": "user", "content": "Read two files."}]}
CONFIG: Any = {"configurable": {"thread_id": "t"}}


class Told(BaseCallbackHandler):
    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        assert name == "leyline"
        self.turns.append(data)


def test_attributes_are_flat_and_name_no_conversation() -> None:
    outcome = Outcome(
        status=Status.PARTIAL,
        reason=Reason.EVICTED,
        message="user text",
        turn="t",
        num_directives=2,
        kept_tokens=5,
        moved_tokens=30,
        prefilled_tokens=4,
        purge=Purge(dropped_tokens=6),
        ms=1.5,
        scheduler_ms=0.5,
    )
    attributes = turn_attributes(outcome, Usage(100, 3, 80), conversation_id="a-secret")
    assert attributes == {
        "leyline.conversation_hash": hashlib.sha256(b"a-secret").hexdigest()[:32],
        "leyline.status": "partial",
        "leyline.reason": "evicted",
        "leyline.directives": 2,
        "leyline.kept_tokens": 5,
        "leyline.moved_tokens": 30,
        "leyline.prefilled_tokens": 4,
        "leyline.dropped_tokens": 6,
        "leyline.ms": 1.5,
        "leyline.scheduler_ms": 0.5,
        "leyline.prompt_tokens": 100,
        "leyline.cached_tokens": 80,
        "leyline.recomputed_tokens": 24,
    }
    assert {type(value) for value in attributes.values()} <= {str, int, float}
    assert turn_attributes(None) == {}
    assert turn_attributes(None, Usage(9, 1, None)) == {"leyline.prompt_tokens": 9}


@pytest.mark.parametrize("how", ["sync", "async", "stream"])
async def test_callback_handlers_are_told_of_each_call(
    make_model: Make, read_tool: Any, stub_old_outputs: Policy, how: str
) -> None:
    told = Told()
    middleware = LeylineMiddleware(stub_old_outputs)
    agent = create_agent(make_model(), [read_tool], middleware=[middleware])
    config = {**CONFIG, "callbacks": [told]}
    if how == "async":
        state = await agent.ainvoke(ASK, config)
    elif how == "sync":
        state = agent.invoke(ASK, config)
    else:
        state = {"messages": [chunk for chunk, _ in agent.stream(ASK, config, stream_mode="messages")]}
    assert [(turn["leyline.status"], turn["leyline.moved_tokens"]) for turn in told.turns] == [("spliced", 9)] * 3
    assert middleware.conversation("t").id not in json.dumps(told.turns)
    # What the state holds is what it holds without us.
    assert "leyline" not in json.dumps([message.model_dump(mode="json") for message in state["messages"]])


async def test_a_model_outside_of_any_run_tells_nobody(make_model: Make, stub_old_outputs: Policy) -> None:
    model = with_leyline(make_model(), stub_old_outputs)
    assert model.invoke("hello").content == "done"
    assert (await model.ainvoke("hello")).content == "done"


def test_policy_none_tells_nothing(make_model: Make, read_tool: Any) -> None:
    told = Told()
    agent = create_agent(make_model(), [read_tool], middleware=[LeylineMiddleware("none")])
    agent.invoke(ASK, {**CONFIG, "callbacks": [told]})
    assert told.turns == []


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test"), exporter
    provider.shutdown()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_the_current_span_has_the_attributes(
    make_model: Make, stub_old_outputs: Policy, spans: Any, asynchronous: bool
) -> None:
    tracer, exporter = spans
    model = with_leyline(make_model(), stub_old_outputs)
    with tracer.start_as_current_span("call"):
        if asynchronous:
            await model.ainvoke("hello", CONFIG)
        else:
            model.invoke("hello", CONFIG)
    [span] = exporter.get_finished_spans()
    assert span.attributes["leyline.status"] == "spliced"
    assert span.attributes["leyline.cached_tokens"] == 40


class _Session:
    """In the place of the connection to LangSmith."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def request(self, method: str, url: str, **kwargs: Any) -> Any:
        if isinstance(data := kwargs.get("data"), bytes) and "/runs" in url:
            run = json.loads(data)
            run.setdefault("id", url.rsplit("/", 1)[-1])
            self.runs.setdefault(run["id"], {}).update(run)
        response: Any = type("Response", (), {"status_code": 200, "text": "", "headers": {}})()
        response.raise_for_status = response.close = lambda: None
        response.json = dict
        return response

    def mount(self, *args: Any) -> None: ...

    def close(self) -> None: ...


def test_langsmith_shows_the_attributes_as_metadata_of_the_middlewares_run(
    make_model: Make, read_tool: Any, stub_old_outputs: Policy
) -> None:
    session: Any = _Session()
    client = Client(api_url="http://langsmith", api_key="k", session=session, auto_batch_tracing=False, info={})
    agent = create_agent(make_model(), [read_tool], middleware=[LeylineMiddleware(stub_old_outputs)])
    with tracing_context(enabled=True, client=client):
        agent.invoke(ASK, {**CONFIG, "callbacks": [LangChainTracer(client=client)]})
    wrapped = [run for run in session.runs.values() if run.get("name") == "LeylineMiddleware.wrap_model_call"]
    assert len(wrapped) == 3
    for run in wrapped:
        assert run["extra"]["metadata"]["leyline.status"] == "spliced"
        assert run["extra"]["metadata"]["leyline.moved_tokens"] == 9
