from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from leyline_agent import Conversation, Policy
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.proxy.recognise import Known, Recogniser
from tests.proxy.scripted import CHAT, KEY, Received, Reply, ScriptedUpstream, agent_messages, answer_of, stats_of

Ask = Callable[..., httpx.Response]
SAID = {"role": "assistant", "content": "an answer"}


def go_on(messages: list[dict[str, Any]], text: str = "go on", said: Any = SAID) -> list[dict[str, Any]]:
    return [*messages, said, {"role": "user", "content": text}]


def ids(upstream: ScriptedUpstream) -> list[str]:
    return [(note or {})["conversation"] for note in upstream.notes]


def bases(upstream: ScriptedUpstream) -> list[int | None]:
    """For each request the index of the one that it names as its base."""
    turns = [(note or {})["turn"] for note in upstream.notes]
    return [turns.index(note["base"]) if note and note.get("base") else None for note in upstream.notes]


def test_a_conversation_is_recognised_by_its_prefix(ask: Ask, upstream: ScriptedUpstream) -> None:
    for turn in (1, 2, 3):
        ask(agent_messages(turn))

    assert len(set(ids(upstream))) == 1
    assert bases(upstream) == [None, 0, 1]


def test_an_answer_is_recognised_in_the_form_in_which_clients_send_it_back(
    ask: Ask, upstream: ScriptedUpstream
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    upstream.script = lambda received: answer_of(received, "", tool_calls=[call], reasoning_content="hm", refusal=None)
    ask(agent_messages(1))
    function = {"name": "f", "arguments": '{"b":2,"a":1}'}
    said = {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}
    ask([*agent_messages(1), said, {"role": "tool", "tool_call_id": "c", "content": "x"}])

    assert bases(upstream) == [None, 0]


def test_a_fork_becomes_a_conversation_of_its_own(ask: Ask, upstream: ScriptedUpstream) -> None:
    opening = agent_messages(1)
    ask(opening)
    ask(go_on(opening, "this way"))
    ask(go_on(opening, "that way"))
    ask(go_on(go_on(opening, "this way")))
    ask(go_on(go_on(opening, "that way")))

    first, this, that, this_on, that_on = ids(upstream)
    assert first == this == this_on
    assert that == that_on != first
    assert bases(upstream) == [None, 0, None, 1, 2]


def test_two_requests_from_one_point_at_once_are_two_conversations(
    http: httpx.Client, proxy: str, ask: Ask, upstream: ScriptedUpstream
) -> None:
    opening = agent_messages(1)
    ask(opening)
    hold = threading.Event()

    def script(received: Received) -> Reply:
        reply = answer_of(received)
        reply.hold = hold
        return reply

    upstream.script = script
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(
                httpx.post, proxy + CHAT, json={"messages": go_on(opening, way)}, trust_env=False, timeout=30
            )
            for way in ("this way", "that way")
        ]
        while len(upstream.received) < 3:
            pass
        hold.set()
        assert [answer.result().status_code for answer in asked] == [200, 200]

    assert len(set(ids(upstream))) == 2
    assert sorted(bases(upstream), key=str) == [0, None, None]


def test_equal_openings_at_once_never_mix(proxy: str, upstream: ScriptedUpstream) -> None:
    """Subagents of one user: the same first request, different answers, then each goes on from its own."""
    num_agents, num_turns = 16, 4
    names = iter(range(10_000))

    def script(received: Received) -> Reply:
        # The first answer tells an agent from the others; later ones repeat it.
        said = [message for message in received.json["messages"] if message["role"] == "assistant"]
        return answer_of(received, said[0]["content"] if said else f"agent {next(names)}")

    upstream.script = script

    def run(_: int) -> list[str]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "You are a subagent."}]
        keys = []
        with httpx.Client(trust_env=False, timeout=30, verify=False) as http:
            for turn in range(num_turns):
                answer = http.post(proxy + CHAT, json={"model": "m", "messages": messages}).json()
                messages = go_on(messages, f"turn {turn}", answer["choices"][0]["message"])
                keys.append(answer["choices"][0]["message"]["content"])
        return keys

    with ThreadPoolExecutor(num_agents) as threads:
        said = list(threads.map(run, range(num_agents)))

    assert all(len(set(of_one)) == 1 for of_one in said)
    agents: dict[str, set[str]] = {}
    for received in upstream.received:
        first = [m["content"] for m in received.json["messages"] if m["role"] == "assistant"][:1]
        if first:
            agents.setdefault(first[0], set()).add((received.note or {})["conversation"])
    assert len(agents) == num_agents
    assert all(len(of_one) == 1 for of_one in agents.values())
    assert len(set.union(*agents.values())) == num_agents
    assert bases(upstream).count(None) == num_agents


