"""Release and state of a conversation, explicit splices and capabilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from leyline_agent import (
    AsyncClient,
    Client,
    Conversation,
    ConversationState,
    Purge,
    ReleaseReply,
    SpliceRejectedError,
    SpliceRequest,
    SpliceTransportError,
    UnsupportedServerError,
)
from leyline_agent.core.protocol import Directive

ID = "KYc2t0XkLlV8bXwWq1mDfQ"
SPLICE = SpliceRequest(conversation=ID, base_ids=(1, 2, 3), directives=(Directive(start=1, end=2),))
RELEASED = {"conversation_hash": "0" * 32, "purge": {"dropped_tokens": 7, "held_tokens": 1}}
EDIT = {"edit_id": "e1", "turn": "t1", "position": 3, "removed_tokens": 9, "replacement_tokens": 2}
TURN = {
    "turn": "t2",
    "prompt_tokens": 5,
    "output_tokens": 1,
    "cached_tokens": 6,
    "own_namespace": True,
    "edits": [EDIT],
}
STATE = {"conversation_hash": "0" * 32, "own_tokens": 6, "turns": [TURN]}

CALLS: dict[str, Callable[[Client], Any]] = {
    "splice": lambda client: client.splice(SPLICE),
    "release": lambda client: client.release(ID),
    "conversation": lambda client: client.conversation_state(ID),
}


class Answering:
    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if isinstance(self.body, str):
            return httpx.Response(self.status, text=self.body)
        return httpx.Response(self.status, json=self.body)


def client_of(answering: Any) -> Client:
    return Client("http://server", api_key="k", transport=httpx.MockTransport(answering))


def test_release_names_the_conversation_in_the_body_and_returns_what_was_freed() -> None:
    answering = Answering(200, RELEASED)
    conversation = Conversation()
    reply = client_of(answering).release(conversation, cache_salt="s", extra_key="x", scrub=True)
    (request,) = answering.requests
    assert (request.method, str(request.url)) == ("POST", "http://server/leyline/release")
    assert json.loads(request.content) == {
        "conversation": conversation.id,
        "cache_salt": "s",
        "extra_key": "x",
        "scrub": True,
    }
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["x-smg-routing-key"] == conversation.routing_key
    assert reply == ReleaseReply(conversation_hash="0" * 32, purge=Purge(dropped_tokens=7, held_tokens=1))


def test_state_names_the_conversation_in_a_header() -> None:
    answering = Answering(200, STATE)
    conversation = Conversation()
    state = client_of(answering).conversation_state(conversation, cache_salt="s", extra_key="x")
    (request,) = answering.requests
    assert (request.method, str(request.url)) == ("GET", "http://server/leyline/conversation")
    headers = ("conversation", "cache-salt", "extra-key")
    assert [request.headers[f"x-leyline-{name}"] for name in headers] == [conversation.id, "s", "x"]
    assert request.headers["x-smg-routing-key"] == conversation.routing_key
    assert state == ConversationState.model_validate(STATE)


def test_unset_keys_send_no_header() -> None:
    answering = Answering(200, STATE)
    client_of(answering).conversation_state(ID, cache_salt="")
    assert not {"x-leyline-cache-salt", "x-leyline-extra-key"} & answering.requests[0].headers.keys()


@pytest.mark.parametrize("value", ["sälz", "a\nb", " a", "a "])
def test_key_that_fits_no_header_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="x-leyline-extra-key must be printable ASCII"):
        client_of(Answering(200, STATE)).conversation_state(ID, extra_key=value)


@pytest.mark.parametrize("name", ["release", "conversation_state"])
def test_guessable_id_is_not_sent(name: str) -> None:
    answering = Answering(200, {})
    with pytest.raises(ValueError, match="words and numbers"):
        getattr(client_of(answering), name)("my-agent-conversation-number-000001")
    assert not answering.requests


async def test_async_client_releases_and_shows_the_state() -> None:
    answering = Answering(200, RELEASED)
    conversation = Conversation()
    async with AsyncClient("http://server", transport=httpx.MockTransport(answering)) as client:
        released = await client.release(conversation, scrub=True)
        answering.body = STATE
        state = await client.conversation_state(conversation)
    assert [request.url.path for request in answering.requests] == ["/leyline/release", "/leyline/conversation"]
    assert (released.purge.dropped_tokens, state.own_tokens) == (7, 6)


def test_explicit_splice_returns_the_reply() -> None:
    answering = Answering(200, {"outcome": {"status": "spliced"}, "token_ids": [1, 3]})
    assert client_of(answering).splice(SPLICE).token_ids == (1, 3)
    assert answering.requests[0].url.path == "/leyline/splice"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    ("status", "reason"), [(409, "evicted"), (404, "unknown_conversation"), (400, "weak_conversation_id")]
)
def test_refusal_raises_the_servers_reason(call: Any, status: int, reason: str) -> None:
    with pytest.raises(SpliceRejectedError, match=f"{reason}.*: gone") as caught:
        call(client_of(Answering(status, {"reason": reason, "message": "gone"})))
    assert caught.value.reason == reason


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("body", [{"detail": "Not Found"}, "<html>", []], ids=["FastAPI's", "a proxy's", "list"])
def test_missing_route_is_told_from_a_refusal(call: Any, body: Any) -> None:
    with pytest.raises(UnsupportedServerError, match=r"/leyline/.* is not found"):
        call(client_of(Answering(404, body)))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    ("status", "body", "match"),
    [
        (500, {"reason": "internal_error"}, "answered 500"),
        (401, "no key", "answered 401: no key"),
        (200, "<html>", "expected JSON"),
        (200, {}, "Field required"),
    ],
)
def test_unreadable_answer_raises(call: Any, status: int, body: Any, match: str) -> None:
    with pytest.raises(SpliceTransportError, match=match):
        call(client_of(Answering(status, body)))


def test_capabilities_are_returned_or_the_route_is_missing() -> None:
    assert client_of(Answering(200, {"version": 1})).capabilities() == {"version": 1}
    with pytest.raises(UnsupportedServerError):
        client_of(Answering(404, {})).capabilities()


def test_error_about_an_id_does_not_quote_it() -> None:
    guessable = "xy" * 20
    with pytest.raises(ValueError, match="repeats itself") as caught:
        SpliceRequest(conversation=guessable, base_ids=(1,), directives=(Directive(start=0, end=1),))
    assert "xyxy" not in str(caught.value)
