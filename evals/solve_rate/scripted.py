"""Models that are scripts: each prompt really goes to the server, which generates one token; the script answers.

So tokens, cache hits, splices and times are the server's, while what the agent does is known. The place for that is
below the agent's HTTP client, so that the LangGraph agent and debug-gym's own are answered alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx

from evals.replay.transport import CHAT_PATH
from evals.solve_rate.config import ScriptName
from evals.solve_rate.environment import Call, ScriptedCalls
from evals.solve_rate.readable_calls import with_answer

_NUM_FILLERS = 4
"""Turns after which the late reader needs what it saw first: more than the shipped policies keep."""
_LAST_WORD = "I have nothing more to do."


class ScriptedError(Exception):
    """The script has the model fail."""


class Script(Protocol):
    """A model."""

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the assistant message that answers a prompt, given as it was sent.

        Raises:
            ScriptedError: the server is to answer with an error.
        """


class CallScript:
    """Makes one call after the other, whatever comes back."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)
        self._num_made = 0

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make the next call."""
        if self._num_made == len(self._calls):
            return {"role": "assistant", "content": _LAST_WORD}
        name, arguments = self._calls[self._num_made]
        self._num_made += 1
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{self._num_made}", "type": "function", "function": function}
        return {"role": "assistant", "content": f"I call {name}.", "tool_calls": [call]}


class LateReader(CallScript):
    """Looks first, does other things, and goes on only if the prompt still has what it saw first.

    A policy that evicts old outputs makes it fail, in every execution alike.
    """

    def __init__(self, calls: ScriptedCalls) -> None:
        self._rest, self._give_up = calls.solution[1:], calls.give_up
        super().__init__([calls.solution[0], *[calls.filler] * _NUM_FILLERS])
        self._seen: str | None = None

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make the next call; after the last filler, decide."""
        first = next((message["content"] for message in messages if message["role"] == "tool"), None)
        if self._num_made == 1:
            self._seen = first
        if self._num_made == 1 + _NUM_FILLERS:
            self._calls += self._rest if first == self._seen else self._give_up
        return super().__call__(messages)


class ErringScript(CallScript):
    """Makes one call, then the server fails."""

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make the first call, then raise."""
        if self._num_made:
            raise ScriptedError("the script has the model fail here")
        return super().__call__(messages)


class RecordedScript:
    """Gives the answers of a recorded conversation again, in order."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._answers = iter([dict(message) for message in messages if message["role"] == "assistant"])

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Give the next answer."""
        return next(self._answers, {"role": "assistant", "content": _LAST_WORD})


def make_script(name: ScriptName, calls: ScriptedCalls) -> Script:
    """Return a script for one episode."""
    match name:
        case "solver":
            return CallScript(calls.solution)
        case "failing":
            return CallScript([calls.solution[0], *calls.give_up])
        case "erring":
            return ErringScript(calls.solution)
        case "late_reader":
            return LateReader(calls)
        case "cheating":
            assert calls.cheat is not None, "the config says that there is nothing to cheat with"
            return CallScript(calls.cheat)


class ScriptedTransport(httpx.BaseTransport):
    """Sends each chat request with one token to generate, and puts the script's message into the real answer."""

    def __init__(self, inner: httpx.BaseTransport, script: Script) -> None:
        self._inner, self._script = inner, script

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and read its answer whole.

        Raises:
            httpx.TransportError: as the inner transport.
        """
        if not request.url.path.endswith(CHAT_PATH):
            return self._inner.handle_request(request)
        body: dict[str, Any] = json.loads(request.read())
        body.pop("max_completion_tokens", None)
        headers = [item for item in request.headers.multi_items() if item[0] != "content-length"]
        sent = httpx.Request(
            request.method,
            request.url,
            headers=headers,
            json={**body, "max_tokens": 1},
            extensions=request.extensions,
        )
        response = self._inner.handle_request(sent)
        response.read()
        if not response.is_success:
            return response
        try:
            message = self._script(body["messages"])
        except ScriptedError as error:
            return httpx.Response(500, json={"error": {"message": str(error), "type": "scripted", "code": 500}})
        answer = response.json()
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        answer["choices"][0] |= {"message": message, "finish_reason": reason}
        return with_answer(response, answer)

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()
