"""A real ChatOpenAI on a fake server, and tools for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from leyline_agent import Policy
from leyline_agent.core.protocol import DirectiveOutcome, Outcome, Status, outcome_header

OUTPUT = "line of output\n" * 5


@tool
def read(path: str) -> str:
    """Read a file."""
    return f"{path}: {OUTPUT}"


class FakeServer:
    """Calls `read` twice, then answers; says what it spliced."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.patched = True

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    @property
    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(body["custom_params"]["leyline"]) for body in self.bodies]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        body = json.loads(request.content)
        num_results = sum(message["role"] == "tool" for message in body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if num_results < 2 and body.get("tools"):
            function = {"name": "read", "arguments": json.dumps({"path": f"f{num_results}"})}
            message["content"] = None
            message["tool_calls"] = [{"id": f"c{num_results}", "type": "function", "function": function}]
        headers = {}
        if self.patched and "leyline" in (body.get("custom_params") or {}):
            done = DirectiveOutcome(start=1, end=5, replacement_tokens=1, edit_id=f"e{len(self.requests)}")
            outcome = Outcome(status=Status.SPLICED, directives=(done,), num_directives=1, moved_tokens=9)
            headers["x-leyline"] = outcome_header(outcome)
        usage = {
            "prompt_tokens": 50,
            "completion_tokens": 3,
            "total_tokens": 53,
            "prompt_tokens_details": {"cached_tokens": 40},
        }
        frame = {"id": "r", "model": "m", "created": 0}
        if not body.get("stream"):
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            reply = {**frame, "object": "chat.completion", "choices": choices, "usage": usage}
            return httpx.Response(200, headers=headers, json=reply)
        for idx, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = idx
        choices = [{"index": 0, "delta": message, "finish_reason": None}]
        end = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        chunks = [{"choices": choices}, {"choices": end}, {"choices": [], "usage": usage}]
        frame["object"] = "chat.completion.chunk"
        text = "".join(f"data: {json.dumps({**frame, **chunk})}\n\n" for chunk in chunks)
        headers["content-type"] = "text/event-stream"
        return httpx.Response(200, headers=headers, text=text + "data: [DONE]\n\n")


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def make_model(server: FakeServer) -> Callable[..., ChatOpenAI]:
    def make(**options: Any) -> ChatOpenAI:
        transport = httpx.MockTransport(server)
        return ChatOpenAI(
            model="m",
            base_url="http://server/v1",
            api_key="k",
            http_client=httpx.Client(transport=transport),
            http_async_client=httpx.AsyncClient(transport=transport),
            stream_usage=True,
            max_retries=0,
            **options,
        )

    return make


@pytest.fixture
def read_tool() -> Any:
    return read


@pytest.fixture
def stub_old_outputs() -> Policy:
    rule = {"name": "old", "select": {"role": "tool", "older_than": {"turns": 1}}, "replace": "[gone]"}
    return Policy.model_validate({"version": 1, "rules": [rule]})


@pytest.fixture
def forget_old_outputs() -> Policy:
    rule = {
        "name": "old",
        "select": {"role": "tool", "older_than": {"turns": 1}},
        "replace": "[gone]",
        "mode": "forget",
    }
    return Policy.model_validate({"version": 1, "rules": [rule]})