def test_equal_agents_with_equal_answers_are_told_apart(ask: Ask, upstream: ScriptedUpstream) -> None:
    opening = agent_messages(1)
    for messages in (opening, opening, go_on(opening), go_on(opening)):
        ask(messages)

    first, second, third, fourth = ids(upstream)
    assert first != second
    assert {third, fourth} == {first, second}


def test_two_api_keys_never_share_an_id(ask: Ask, upstream: ScriptedUpstream) -> None:
    opening = agent_messages(1)
    keys: list[dict[str, str]] = [
        {"authorization": "Bearer a"},
        {"authorization": "Bearer b"},
        {"api-key": "a"},
        {"x-api-key": "a"},
        {},
    ]
    for key in keys:
        ask(opening, headers=key)
    for key in keys:
        ask(go_on(opening), headers=key)

    assert len(set(ids(upstream)[: len(keys)])) == len(keys)
    assert ids(upstream)[: len(keys)] == ids(upstream)[len(keys) :]
    # Nor does somebody without the key go on from there.
    ask(go_on(go_on(opening)), headers={"authorization": "Bearer c"})
    assert ids(upstream)[-1] not in ids(upstream)[:-1]


def test_a_header_names_a_conversation_within_an_api_key(ask: Ask, upstream: ScriptedUpstream) -> None:
    def named(name: str, key: str) -> dict[str, str]:
        return {"x-leyline-conversation": name, "authorization": key}

    ask(agent_messages(1), headers=named("thread 1", "a"))
    ask(agent_messages(2), headers=named("thread 1", "a"))
    ask(agent_messages(2), headers=named("thread 2", "a"))
    ask(agent_messages(2), headers=named("thread 1", "b"))
    # A name that is given wins over the prefix: an unrelated history is the same conversation's.
    ask([{"role": "user", "content": "something else"}], headers=named("thread 1", "a"))

    one, two, other, other_key, renewed = ids(upstream)
    assert one == two == renewed
    assert len({one, other, other_key}) == 3
    assert (upstream.last.note or {})["mode"] == "reprefill"
    assert all(received.header("x-leyline-conversation") is None for received in upstream.received)


def test_named_ids_survive_a_restart_with_the_key_and_no_other_does(
    start_proxy: Callable[..., str], ask: Ask, upstream: ScriptedUpstream
) -> None:
    headers = {"x-leyline-conversation": "thread 1"}
    for key in (KEY, KEY, b"another key of the tests"):
        ask(agent_messages(1), to=start_proxy(key=key), headers=headers)
    for _ in range(2):
        ask(agent_messages(1), to=start_proxy(key=KEY))

    first, same, other, *unnamed = ids(upstream)
    assert first == same != other
    assert len(set(unnamed)) == 2


@pytest.mark.parametrize("name", ["a\tb", "é", "x" * 6000, "{}; rm -rf", "' OR 1=1", "sp aced"])
def test_any_string_is_a_name_and_none_of_it_goes_further(
    name: str, ask: Ask, upstream: ScriptedUpstream, proxy: str
) -> None:
    headers: Any = {"x-leyline-conversation": name.encode()}
    for turn in (1, 2):
        assert ask(agent_messages(turn), headers=headers).status_code == 200

    assert bases(upstream) == [None, 0]
    sent = json.dumps(upstream.last.headers) + upstream.last.body.decode()
    assert name.strip() not in sent
    assert name.strip() not in json.dumps(stats_of(proxy))


def test_a_named_conversation_in_parallel_is_one_and_loses_nothing(proxy: str, upstream: ScriptedUpstream) -> None:
    headers = {"x-leyline-conversation": "one"}

    def one(idx: int) -> int:
        body = {"messages": agent_messages(2, str(idx)), "model": "m"}
        return httpx.post(
            proxy + CHAT, json=body, headers=headers, trust_env=False, timeout=30, verify=False
        ).status_code

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(one, range(24))) == {200}

    assert len(set(ids(upstream))) == 1
    assert stats_of(proxy)["totals"]["turns"] == 24
    assert len(stats_of(proxy)["conversations"]) == 1


def test_what_vanished_from_the_end_of_the_prompt_is_no_fork(ask: Ask, upstream: ScriptedUpstream) -> None:
    reminder = {"role": "system", "content": "It is noon."}
    ask([*agent_messages(1), reminder])
    ask(go_on(agent_messages(1)))

    assert bases(upstream) == [None, 0]


def test_a_changed_history_is_another_conversation(ask: Ask, upstream: ScriptedUpstream) -> None:
    ask(agent_messages(1))
    ask(agent_messages(2, "a corrected fact"))
    ask(go_on(agent_messages(1), said={"role": "assistant", "content": "not what was said"}))

    assert len(set(ids(upstream))) == 3


