from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from leyline_agent import (
    AsyncClient,
    Client,
    Conversation,
    SpliceRejectedError,
    SpliceTransportError,
    Status,
    UnsupportedServerError,
)
from leyline_agent.core.protocol import Outcome, Reason

MESSAGES = [{"role": "user", "content": "u"}]
CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "f"}'}}],
}


def client_of(server: Any, **options: Any) -> Client:
    return Client("http://server/v1/", transport=httpx.MockTransport(server), **options)


def test_turn_is_one_request_with_everything_of_the_callers(server: Any) -> None:
    reply = client_of(server, api_key="k").chat(
        Conversation(), MESSAGES, model="m", temperature=0.1, custom_params={"thinking_budget": 3}
    )
    (request,) = server.requests
    assert str(request.url) == "http://server/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer k"
    body = json.loads(request.content)
    assert body["custom_params"].pop("leyline")
    assert body == {"model": "m", "temperature": 0.1, "custom_params": {"thinking_budget": 3}, "messages": MESSAGES}
    assert reply.message == {"role": "assistant", "content": "a1"}
    assert reply.outcome == Outcome(status=Status.UNCHANGED)
    assert reply.usage is not None
    assert reply.usage.cached_tokens == 80


def test_note_is_a_json_string_beside_scalars_only(server: Any) -> None:
    client_of(server).chat(Conversation(), MESSAGES, model="m")
    assert all(isinstance(value, str) for value in server.bodies[0]["custom_params"].values())


def test_outcome_in_the_body_is_read_before_the_headers() -> None:
    full = Outcome(status=Status.SPLICED, kept_tokens=7)

    def handle(request: httpx.Request) -> httpx.Response:
        choices = [{"message": {"role": "assistant", "content": "a"}}]
        body = {"choices": choices, "metadata": {"leyline": full.model_dump(mode="json")}}
        return httpx.Response(200, headers={"X-Leyline": '{"status":"refused"}'}, json=body)

    conversation = Conversation()
    Client("http://server", transport=httpx.MockTransport(handle)).chat(conversation, MESSAGES)
    assert conversation.last_outcome == full


def test_stream_yields_chunks_and_assembles_the_answer_with_its_calls(server: Any) -> None:
    server.answers = [CALL]
    conversation = Conversation()
    with client_of(server).stream(conversation, MESSAGES, model="m") as stream:
        assert stream.outcome == Outcome(status=Status.UNCHANGED)
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in stream if c["choices"])
    assert text == "Let me see."
    assert stream.reply is not None
    assert stream.reply.message == CALL == conversation.last_answer
    assert stream.reply.usage is not None
    assert len(server.requests) == 1
    note = conversation.prepare({"model": "m", "messages": [*MESSAGES, CALL]}).note
    assert note is not None
    assert note.mode == "amortize"


def test_stream_broken_off_leaves_the_turn_unanswered(server: Any) -> None:
    conversation = Conversation()
    with client_of(server).stream(conversation, MESSAGES, model="m") as stream:
        next(iter(stream))
    assert conversation.last_answer is None
    assert stream.reply is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n', "ended before the answer did"),
        ('data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        ("data: {no json\n\n", "expected a JSON chunk"),
    ],
    ids=["cut", "error", "garbage"],
)
def test_bad_stream_raises_and_leaves_the_turn_unanswered(text: str, match: str) -> None:
    client = Client("http://server", transport=httpx.MockTransport(lambda request: httpx.Response(200, text=text)))
    conversation = Conversation()
    with pytest.raises(SpliceTransportError, match=match), client.stream(conversation, MESSAGES) as stream:
        list(stream)
    assert conversation.last_answer is None


@pytest.mark.parametrize(
    ("failure", "match"),
    [(503, "answered 503: no"), (httpx.ConnectError("refused"), "ConnectError: refused")],
    ids=["status", "connection"],
)
def test_failed_request_raises_and_can_be_sent_again(server: Any, failure: Any, match: str) -> None:
    client, conversation = client_of(server), Conversation()
    server.fail_next = failure
    with pytest.raises(SpliceTransportError, match=match):
        client.chat(conversation, MESSAGES, model="m")
    server.fail_next = failure
    with pytest.raises(SpliceTransportError, match=match), client.stream(conversation, MESSAGES):
        pass
    assert client.chat(conversation, MESSAGES, model="m").message["content"] == "a3"


