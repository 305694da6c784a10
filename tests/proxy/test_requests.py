"""Requests that no policy can read, routes that carry no chat, and what a stranger may try."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from leyline_agent import Policy
from tests.proxy.scripted import CHAT, Received, Reply, ScriptedUpstream, agent_messages, answer_of, stats_of

Ask = Callable[..., httpx.Response]
SAID = {"role": "assistant", "content": "an answer"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "not_json", id="empty"),
        pytest.param(b"{", "not_json", id="broken JSON"),
        pytest.param(b"\xff\xfe{", "not_json", id="no UTF-8"),
        pytest.param(b"[" * 200_000, "not_json", id="deeply nested"),
        pytest.param(b'{"messages": [{"role": "user", "content": "u"}], "x": NaN}', "not_json", id="NaN"),
        pytest.param(b'{"messages": [{"role": "user"}], "x": 1e999}', "unreadable_messages", id="infinite"),
        pytest.param(b'{"messages": [{"role": "user"}], "x": ' + b"9" * 5000 + b"}", "not_json", id="a long number"),
        pytest.param(b"[1, 2]", "not_an_object", id="a list"),
        pytest.param(b'"text"', "not_an_object", id="a string"),
        pytest.param(b"{}", "no_messages", id="no messages"),
        pytest.param(b'{"messages": []}', "no_messages", id="empty messages"),
        pytest.param(b'{"messages": "hello"}', "no_messages", id="messages are a string"),
        pytest.param(b'{"messages": [1, null]}', "unreadable_messages", id="messages of numbers"),
        pytest.param(b'{"messages": [{"content": "u"}]}', "unreadable_messages", id="no role"),
        pytest.param(b'{"messages": [{"role": 7}]}', "unreadable_messages", id="a role that is a number"),
        pytest.param(b'{"messages": [{"role": ""}]}', "unreadable_messages", id="an empty role"),
        pytest.param(b'{"messages": [{"role": "user"}], "input_ids": [1]}', "input_ids", id="input_ids"),
        pytest.param(b'{"messages": [{"role": "user"}], "custom_params": []}', "custom_params", id="odd custom_params"),
        pytest.param(
            b'{"messages": [{"role": "user"}], "custom_params": {"leyline": "{}"}}', "note_of_the_client", id="a note"
        ),
    ],
)
def test_what_cannot_be_read_goes_through_as_it_came(
    body: bytes,
    reason: str,
    proxy: str,
    http: httpx.Client,
    upstream: ScriptedUpstream,
    caplog: pytest.LogCaptureFixture,
) -> None:
    upstream.script = lambda received: Reply(400, [("x-mine", "1")], [b"the upstream's own words"])
    with caplog.at_level(logging.WARNING):
        answers = [http.post(proxy + CHAT, content=body) for _ in range(2)]

    assert upstream.last.body == body
    assert len(upstream.received) == 2
    assert {(answer.status_code, answer.content) for answer in answers} == {(400, b"the upstream's own words")}
    assert answers[0].headers["x-leyline-proxy"] == f"unedited: {reason}"
    assert stats_of(proxy)["unedited"] == {reason: 2}
    assert len([record for record in caplog.records if "unedited" in record.message]) == 1


def test_a_body_that_is_encoded_goes_through_as_it_came(
    proxy: str, http: httpx.Client, upstream: ScriptedUpstream
) -> None:
    body = gzip.compress(json.dumps({"messages": agent_messages(3)}).encode())
    upstream.script = lambda received: Reply(parts=[b"{}"])
    http.post(proxy + CHAT, content=body, headers={"content-encoding": "gzip"})

    assert (upstream.last.body, upstream.last.header("content-encoding")) == (body, "gzip")


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"role": "tool", "content": 7}, id="a number for content"),
        pytest.param({"role": "tool", "content": {"a": 1}}, id="an object for content"),
        pytest.param({"role": "tool", "content": [1, None, {"type": "image_url"}, "x"]}, id="odd parts"),
        pytest.param({"role": "assistant", "tool_calls": "no list"}, id="calls are a string"),
        pytest.param({"role": "assistant", "tool_calls": [1, {"function": 2}, {"id": 3}]}, id="odd calls"),
        pytest.param({"role": "assistant", "content": None, "tool_calls": None, "x": {"y": [1]}}, id="nulls"),
        pytest.param({"role": "tool", "tool_call_id": "nobody's", "content": "x"}, id="a result without a call"),
        pytest.param({"role": "developer", "content": "\ud800 half a pair"}, id="half a surrogate pair"),
        pytest.param({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, id="an image"),
    ],
)
def test_odd_messages_are_answered(message: Any, proxy: str, http: httpx.Client, upstream: ScriptedUpstream) -> None:
    messages = [*agent_messages(3), message, {"role": "user", "content": "go on"}]
    body = json.dumps({"messages": messages}).encode()

    assert http.post(proxy + CHAT, content=body).status_code == 200
    assert upstream.last.json["messages"][-2] == json.loads(json.dumps(message))


def test_a_bug_of_ours_is_an_unedited_request_and_a_log_without_the_text(
    ask: Ask,
    upstream: ScriptedUpstream,
    proxy: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from leyline_agent.conversation import Conversation

    def broken(self: Conversation, body: Any) -> Any:
        raise LookupError(str(body))

    ask(agent_messages(1, "private"))
    monkeypatch.setattr(Conversation, "prepare", broken)
    with caplog.at_level(logging.WARNING):
        answers = [ask(agent_messages(2, "private")) for _ in range(2)]
    monkeypatch.undo()

    assert [answer.status_code for answer in answers] == [200, 200]
    assert upstream.last.json["messages"] == agent_messages(2, "private")
    assert upstream.last.note is None
    assert stats_of(proxy)["unedited"] == {"internal_error": 2}
    assert len([record for record in caplog.records if "a bug of ours" in record.message]) == 1
    assert "LookupError" in caplog.text
    assert "private" not in caplog.text
    # And the conversation is as it was.
    ask(agent_messages(2, "private"))
    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_of_ours_after_the_answer_costs_the_client_nothing(
    stream: bool, ask: Ask, upstream: ScriptedUpstream, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leyline_agent.conversation import Conversation

    ask(agent_messages(1))
    with monkeypatch.context() as patched:
        patched.setattr(Conversation, "commit", lambda *arguments, **options: {}["no such key"])
        assert ask(agent_messages(2), stream=stream).content.count(b"answer")
    ask(agent_messages(2))

    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]
    assert stats_of(proxy)["unread_answers"] == 1


def test_nothing_secret_is_logged(
    ask: Ask, upstream: ScriptedUpstream, start_proxy: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    down = start_proxy(url="http://127.0.0.1:9")
    headers = {"authorization": "Bearer sk-private", "x-leyline-conversation": "thread-private"}
    with caplog.at_level(logging.DEBUG, logger="leyline_agent"):
        ask(agent_messages(3, "text-private"), headers=headers)
        ask(agent_messages(3, "text-private"), headers=headers, to=down)
        ask([{"role": 1, "content": "text-private"}], headers=headers)
        upstream.script = lambda received: Reply(parts=[b'{"choices": [{"message": "text-private"}]}'])
        ask(agent_messages(4, "text-private"), headers=headers)

    ids = [note["conversation"] for note in upstream.notes if note]
    assert caplog.records
    assert not [word for word in ("private", *ids) if word in caplog.text]


def test_what_the_upstream_says_and_what_was_asked_for_is_in_no_error_and_no_log(
    proxy: str, http: httpx.Client, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    # A status line that cannot be read, with words of the upstream's in it.
    upstream.script = lambda received: Reply("private words", [("private", "x")])  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        answers = [
            http.post(proxy + CHAT + "?token=private", json={"messages": agent_messages(1)}),
            http.get(proxy + "/v1/models?token=private"),
        ]

    assert [answer.json()["error"]["code"] for answer in answers] == ["upstream_error"] * 2
    assert len(caplog.records) == 2
    assert "private" not in caplog.text + "".join(answer.text for answer in answers)


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/responses", "/v1/messages", "/v1/completions", "/v1/embeddings", "/v1/messages/count_tokens"]
)
def test_a_conversations_name_goes_to_no_upstream(
    path: str, proxy: str, http: httpx.Client, upstream: ScriptedUpstream
) -> None:
    http.post(proxy + path, json={"messages": agent_messages(1)}, headers={"X-Leyline-Conversation": "mine"})

    assert upstream.last.header("x-leyline-conversation") is None


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        pytest.param(b"GET /", b"a", id="path"),
        pytest.param(b"GET /health HTTP/1.1\r\nx-a: ", b"a", id="one header"),
        pytest.param(b"GET /health HTTP/1.1\r\n", b"x-a: b\r\n", id="many headers"),
        pytest.param(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nx-a: ", b"a", id="the second"),
        pytest.param(
            b"POST /v1/embeddings HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
            b"x-a: b\r\n",
            id="trailers",
        ),
        pytest.param(
            b"POST /v1/embeddings HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;a=", b"a", id="chunk extension"
        ),
    ],
)
def test_headers_without_an_end_are_cut_off(
    begin: bytes, endless: bytes, proxy: str, upstream: ScriptedUpstream
) -> None:
    upstream.script = lambda received: Reply(200)
    url = httpx.URL(proxy)
    part = endless * (8192 // len(endless))
    num_sent = 0
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(begin)
        with suppress(ConnectionError):
            while num_sent < 64 << 20:
                connection.sendall(part)
                num_sent += len(part)
    # Some is on its way before it can be known that the connection is closed.
    assert num_sent < 32 << 20
    assert httpx.get(proxy + "/health", trust_env=False).status_code == 200


def test_long_headers_arrive(proxy: str, http: httpx.Client, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda received: Reply(200)
    http.get(proxy + "/health", headers={"x-long": "a" * 40_000})

    assert upstream.last.header("x-long") == "a" * 40_000


def test_more_messages_than_an_agent_has_go_through_as_they_came(
    ask: Ask, upstream: ScriptedUpstream, proxy: str
) -> None:
    messages = [{"role": "user", "content": "x"}] * 10_001
    ask(messages[1:])
    assert upstream.last.note is not None
    answer = ask(messages)

    assert answer.headers["x-leyline-proxy"] == "unedited: too_many_messages"
    assert (upstream.last.note, upstream.last.json["messages"]) == (None, messages)


def test_each_message_takes_room_however_short(start_proxy: Callable[..., str], ask: Ask) -> None:
    proxy = start_proxy(max_remembered_bytes=1 << 20)
    for salt in "abc":
        ask([{"role": "user", "content": salt}] * 400, to=proxy)

    assert len(stats_of(proxy)["conversations"]) == 2


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": 1}]}', b"<html>"])
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_an_answer_that_cannot_be_read_passes_and_the_conversation_stays_where_it_was(
    answer: bytes, content_type: str, ask: Ask, upstream: ScriptedUpstream, proxy: str
) -> None:
    ask(agent_messages(1))
    body = b"data: " + answer + b"\n\n" if content_type == "text/event-stream" else answer
    upstream.script = lambda received: Reply(headers=[("content-type", content_type)], parts=[body])
    assert ask(agent_messages(2), stream=True).content == body
    upstream.script = answer_of
    ask(agent_messages(2))

    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]
    assert stats_of(proxy)["unread_answers"] == 1


def test_an_error_within_a_stream_passes_and_is_no_turn(ask: Ask, upstream: ScriptedUpstream) -> None:
    events = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n'
    upstream.script = lambda received: Reply(headers=[("content-type", "text/event-stream")], parts=[events])
    assert ask(agent_messages(1), stream=True).content == events
    upstream.script = answer_of
    ask([*agent_messages(1), {"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}])

    assert "base" not in (upstream.last.note or {})


def test_of_several_choices_the_first_is_the_answer(ask: Ask, upstream: ScriptedUpstream) -> None:
    def script(received: Received) -> Reply:
        choices = [
            {"index": idx, "message": {"role": "assistant", "content": f"choice {idx}"}, "finish_reason": "stop"}
            for idx in range(2)
        ]
        return Reply(headers=[("content-type", "application/json")], parts=[json.dumps({"choices": choices}).encode()])

    upstream.script = script
    ask(agent_messages(1), n=2)
    ask(agent_messages(2, answer="choice 1"), n=2)
    ask(agent_messages(2, answer="choice 0"), n=2)

    turns = [(note or {}).get("base") for note in upstream.notes]
    assert turns == [None, None, (upstream.notes[0] or {})["turn"]]


def test_everything_else_in_the_request_arrives(ask: Ask, upstream: ScriptedUpstream) -> None:
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "tool_choice": {"type": "function", "function": {"name": "cat"}},
        "tools": [{"type": "function", "function": {"name": "cat", "parameters": {"type": "object"}}}],
        "logprobs": True,
        "seed": 12345678901234567890123,
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "metadata": {"a": "\U0001f600"},
        "temperature": 1e-7,
    }
    ask(agent_messages(4), **fields)

    assert {name: upstream.last.json[name] for name in fields} == fields


def test_a_body_above_the_limit_is_refused_before_it_comes(
    start_proxy: Callable[..., str], upstream: ScriptedUpstream
) -> None:
    proxy = start_proxy(max_body_bytes=1000)
    head = b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1001\r\n\r\n"

    assert _raw(proxy, head % CHAT.encode()).startswith(b"HTTP/1.1 413")
    assert not upstream.received


@pytest.mark.parametrize("with_length", [True, False])
def test_a_body_above_the_limit_is_refused(
    with_length: bool, start_proxy: Callable[..., str], http: httpx.Client, upstream: ScriptedUpstream
) -> None:
    proxy = start_proxy(max_body_bytes=1000)
    body = b"x" * 2000
    answer = http.post(proxy + CHAT, content=body if with_length else iter([body[:1000], body[1000:]]))

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert "--max-body-mb" in answer.json()["error"]["message"]
    assert not upstream.received
    http.post(proxy + CHAT, content=b"x" * 1000)
    assert upstream.last.body == b"x" * 1000


def test_a_long_history_is_edited(ask: Ask, upstream: ScriptedUpstream) -> None:
    messages = agent_messages(200, "long " * 300)
    assert len(json.dumps(messages)) > 1 << 22
    assert ask(messages).status_code == 200
    assert ask(agent_messages(201, "long " * 300)).status_code == 200

    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]
    assert json.dumps(upstream.last.json["messages"]).count("[gone]") == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/org/model?x=%20y"),
        ("GET", "/health"),
        ("GET", "/leyline/capabilities"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/responses/r1"),
    ],
)
def test_other_routes_pass_through(
    method: str, path: str, proxy: str, http: httpx.Client, upstream: ScriptedUpstream
) -> None:
    upstream.script = lambda received: Reply(218, [("x-mine", "1")], [b"\x00raw"])
    body = b"the body" if method == "POST" else None
    answer = http.request(method, proxy + path, content=body, headers={"authorization": "Bearer k"})

    assert (answer.status_code, answer.content, answer.headers["x-mine"]) == (218, b"\x00raw", "1")
    assert (upstream.last.method, upstream.last.path, upstream.last.body) == (method, path, body or b"")
    assert upstream.last.header("authorization") == "Bearer k"
    assert stats_of(proxy)["unedited"] == {}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/completions"])
def test_other_apis_pass_through_unedited_and_it_is_said(
    path: str, proxy: str, http: httpx.Client, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"messages": agent_messages(4)}).encode()
    upstream.script = lambda received: Reply(parts=[b"data: x\n\n", b"data: y\n\n"], is_chunked=True)
    with caplog.at_level(logging.WARNING):
        answers = [http.post(proxy + path, content=body) for _ in range(2)]

    assert upstream.last.body == body
    assert [answer.content for answer in answers] == [b"data: x\n\ndata: y\n\n"] * 2
    assert answers[0].headers["x-leyline-proxy"] == "unedited: path"
    assert len([record for record in caplog.records if f"{path} goes through unedited" in record.message]) == 1
    assert stats_of(proxy)["unedited"] == {path: 2}


@pytest.mark.parametrize(
    "target",
    [
        b"/flush_cache",
        b"/leyline/admin/release",
        b"/v1",
        b"/v1/chat/completions/",
        b"/v1/models/../../flush_cache",
        b"/v1/models/%2e%2e/%2e%2e/flush_cache",
        b"/v1/models/..%2f..%2fflush_cache",
        b"//flush_cache",
        b"/v1/responses/../../flush_cache",
    ],
)
def test_the_servers_other_routes_cannot_be_reached(target: bytes, proxy: str, upstream: ScriptedUpstream) -> None:
    answer = _raw(proxy, b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")

    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405"))
    assert b'"error"' in answer
    assert not upstream.received


def test_a_wrong_method_is_told(proxy: str, http: httpx.Client, upstream: ScriptedUpstream) -> None:
    answer = http.get(proxy + CHAT)

    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert not upstream.received


@pytest.mark.parametrize(
    "header",
    [b"x-leyline-conversation: a\r\nx-smg-routing-key: stolen", b"x-a: 1\x00", b"x-a: b\rx-b: c", b"bad header: 1"],
)
def test_headers_cannot_smuggle_others(header: bytes, proxy: str, upstream: ScriptedUpstream) -> None:
    body = json.dumps({"messages": agent_messages(1)}).encode()
    head = b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n" % (CHAT.encode(), len(body))
    _raw(proxy, head + header + b"\r\n\r\n" + body)

    for received in upstream.received:
        names = [name.lower() for name, _ in received.headers]
        # A header line of its own is a header of the client's, which goes on as it is.
        assert "x-b" not in names
        assert all("\r" not in value and "\x00" not in value for _, value in received.headers)


def _raw(proxy: str, request: bytes) -> bytes:
    url = httpx.URL(proxy)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_a_policy_that_lacks_its_context_window_is_told_at_the_start(start_proxy: Callable[..., str]) -> None:
    from leyline_agent import PolicyError

    rule = {"name": "r", "select": {"role": "tool"}, "replace": "[x]", "when": {"context": 0.5}}
    with pytest.raises(PolicyError, match="context window"):
        start_proxy(Policy.model_validate({"version": 1, "rules": [rule]}))


def test_a_proxy_that_is_its_own_upstream_says_so(
    start_proxy: Callable[..., str], ask: Ask, http: httpx.Client
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    looped = start_proxy(url=url, port=port)
    for answer in (ask([{"role": "user", "content": "u"}], to=looped), http.get(looped + "/health")):
        assert answer.status_code == 508
        error = answer.json()["error"]
        assert error["code"] == "upstream_loop"
        assert "--upstream" in error["message"]


def test_two_proxies_before_each_other_say_so(start_proxy: Callable[..., str], ask: Ask) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    first = start_proxy(url=f"http://127.0.0.1:{port}")
    start_proxy(url=first, port=port)
    answer = ask([{"role": "user", "content": "u"}], to=first)
    assert (answer.status_code, answer.json()["error"]["code"]) == (508, "upstream_loop")


def test_two_proxies_in_a_row_work(start_proxy: Callable[..., str], ask: Ask, upstream: ScriptedUpstream) -> None:
    behind = start_proxy()
    assert ask([{"role": "user", "content": "u"}], to=start_proxy(url=behind)).status_code == 200
    (received,) = upstream.received
    assert len([value for name, value in received.headers if name.lower() == "via" and "leyline-" in value]) == 2
