"""A chat server behind httpx.MockTransport: it answers by script and reports the outcome that a test sets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from leyline_agent import Policy
from leyline_agent.core.protocol import DirectiveOutcome, Outcome, Status, outcome_header

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]


class FakeServer:
    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.patched = True
        self.outcomes: list[Outcome] = []
        self.answers: list[dict[str, Any]] = []
        self.fail_next: int | Exception | None = None
        self.usage = {
            "prompt_tokens": 100,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 80},
        }

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    @property
    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(body["custom_params"]["leyline"]) for body in self.bodies]

    def will_splice(self, *edit_ids: str, **fields: Any) -> None:
        directives = tuple(DirectiveOutcome(start=1, end=9, replacement_tokens=2, edit_id=i) for i in edit_ids)
        fields.setdefault("num_directives", len(directives))
        self.outcomes.append(Outcome(status=Status.SPLICED, directives=directives, **fields))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        failure, self.fail_next = self.fail_next, None
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            return httpx.Response(failure, text="no")
        body = json.loads(request.content)
        answer = self.answers.pop(0) if self.answers else {"role": "assistant", "content": f"a{len(self.requests)}"}
        headers = {}
        if self.patched and "leyline" in (body.get("custom_params") or {}):
            outcome = self.outcomes.pop(0) if self.outcomes else Outcome(status=Status.UNCHANGED)
            headers["x-leyline"] = outcome_header(outcome)
        if not body.get("stream"):
            choice = {"index": 0, "message": answer, "finish_reason": "stop"}
            return httpx.Response(200, headers=headers, json={"choices": [choice], "usage": self.usage})
        return httpx.Response(200, headers=headers, text=self.stream_text(answer))

    def stream_text(self, answer: dict[str, Any]) -> str:
        text = answer.get("content") or ""
        deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"content": text[:1]}, {"content": text[1:]}]
        for idx, call in enumerate(answer.get("tool_calls") or ()):
            function = call["function"]
            head = {"index": idx, "id": call["id"], "function": {"name": function["name"], "arguments": ""}}
            deltas.append({"tool_calls": [head]})
            half = len(function["arguments"]) // 2
            for part in (function["arguments"][:half], function["arguments"][half:]):
                deltas.append({"tool_calls": [{"index": idx, "function": {"arguments": part}}]})
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": self.usage})
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def stub_old_outputs() -> Policy:
    return Policy.model_validate(
        {
            "version": 1,
            "rules": [
                {
                    "name": "old",
                    "select": {"role": "tool", "older_than": {"turns": 1}},
                    "replace": "[gone]",
                }
            ],
        }
    )


@pytest.fixture
def tools() -> list[dict[str, Any]]:
    return TOOLS