@pytest.mark.parametrize("body", [{"choices": []}, {"object": "error"}, []], ids=["no choice", "error", "list"])
def test_answer_that_is_none_raises(body: Any) -> None:
    client = Client("http://server", transport=httpx.MockTransport(lambda request: httpx.Response(200, json=body)))
    with pytest.raises(SpliceTransportError, match="expected a chat completion"):
        client.chat(Conversation(), MESSAGES)


def test_unpatched_server_is_warned_of_once_and_still_answers(server: Any, caplog: Any) -> None:
    server.patched = False
    client, conversation = client_of(server), Conversation()
    with caplog.at_level(logging.WARNING, "leyline_agent"):
        for _ in range(3):
            assert client.chat(conversation, MESSAGES, model="m").outcome is None
    assert [record.message for record in caplog.records if "no Leyline plugin" in record.message] == [
        caplog.records[0].message
    ]
    assert conversation.telemetry.fallbacks == {"unsupported_server": 3}


def test_fallback_is_warned_of_once_a_reason(server: Any, caplog: Any) -> None:
    client, conversation = client_of(server), Conversation()
    for reason in (Reason.EVICTED, Reason.EVICTED, Reason.POOL_FULL):
        server.outcomes.append(Outcome(status=Status.REFUSED, reason=reason, message="why"))
        client.chat(conversation, MESSAGES, model="m")
    assert ["evicted: why" in r.message for r in caplog.records] == [True, False]
    assert conversation.telemetry.fallbacks == {"evicted": 2, "pool_full": 1}


def test_strict_raises_after_the_answer_was_kept(server: Any) -> None:
    client, conversation = client_of(server, strict=True), Conversation()
    server.outcomes = [Outcome(status=Status.PARTIAL, reason=Reason.POOL_FULL)]
    with pytest.raises(SpliceRejectedError, match="pool_full") as caught:
        client.chat(conversation, MESSAGES, model="m")
    assert caught.value.reason == "pool_full"
    assert conversation.last_answer == {"role": "assistant", "content": "a1"}
    server.patched = False
    with (
        pytest.raises(UnsupportedServerError, match="no Leyline plugin"),
        client.stream(conversation, MESSAGES) as stream,
    ):
        list(stream)
    assert conversation.last_answer == {"role": "assistant", "content": "a2"}


def test_telemetry_counts_tokens_and_subtracts_what_splices_prefilled(server: Any) -> None:
    client, conversation = client_of(server), Conversation()
    client.chat(conversation, MESSAGES, model="m")
    assert conversation.telemetry.hit_rate is None
    server.will_splice("e", kept_tokens=20, moved_tokens=50, prefilled_tokens=10)
    client.chat(conversation, MESSAGES, model="m")
    telemetry = conversation.telemetry
    assert (telemetry.turns, telemetry.splices) == (2, 1)
    assert (telemetry.kept_tokens, telemetry.moved_tokens, telemetry.prefilled_tokens) == (20, 50, 10)
    assert telemetry.hit_rate == pytest.approx((80 - 10) / 100)
    assert telemetry.recomputed_tokens == 200 - 160 + 10


async def test_async_client_sends_and_streams(server: Any) -> None:
    conversation = Conversation()
    async with AsyncClient("http://server", transport=httpx.MockTransport(server)) as client:
        reply = await client.chat(conversation, MESSAGES, model="m")
        server.answers = [CALL]
        async with client.stream(conversation, [*MESSAGES, reply.message], model="m") as stream:
            chunks = [chunk async for chunk in stream]
    assert len(chunks) > 3
    assert conversation.last_answer == CALL
    assert server.notes[1]["base"] == server.notes[0]["turn"]
    assert len(server.requests) == 2


def test_stream_true_in_chat_is_refused(server: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a call of stream\(\)"):
        client_of(server).chat(Conversation(), MESSAGES, stream=True)
