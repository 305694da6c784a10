from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from leyline_agent import Policy
from leyline_agent.core.protocol import Outcome, Status, outcome_header
from tests.proxy.scripted import (
    CHAT,
    Received,
    Reply,
    ScriptedUpstream,
    agent_messages,
    answer_of,
    stats_of,
)

Ask = Callable[..., httpx.Response]


def test_the_history_is_edited_and_the_note_and_the_routing_key_are_sent(ask: Ask, upstream: ScriptedUpstream) -> None:
    first = ask(agent_messages(3))
    second = ask(agent_messages(4), temperature=0.3, unknown_field={"kept": [1]}, custom_params={"thinking_budget": 9})

    outputs = [message["content"] for message in upstream.last.json["messages"] if message["role"] == "tool"]
    assert [output.startswith("[gone]") for output in outputs] == [True, True, True, False]
    note = upstream.last.note
    assert note is not None
    assert note["base"] == (upstream.notes[0] or {})["turn"]
    assert upstream.last.json["custom_params"]["thinking_budget"] == 9
    assert (upstream.last.json["unknown_field"], upstream.last.json["temperature"]) == ({"kept": [1]}, 0.3)
    keys = [received.header("x-smg-routing-key") for received in upstream.received]
    assert keys[0] == keys[1]
    assert keys[0]
    assert json.loads(first.headers["x-leyline"]) == {"status": "unchanged"}
    assert json.loads(second.headers["x-leyline"])["status"] == "spliced"


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, (None, None)), ({"gate": "off"}, ("off", None)), ({"template_changes": "reprefill"}, (None, "reprefill"))],
)
def test_notes_say_what_the_proxy_was_told(
    options: dict[str, str],
    said: tuple[str | None, str | None],
    start_proxy: Callable[..., str],
    ask: Ask,
    upstream: ScriptedUpstream,
) -> None:
    proxy = start_proxy(**options)
    for num_turns in (3, 4):
        ask(agent_messages(num_turns), to=proxy)
    note = upstream.last.note
    assert note is not None
    assert (note.get("gate"), note.get("template_changes")) == said


@pytest.mark.parametrize("stream", [False, True])
def test_a_policy_without_rules_changes_no_byte(
    stream: bool,
    start_proxy: Callable[..., str],
    no_policy: Policy,
    upstream: ScriptedUpstream,
    http: httpx.Client,
) -> None:
    proxy = start_proxy(no_policy)
    # As no serializer of ours would write it.
    body = (
        b'{ "model":"m",\n "messages":[ {"content":"h\xc3\xa9llo \\ud83d\\ude00","role":"user"} ],'
        b' "temperature":1.0E-1,'
        b'"stream":' + json.dumps(stream).encode() + b' , "seed": 12345678901234567890123 }'
    )
    headers = {"content-type": "application/json", "authorization": "Bearer k", "x-mine": "1"}
    answers = [http.post(url + CHAT, content=body, headers=headers) for url in (upstream.url, proxy)]

    direct, proxied = upstream.received
    assert proxied.body == direct.body == body
    assert answers[0].content == answers[1].content
    own = {"accept-encoding", "host", "via"}
    sent = [{(k.lower(), v) for k, v in r.headers if k.lower() not in own} for r in upstream.received]
    assert sent[0] - {("connection", "keep-alive")} == sent[1]
    assert stats_of(proxy)["totals"]["turns"] == 1


@pytest.mark.parametrize("parts", [1, 3])
def test_the_bytes_of_a_stream_are_the_upstreams(parts: int, ask: Ask, upstream: ScriptedUpstream) -> None:
    """Comments, CRLF, half a character at the end of a chunk, no blank after the colon, fields of later versions."""
    events = (
        b": comment\r\n\r\nevent: x\r\nid: 7\r\ndata:"
        + json.dumps({"choices": [{"delta": {"content": "h\u00e9 \u2028"}, "x": 1}]}, ensure_ascii=False).encode()
        + b'\r\n\r\ndata: {"choices":[{"index":0,"delta":{"content":"!"},"finish_reason":"stop"}]}\n\n'
        + b"data: [DONE]\n\n: the end\n\n"
    )
    at = events.index("é".encode()) + 1
    cut = [events] if parts == 1 else [events[:at], events[at : at + 40], events[at + 40 :]]
    upstream.script = lambda received: Reply(
        headers=[("content-type", "text/event-stream; charset=utf-8")], parts=cut, is_chunked=True, gap_s=0.02
    )

    answer = ask(agent_messages(1), stream=True)

    assert answer.content == events
    # And what was read along is the answer: the next turn is recognised by it.
    said = {"role": "assistant", "content": "hé \u2028!"}
    ask([*agent_messages(1), said, {"role": "user", "content": "go on"}], stream=True)
    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