# What the requests above cannot show: bounds, and how long a look-up takes.


def make(conversation_id: str, resumed: bool) -> Conversation:
    return Conversation(Policy.model_validate({"version": 1, "rules": []}), conversation_id=conversation_id)


def recogniser(**options: Any) -> Recogniser:
    return Recogniser(KEY, make, **{"max_conversations": 3, "max_bytes": 1000, **options})


def answered(found: Recogniser, known: Known, messages: list[dict[str, Any]], size_bytes: int = 10) -> None:
    prepared = known.conversation.prepare({"messages": messages})
    known.conversation.commit(prepared, SAID)
    roles = [message["role"] for message in messages]
    found.keep(known, prepared.prompt, roles, Message.from_openai(SAID), size_bytes)


@pytest.mark.parametrize(
    ("options", "size_bytes"),
    [pytest.param({"max_conversations": 6}, 10, id="number"), pytest.param({"max_bytes": 600}, 100, id="bytes")],
)
def test_one_keys_conversations_do_not_drive_out_anothers(options: dict[str, int], size_bytes: int) -> None:
    dropped: list[Known] = []
    found = recogniser(**{"max_conversations": 1000, "max_bytes": 10**6, **options}, on_dropped=dropped.append)
    scopes = [found.scope([key]) for key in (b"user", b"other")]
    for scope, num in zip(scopes, (2, 30), strict=True):
        for idx in range(num):
            answered(found, found.named(scope, b"%d" % idx), agent_messages(1), size_bytes)

    # One alone may have all the room, and the rest of it is the other's.
    assert [known.scope for known in found.remembered()] == [scopes[0]] * 2 + [scopes[1]] * 4
    assert {known.scope for known in dropped} == {scopes[1]}
    for idx in range(30):
        answered(found, found.named(scopes[0], b"%d" % idx), agent_messages(1), size_bytes)
    assert [known.scope for known in found.remembered()].count(scopes[1]) == 2 + 1


def test_the_last_used_conversations_are_remembered() -> None:
    dropped: list[Known] = []
    found = recogniser(on_dropped=dropped.append)
    openings = [[{"role": "user", "content": f"opening {idx}"}] for idx in range(4)]
    for opening in openings:
        answered(found, found.claim(b"s", messages_from_openai(opening)), opening)

    assert [known.conversation.id for known in dropped] == [dropped[0].conversation.id]
    assert len(found.remembered()) == 3
    kept = {known.conversation.id for known in found.remembered()}
    known = [found.claim(b"s", messages_from_openai(go_on(opening))).conversation.id in kept for opening in openings]
    assert known == [False, True, True, True]


def test_the_sum_of_their_sizes_is_bounded_and_one_may_be_larger() -> None:
    found = recogniser(max_conversations=100)
    opening = [{"role": "user", "content": "u"}]
    for size, remembered in ((400, 1), (400, 2), (400, 2), (5000, 1), (400, 1), (600, 2)):
        answered(found, found.claim(b"s", messages_from_openai(opening)), opening, size)
        assert len(found.remembered()) == remembered


def test_a_claim_is_nobody_elses_until_it_is_given_back() -> None:
    found = recogniser()
    opening = [{"role": "user", "content": "u"}]
    first = found.claim(b"s", messages_from_openai(opening))
    answered(found, first, opening)

    assert found.claim(b"s", messages_from_openai(go_on(opening))) is first
    assert found.claim(b"s", messages_from_openai(go_on(opening))) is not first
    found.restore(first)
    assert found.claim(b"another", messages_from_openai(go_on(opening))) is not first
    assert found.claim(b"s", messages_from_openai(go_on(opening))) is first


def test_nothing_is_left_of_what_is_forgotten() -> None:
    found = recogniser()
    for idx in range(50):
        opening = [{"role": "user", "content": f"opening {idx}"}] * 5
        answered(found, found.claim(b"s", messages_from_openai(opening)), opening)

    assert len(found._waiting._at) == 3 * 4


def test_a_look_up_asks_no_conversation_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recogniser(max_conversations=1000, max_bytes=1 << 30)
    openings = [[{"role": "user", "content": f"opening {idx}"}] for idx in range(200)]
    for opening in openings:
        answered(found, found.claim(b"s", messages_from_openai(opening)), opening)
    compared = []
    from leyline_agent.digests import AnswerDigest

    real = AnswerDigest.matches
    monkeypatch.setattr(AnswerDigest, "matches", lambda self, message: compared.append(1) or real(self, message))
    found.claim(b"s", messages_from_openai(go_on(openings[77])))
    assert len(compared) == 1
