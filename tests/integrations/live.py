"""What tests of agents on live servers share: tools, turns, models that write down what they send, a plain server's
answer to the same.

The test model is random, so the tests bring the agent's tool calls themselves: each turn adds a call and its output to
a thread, and the model's answer is whatever it says. `Scripted` sends the request all the same and answers otherwise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import PrivateAttr

from evals.serving import SERVED_MODEL_NAME, RunningServer
from leyline_agent import Policy, load_policy
from leyline_agent.core.messages import messages_from_openai
from leyline_agent.policy import apply_policy

# A question takes two turns here, the call that it brings and the model's answer: the last two outputs stay.
POLICY = load_policy("keep_last_tool_outputs").with_turns(4)
NUM_LINES = 20


@tool
def cat(path: str) -> str:
    """Print a file."""
    return f"contents of {path}"


def turn(idx: int, salt: str) -> list[BaseMessage]:
    """Return a call and its output, and before them a question."""
    call = {"name": "cat", "args": {"path": f"{idx}.py"}, "id": f"call_{salt}_{idx}"}
    output = "\n".join(f"{salt} line {line} of file {idx}: value = {line * idx % 97}" for line in range(NUM_LINES))
    return [
        HumanMessage(f"Look at file {idx}."),
        AIMessage("", tool_calls=[call]),
        ToolMessage(output, tool_call_id=f"call_{salt}_{idx}"),
    ]


@dataclass(frozen=True)
class Sent:
    """One chat request, as it left."""

    url: str
    body: dict[str, Any]

    @property
    def note(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body["custom_params"]["leyline"])
        return found

    @property
    def plain(self) -> dict[str, Any]:
        """The request without the note."""
        body = {**self.body, "custom_params": dict(self.body.get("custom_params") or {})}
        body["custom_params"].pop("leyline", None)
        return body if body["custom_params"] else {key: body[key] for key in body if key != "custom_params"}

    @property
    def num_evicted(self) -> int:
        return sum("[evicted: cat" in str(message.get("content")) for message in self.body["messages"])


@dataclass
class Models:
    """Makes chat models, and has what they sent."""

    client: httpx.Client
    async_client: httpx.AsyncClient
    sent: list[Sent] = field(default_factory=list)
    refuse_next: list[int] = field(default_factory=list)
    """Status codes for the next requests, instead of the server's answers."""

    def options(self, server: RunningServer | str, **options: Any) -> dict[str, Any]:
        url = server if isinstance(server, str) else server.url
        return {
            "model": SERVED_MODEL_NAME,
            "base_url": url + "/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 6,
            "max_retries": 0,
            "http_client": self.client,
            "http_async_client": self.async_client,
            **options,
        }

    def chat(self, server: RunningServer | str, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(**self.options(server, **options))

    def scripted(self, server: RunningServer | str, answers: Iterable[AIMessage], **options: Any) -> Scripted:
        model = Scripted(**self.options(server, **options))
        model._answers = iter(answers)
        return model

    @property
    def notes(self) -> list[dict[str, Any]]:
        return [sent.note for sent in self.sent]

    @property
    def modes(self) -> list[str]:
        return [note.get("mode", "amortize") for note in self.notes]


class Scripted(ChatOpenAI):
    """A ChatOpenAI that sends each request, and answers with the next scripted message as long as there is one."""

    _answers: Iterator[AIMessage] = PrivateAttr(default_factory=lambda: iter(()))

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(*args, **kwargs)
        answer = next(self._answers, None)
        if answer is None:
            return result
        said = result.generations[0]
        assert isinstance(said.message, AIMessage)
        answer = answer.model_copy(update={"usage_metadata": said.message.usage_metadata})
        return ChatResult(generations=[ChatGeneration(message=answer)], llm_output=result.llm_output)


class _Refusing(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport, codes: list[int]) -> None:
        self.inner, self.codes = inner, codes

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.codes and request.url.path.endswith("/chat/completions"):
            return httpx.Response(self.codes.pop(0), json={"error": {"message": "not now"}}, request=request)
        return self.inner.handle_request(request)

    def close(self) -> None:
        self.inner.close()


@contextmanager
def models() -> Iterator[Models]:
    """Make models whose connections are closed in the end."""
    refuse_next: list[int] = []

    def record(request: httpx.Request) -> None:
        if request.url.path.endswith("/chat/completions"):
            url = str(request.url.copy_with(path="/")).rstrip("/")
            made.sent.append(Sent(url, json.loads(request.content)))

    async def record_async(request: httpx.Request) -> None:
        record(request)

    transport = _Refusing(httpx.HTTPTransport(), refuse_next)
    client = httpx.Client(event_hooks={"request": [record]}, timeout=120, transport=transport)
    # Keeps no connection: it is closed from another event loop than the one it was used in.
    limits = httpx.Limits(max_keepalive_connections=0)
    async_client = httpx.AsyncClient(event_hooks={"request": [record_async]}, timeout=120, limits=limits)
    made = Models(client, async_client, refuse_next=refuse_next)
    yield made
    client.close()
    asyncio.run(async_client.aclose())


def said(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what the messages of a chat request say, in a form in which those of any client compare."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [(call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ()],
            message.get("tool_call_id"),
        )
        for message in messages
    ]


def edited(history: Sequence[BaseMessage], policy: Policy = POLICY) -> list[tuple[Any, ...]]:
    """Return what a policy leaves of a whole history, as `said`."""
    dicts: Any = convert_to_openai_messages(list(history))
    return said([message.to_openai() for message in apply_policy(policy, messages_from_openai(dicts)).messages])


def answer_of(server: RunningServer, sent: Sent) -> str:
    """Return what a server answers to the very same messages, without a note."""
    response = httpx.post(server.url + "/v1/chat/completions", json=sent.plain, timeout=120).json()
    return response["choices"][0]["message"]["content"] or ""


def thread(name: str) -> Any:
    """Return the config of a thread."""
    return {"configurable": {"thread_id": name}}


def flush(server: RunningServer) -> None:
    """Empty a server's cache."""
    assert httpx.post(server.url + "/flush_cache", timeout=60).is_success