def test_streamed_tool_calls_are_read_along(ask: Ask, upstream: ScriptedUpstream) -> None:
    call = {"id": "c9", "type": "function", "function": {"name": "cat", "arguments": '{"path": "a.py"}'}}
    upstream.script = lambda received: answer_of(received, "", tool_calls=[call])

    ask(agent_messages(1), stream=True)
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    ask([*agent_messages(1), said, {"role": "tool", "tool_call_id": "c9", "content": "text"}])

    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


def test_an_event_arrives_before_the_next_is_written(
    upstream: ScriptedUpstream, proxy: str, http: httpx.Client
) -> None:
    seen = threading.Event()

    def script(received: Received) -> Reply:
        reply = answer_of(received)
        reply.hold_after = (2, seen)
        return reply

    upstream.script = script
    body = {"model": "m", "messages": agent_messages(1), "stream": True}
    with http.stream("POST", proxy + CHAT, json=body, timeout=10) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                seen.set()
    assert seen.is_set()


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("body", [b'{"error": {"message": "no",   "code": 7}}', b"", b"\xff\x00plain"])
def test_errors_of_the_upstream_pass_unchanged(status: int, body: bytes, ask: Ask, upstream: ScriptedUpstream) -> None:
    ask(agent_messages(1))
    headers = [
        ("content-type", "application/x-odd"),
        ("retry-after", "7"),
        ("Set-Cookie", "a=1"),
        ("set-cookie", "b=2"),
    ]
    upstream.script = lambda received: Reply(status, headers, [body])

    answer = ask(agent_messages(2))

    assert (answer.status_code, answer.content) == (status, body)
    assert answer.headers["retry-after"] == "7"
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert len(upstream.received) == 2
    # The turn was not answered: the same request goes on from the same base.
    upstream.script = answer_of
    ask(agent_messages(2))
    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


