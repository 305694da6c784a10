"""An httpx transport that writes down every request and its answer, so that a replay counts what really went out.

It sits below LangChain, openai-python and our own client, and knows none of them.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from leyline_agent.core.protocol import NOTE_KEY, OUTCOME_HEADER, ROUTING_HEADER, Outcome

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """One chat request as sent and what its answer reported."""

    body: dict[str, Any]
    prompt_tokens: int
    cached_tokens: int
    """As the server reports them; what a splice itself prefilled is among them."""
    outcome: Outcome | None
    http_ms: float
    completion_tokens: int = 0


class RecordingTransport(httpx.BaseTransport):
    """Passes requests on and keeps the chat exchanges.

    With `strip_note` our note is taken out of each body on its way, which makes it the plain chat request of the same
    prompt: what a client without the project would send.
    """

    def __init__(self, inner: httpx.BaseTransport | None = None, *, strip_note: bool = False) -> None:
        self._inner = inner or httpx.HTTPTransport()
        self._strip_note = strip_note
        self.exchanges: list[ChatExchange] = []
        self.num_requests = 0
        """Requests of any kind."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and read its answer whole.

        Raises:
            httpx.TransportError: as the inner transport.
        """
        self.num_requests += 1
        is_chat = request.url.path.endswith(CHAT_PATH)
        body: dict[str, Any] = {}
        if is_chat:
            body = json.loads(request.read())
            if self._strip_note and remove_note(body):
                ours = ("content-length", ROUTING_HEADER)
                headers = [(key, value) for key, value in request.headers.multi_items() if key not in ours]
                request = httpx.Request(
                    request.method, request.url, headers=headers, json=body, extensions=request.extensions
                )
        started = time.perf_counter()
        response = self._inner.handle_request(request)
        response.read()
        http_ms = (time.perf_counter() - started) * 1000
        if is_chat and response.is_success:
            self.exchanges.append(_exchange(body, response, http_ms))
        return response

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()


def remove_note(body: dict[str, Any]) -> bool:
    """Remove our note from a chat body in place; tell whether there was one."""
    custom_params = body.get("custom_params")
    if not isinstance(custom_params, dict) or NOTE_KEY not in custom_params:
        return False
    del custom_params[NOTE_KEY]
    if not custom_params:
        del body["custom_params"]
    return True


def _exchange(body: dict[str, Any], response: httpx.Response, http_ms: float) -> ChatExchange:
    usage = response.json().get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    header = response.headers.get(OUTCOME_HEADER)
    return ChatExchange(
        body=body,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        outcome=Outcome.model_validate_json(header) if header else None,
        http_ms=http_ms,
        completion_tokens=usage.get("completion_tokens") or 0,
    )
