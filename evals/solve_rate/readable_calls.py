"""Makes an answer's tool calls such that agents can read them and servers take them back.

Models write arguments that are no JSON. Clients raise at that, and SGLang refuses a history with such a call; either
would make an error of the episode, though it is the model's mistake. So the tool gets to answer it.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from evals.replay.transport import CHAT_PATH

NOT_JSON = "not_a_json_object"
"""The argument that such a call has instead: what the model wrote."""


class ReadableCalls(httpx.BaseTransport):
    """Passes requests on, and gives arguments that are no JSON object as one argument that no tool knows."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; a chat answer is read whole.

        Raises:
            httpx.TransportError: as the inner transport.
        """
        response = self._inner.handle_request(request)
        if not request.url.path.endswith(CHAT_PATH):
            return response
        response.read()
        if not response.is_success:
            return response
        answer = response.json()
        calls = [call for choice in answer.get("choices") or () for call in choice["message"].get("tool_calls") or ()]
        functions = [call["function"] for call in calls]
        unreadable = [function for function in functions if not _is_object(function.get("arguments"))]
        for function in unreadable:
            written = function.get("arguments")
            # Nothing at all is how some models call a tool without parameters.
            function["arguments"] = json.dumps({NOT_JSON: written} if written else {})
        return with_answer(response, answer) if unreadable else response

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()


def with_answer(response: httpx.Response, answer: dict[str, Any]) -> httpx.Response:
    """Return a response with another body and the same headers."""
    framing = ("content-length", "content-encoding", "transfer-encoding")
    headers = [item for item in response.headers.multi_items() if item[0] not in framing]
    return httpx.Response(response.status_code, headers=headers, json=answer)


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (TypeError, ValueError):
        return False