def test_redirects_are_the_clients_to_follow(ask: Ask, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda received: Reply(307, [("location", "http://elsewhere.example/")])

    answer = ask(agent_messages(1))

    assert (answer.status_code, answer.headers["location"]) == (307, "http://elsewhere.example/")


def test_one_clients_cookies_are_no_others(upstream: ScriptedUpstream, proxy: str) -> None:
    def script(received: Received) -> Reply:
        reply = answer_of(received)
        reply.headers.append(("set-cookie", "session=1; Path=/"))
        return reply

    upstream.script = script
    for _ in range(2):
        with httpx.Client(trust_env=False, verify=False) as http:
            answer = http.post(proxy + CHAT, json={"messages": agent_messages(1)})
            assert answer.headers["set-cookie"] == "session=1; Path=/"
        assert upstream.last.header("cookie") is None


@pytest.mark.parametrize("words", [b"Unknown parameter: custom_params", b"something is not right"])
@pytest.mark.parametrize("status", [400, 422])
def test_an_upstream_that_refuses_the_note_is_asked_again_once_and_remembered(
    words: bytes, status: int, ask: Ask, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture, proxy: str
) -> None:
    def script(received: Received) -> Reply:
        return Reply(status, [], [words]) if "custom_params" in received.json else answer_of(received)

    upstream.script = script
    with caplog.at_level(logging.WARNING):
        answers = [ask(agent_messages(turn)) for turn in (3, 4, 5)]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert ["custom_params" in received.json for received in upstream.received] == [True, False, False, False]
    assert "[gone]" in json.dumps(upstream.last.json["messages"])
    assert len([record for record in caplog.records if "refuses the field" in record.message]) == 1
    assert stats_of(proxy)["notes"] == "refused"
    assert stats_of(proxy)["without_note"] == {"refused": 3}
    # That no note went is no fall-back of the conversation's.
    assert stats_of(proxy)["totals"]["fallbacks"] == {}


def test_what_the_client_has_in_custom_params_stays_without_the_note(ask: Ask, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda received: (
        Reply(400, [], [b"custom_params.leyline: extra"])
        if "leyline" in received.json["custom_params"]
        else answer_of(received)
    )

    assert ask(agent_messages(3), custom_params={"thinking_budget": 7}).status_code == 200
    assert upstream.last.json["custom_params"] == {"thinking_budget": 7}


def test_a_400_for_another_reason_passes_unchanged(ask: Ask, upstream: ScriptedUpstream, proxy: str) -> None:
    """Before the upstream has answered a note the request is sent twice, since nobody can know; later once."""
    upstream.script = lambda received: Reply(400, [("x-mine", "1")], [b"too long: %d" % len(upstream.received)])
    first = ask(agent_messages(1))
    assert (first.status_code, first.content, first.headers["x-mine"]) == (400, b"too long: 2", "1")
    assert stats_of(proxy)["notes"] == "not seen yet"

    upstream.script = answer_of
    ask(agent_messages(1))
    upstream.script = lambda received: Reply(400, [("x-mine", "1")], [b"too long"])
    later = ask(agent_messages(2))

    assert (later.status_code, later.content, later.headers["x-mine"]) == (400, b"too long", "1")
    assert len(upstream.received) == 4
    assert upstream.last.note is not None


def test_an_error_that_has_an_outcome_is_not_about_the_note(ask: Ask, upstream: ScriptedUpstream, proxy: str) -> None:
    """Whatever it says: a client can have an error quote what it likes."""
    outcome = outcome_header(Outcome(status=Status.UNCHANGED))
    words = b"duplicate request id custom_params"
    upstream.script = lambda received: (
        answer_of(received) if received.note is None else Reply(400, [("x-leyline", outcome)], [words])
    )

    answer = ask(agent_messages(1))

    assert (answer.status_code, answer.content) == (400, words)
    assert len(upstream.received) == 1
    assert stats_of(proxy)["notes"] == "answered"


def test_no_error_turns_notes_off_where_one_was_answered(ask: Ask, upstream: ScriptedUpstream) -> None:
    ask(agent_messages(1, "a user"))
    upstream.script = lambda received: (
        answer_of(received) if received.note is None else Reply(400, [], [b"no custom_params, says the attacker"])
    )
    assert ask(agent_messages(1, "an attacker")).status_code == 200
    upstream.script = answer_of
    ask(agent_messages(2, "a user"))

    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


def test_where_the_second_try_gets_no_answer_the_first_is_the_clients(ask: Ask, upstream: ScriptedUpstream) -> None:
    def script(received: Received) -> Reply:
        if "custom_params" in received.json:
            return Reply(400, [], [b"the first"])
        # No answer at all: the connection closes after the headers' first byte never came.
        raise ConnectionError

    upstream.script = script

    answer = ask(agent_messages(1))

    assert (answer.status_code, answer.content) == (400, b"the first")


def test_an_upstream_without_the_plugin_gets_the_policy_alone_and_one_warning(
    ask: Ask, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture, proxy: str
) -> None:
    def script(received: Received) -> Reply:
        reply = answer_of(received)
        reply.headers = [header for header in reply.headers if header[0] != "x-leyline"]
        return reply

    upstream.script = script
    with caplog.at_level(logging.WARNING):
        for salt in ("a", "b"):
            for turn in (3, 4):
                ask(agent_messages(turn, salt))

    assert "[gone]" in json.dumps(upstream.last.json["messages"])
    assert [record.name for record in caplog.records if "no Leyline plugin" in record.message] == [
        "leyline_agent.proxy"
    ]
    stats = stats_of(proxy)
    assert stats["notes"] == "ignored"
    # After three it is sent none, with the id that is the plugin's alone.
    assert ["custom_params" in received.json for received in upstream.received] == [True, True, True, False]
    assert (stats["totals"]["fallbacks"], stats["without_note"]) == ({"unsupported_server": 3}, {"ignored": 1})


def test_a_client_that_leaves_ends_the_request_upstream(
    upstream: ScriptedUpstream, proxy: str, http: httpx.Client, ask: Ask
) -> None:
    def slow(received: Received) -> Reply:
        reply = answer_of(received)
        reply.gap_s = 0.2
        return reply

    ask(agent_messages(1))
    upstream.script = slow
    body = {"model": "m", "messages": agent_messages(2), "stream": True}
    with http.stream("POST", proxy + CHAT, json=body) as response:
        next(response.iter_raw())
    assert upstream.left.wait(5)

    upstream.script = answer_of
    ask(agent_messages(2))
    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


def test_a_client_that_leaves_with_the_last_words_has_had_its_answer(
    upstream: ScriptedUpstream, proxy: str, http: httpx.Client, ask: Ask
) -> None:
    def script(received: Received) -> Reply:
        reply = answer_of(received)
        reply.hold_after = (len(reply.parts) - 1, threading.Event())
        return reply

    upstream.script = script
    with http.stream("POST", proxy + CHAT, json={"messages": agent_messages(1), "stream": True}) as response:
        for line in response.iter_lines():
            if '"finish_reason": "stop"' in line:
                break
    assert upstream.left.wait(5)

    upstream.script = answer_of
    ask(agent_messages(2))
    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


def test_a_client_that_leaves_before_the_answer_begins_ends_the_request_upstream(
    upstream: ScriptedUpstream, proxy: str
) -> None:
    upstream.script = lambda received: Reply(hold=threading.Event(), parts=[b"late"])
    with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False, timeout=0.3, verify=False) as http:
        http.post(proxy + CHAT, json={"messages": agent_messages(1)})
    assert upstream.left.wait(5)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_off_breaks_off_for_the_client_too(
    stream: bool, ask: Ask, upstream: ScriptedUpstream, proxy: str
) -> None:
    def script(received: Received) -> Reply:
        reply = answer_of(received)
        if not stream:
            reply.parts = [reply.parts[0][:20], reply.parts[0][20:]]
        reply.gap_s, reply.cut_after = 0.02, len(reply.parts) - 1
        return reply

    upstream.script = script
    with pytest.raises(httpx.RemoteProtocolError):
        ask(agent_messages(1), stream=stream)

    assert stats_of(proxy)["failures"] == {"upstream_broke_off": 1}


def test_an_upstream_that_is_down_is_a_502_that_says_what_and_where(start_proxy: Callable[..., str], ask: Ask) -> None:
    proxy = start_proxy(url="http://127.0.0.1:9")

    answer = ask(agent_messages(1), to=proxy)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (502, "upstream_error", "upstream_unreachable")
    assert "http://127.0.0.1:9/v1/chat/completions" in error["message"]
    assert "--upstream" in error["message"]


def test_an_upstream_that_is_silent_is_a_502(
    start_proxy: Callable[..., str], upstream: ScriptedUpstream, ask: Ask
) -> None:
    proxy = start_proxy(timeout_s=0.2)
    upstream.script = lambda received: Reply(hold=threading.Event())

    answer = ask(agent_messages(1), to=proxy)

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_timeout")
    assert "--timeout" in answer.json()["error"]["message"]


def test_an_upstream_that_hangs_up_is_a_502(upstream: ScriptedUpstream, ask: Ask) -> None:
    def script(received: Received) -> Reply:
        raise ConnectionError

    upstream.script = script

    answer = ask(agent_messages(1))

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")


def test_a_gzipped_answer_passes_as_it_is_and_is_read_along(ask: Ask, upstream: ScriptedUpstream) -> None:
    import gzip

    def script(received: Received) -> Reply:
        reply = answer_of(received)
        reply.parts = [gzip.compress(b"".join(reply.parts))]
        reply.headers.append(("content-encoding", "gzip"))
        return reply

    upstream.script = script
    assert ask(agent_messages(1)).json()["choices"][0]["message"]["content"] == "an answer"
    assert upstream.last.header("accept-encoding") == "identity"

    ask(agent_messages(2))
    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]


