"""A server in the place of SGLang: an append-only prefix cache over words, chat, counters and flush."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx

CHAT = "/v1/chat/completions"


class FakeSGLang:
    """Counts what it is asked as SGLang's `/metrics` does. With `plugin`, answers a note with an outcome."""

    def __init__(self, *, plugin: bool = True, metrics: bool = True, refuse_from_turn: int | None = None) -> None:
        self._plugin, self._metrics, self._refuse_from_turn = plugin, metrics, refuse_from_turn
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.paths: list[str] = []
        self._counts: Counter[str] = Counter()
        self._cached: list[list[str]] = []
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.paths.append(path)
        if path == CHAT:
            return self._chat(request)
        if path == "/flush_cache":
            self._cached.clear()
            return httpx.Response(200, text="Cache flushed.")
        if path == "/metrics" and self._metrics:
            return httpx.Response(200, text=self._prometheus())
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        return httpx.Response(404)

    def _chat(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        self.headers.append(request.headers)
        self._counts["http"] += 1
        if self._refuse_from_turn is not None and len(self.bodies) >= self._refuse_from_turn:
            return httpx.Response(400, json={"error": {"message": "the prompt is too long"}})
        words = " ".join(json.dumps(message, sort_keys=True) for message in body["messages"]).split()
        cached = max((_common(words, known) for known in self._cached), default=0)
        cached = min(cached, len(words) - 1)
        self._cached.append(words)
        self._counts.update(finished=1, prompt=len(words), cached=cached)
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "fake",
            "choices": [
                {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "generated"}}
            ],
            "usage": {
                "prompt_tokens": len(words),
                "completion_tokens": 1,
                "total_tokens": len(words) + 1,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
        headers = {}
        if self._plugin and "custom_params" in body:
            first = json.loads(body["custom_params"]["leyline"]).get("base") is None
            outcome = {"status": "unchanged"} if first else {"status": "spliced", "prefilled_tokens": 2, "ms": 0.5}
            headers["x-leyline"] = json.dumps(outcome)
        return httpx.Response(200, json=answer, headers=headers)

    def _prometheus(self) -> str:
        count = self._counts
        return (
            "# HELP sglang:prompt_tokens_total Number of prefill tokens processed.\n"
            "# TYPE sglang:prompt_tokens_total counter\n"
            f'sglang:http_requests_total{{endpoint="{CHAT}",method="POST"}} {count["http"]}.0\n'
            'sglang:http_requests_total{endpoint="/metrics",method="GET"} 12.0\n'
            f'sglang:num_requests_total{{is_streaming="false",model_name="fake"}} {count["finished"]}.0\n'
            f'sglang:prompt_tokens_total{{is_streaming="false",model_name="fake"}} {count["prompt"]}.0\n'
            f'sglang:cached_tokens_total{{cache_source="device"}} {count["cached"] // 2}.0\n'
            f'sglang:cached_tokens_total{{cache_source="host"}} {count["cached"] - count["cached"] // 2}.0\n'
        )


def _common(left: list[str], right: list[str]) -> int:
    num = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        num += 1
    return num