def test_hop_by_hop_headers_stay_on_their_side(upstream: ScriptedUpstream, proxy: str, http: httpx.Client) -> None:
    def script(received: Received) -> Reply:
        reply = answer_of(received)
        reply.headers += [("connection", "x-hop"), ("x-hop", "1"), ("keep-alive", "timeout=9"), ("x-kept", "1")]
        return reply

    upstream.script = script
    headers = {"connection": "x-own", "x-own": "1", "te": "trailers", "x-kept": "1"}
    answer = http.post(proxy + CHAT, json={"messages": agent_messages(1)}, headers=headers)

    assert {"x-own", "te", "x-leyline-conversation"}.isdisjoint({k.lower() for k, _ in upstream.last.headers})
    assert upstream.last.header("x-kept") == "1"
    assert "x-hop" not in answer.headers
    assert "keep-alive" not in answer.headers
    assert answer.headers["x-kept"] == "1"


def test_the_end_of_a_stream_is_held_until_the_turn_is_taken(upstream: ScriptedUpstream, proxy: str) -> None:
    """A client that goes on in the moment it sees the end is recognised, every time."""
    with httpx.Client(trust_env=False, timeout=30, verify=False) as http:
        for salt in map(str, range(20)):
            messages = agent_messages(1, salt)
            body = {"model": "m", "messages": messages, "stream": True}
            with http.stream("POST", proxy + CHAT, json=body) as response:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        break
            more = [*messages, {"role": "assistant", "content": "an answer"}, {"role": "user", "content": "on"}]
            http.post(proxy + CHAT, json={"model": "m", "messages": more})
            assert (upstream.notes[-1] or {})["base"] == (upstream.notes[-2] or {})["turn"]


def test_a_long_edit_does_not_hold_up_a_stream(
    upstream: ScriptedUpstream, proxy: str, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leyline_agent.conversation import Conversation

    prepare = Conversation.prepare
    blocked, release = threading.Event(), threading.Event()

    def slow(self: Conversation, body: Any) -> Any:
        if body.get("model") == "slow":
            blocked.set()
            assert release.wait(20)
        return prepare(self, body)

    monkeypatch.setattr(Conversation, "prepare", slow)
    long = agent_messages(2, "a long history " * 2000)
    done: list[httpx.Response] = []

    def ask_slow() -> None:
        done.append(
            httpx.post(
                proxy + CHAT, json={"model": "slow", "messages": long}, trust_env=False, timeout=30, verify=False
            )
        )

    thread = threading.Thread(target=ask_slow)
    thread.start()
    assert blocked.wait(10)
    try:
        body = {"model": "m", "messages": agent_messages(1), "stream": True}
        assert http.post(proxy + CHAT, json=body).status_code == 200
        assert not done
    finally:
        release.set()
        thread.join(20)
    assert done[0].status_code == 200


@pytest.fixture
def held_edits(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], threading.Event]]:
    """Holds the edits of long requests; has their models as they begin, and the event that lets them go on."""
    from leyline_agent.conversation import Conversation

    prepare = Conversation.prepare
    begun: list[str] = []
    release = threading.Event()

    def held(self: Conversation, body: Any) -> Any:
        begun.append(body["model"])
        assert release.wait(20)
        return prepare(self, body)

    monkeypatch.setattr(Conversation, "prepare", held)
    try:
        yield begun, release
    finally:
        release.set()


LONG = agent_messages(2, "a long history " * 2000)


def ask_long(proxy: str, model: str, key: str, timeout_s: float = 30) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": model, "messages": LONG}
    with httpx.Client(trust_env=False, timeout=timeout_s, verify=False) as http:
        return http.post(proxy + CHAT, json=body, headers=headers)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_long_edits_of_one_key_leave_threads_to_others(
    proxy: str, held_edits: tuple[list[str], threading.Event]
) -> None:
    begun, release = held_edits
    with ThreadPoolExecutor(8) as clients:
        try:
            asked = [clients.submit(ask_long, proxy, f"mine {idx}", "one") for idx in range(6)]
            until(lambda: len(begun) == 1)
            asked.append(clients.submit(ask_long, proxy, "another's", "two"))
            until(lambda: len(begun) == 2)
            assert begun[1] == "another's"
        finally:
            release.set()
        assert [answer.result().status_code for answer in asked] == [200] * 7


def test_what_waits_for_a_client_that_has_left_is_not_worked_on(
    proxy: str, held_edits: tuple[list[str], threading.Event], upstream: ScriptedUpstream
) -> None:
    begun, release = held_edits
    with ThreadPoolExecutor(1) as clients:
        try:
            first = clients.submit(ask_long, proxy, "first", "one")
            until(lambda: len(begun) == 1)
            with pytest.raises(httpx.ReadTimeout):
                ask_long(proxy, "left", "one", timeout_s=0.3)
        finally:
            release.set()
        assert first.result().status_code == 200
    assert ask_long(proxy, "last", "one").status_code == 200

    assert begun == ["first", "last"]


def test_a_client_that_leaves_while_its_turn_is_edited_gives_its_conversation_back(
    proxy: str, monkeypatch: pytest.MonkeyPatch, upstream: ScriptedUpstream, http: httpx.Client
) -> None:
    from leyline_agent.proxy.turns import Turns

    ended = threading.Event()
    begin = Turns.begin

    def late(self: Turns, *arguments: Any) -> Any:
        turn = begin(self, *arguments)
        assert ended.wait(20)
        return turn

    assert ask_long(proxy, "m", "one").status_code == 200
    said = {"role": "assistant", "content": "an answer"}
    body = {"model": "m", "messages": [*LONG, said, {"role": "user", "content": "go on"}]}
    headers = {"authorization": "Bearer one"}
    with monkeypatch.context() as patched:
        patched.setattr(Turns, "begin", late)
        with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False, timeout=0.5, verify=False) as leaving:
            leaving.post(proxy + CHAT, json=body, headers=headers)
    ended.set()
    assert http.post(proxy + CHAT, json=body, headers=headers).status_code == 200

    assert len(upstream.received) == 2
    assert (upstream.last.note or {})["base"] == (upstream.notes[0] or {})["turn"]
