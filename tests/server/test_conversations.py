"""`/leyline/release`, `/leyline/conversation` and their twins for operators: what is cached, and how it is let go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from leyline_sglang.sequences import hash_id

from evals.serving import serve
from leyline_agent.core.protocol import CACHE_SALT_HEADER, CONVERSATION_HEADER, EXTRA_KEY_HEADER

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang


def _edited(live: Live, seed: int = 1, **namespace: Any) -> tuple[str, list[int]]:
    conversation, base = new_conversation(), live.ids(300, seed)
    live.generate(base, note(conversation, "1"), max_new_tokens=1, **namespace)
    prompt = base[:50] + live.ids(4, seed + 1) + base[80:]
    outcome = live.generate(prompt, note(conversation, "2", "1"), max_new_tokens=1, **namespace).outcome
    assert outcome is not None
    assert outcome["status"] == "spliced"
    return conversation, prompt


def _release(live: Live, conversation: str, **more: Any) -> httpx.Response:
    return live.http.post("/leyline/release", json={"v": 1, "conversation": conversation, **more})


def _state(live: Live, conversation: str, **headers: str) -> httpx.Response:
    return live.http.get("/leyline/conversation", headers={CONVERSATION_HEADER: conversation, **headers})


def test_release_frees_the_namespace_and_leaves_what_is_shared(live: Live) -> None:
    conversation, prompt = _edited(live)
    held = live.cached(prompt, conversation=conversation)
    shared, before = live.cached(live.ids(300, 1)), live.counts()
    reply = _release(live, conversation)
    assert reply.status_code == 200
    purge = reply.json()["purge"]
    assert purge["dropped_tokens"] >= held
    assert (purge["held_tokens"], purge["scrubbed_tokens"]) == (0, 0)
    assert live.counts()["available"] == before["available"] + purge["dropped_tokens"]
    assert live.cached(live.ids(300, 1)) == shared


def test_a_released_conversation_starts_anew(live: Live) -> None:
    conversation, prompt = _edited(live)
    _release(live, conversation)
    assert _release(live, conversation).status_code == 404
    assert _state(live, conversation).json()["reason"] == "unknown_conversation"
    answer = live.generate([*prompt, 77], note(conversation, "3", "2"))
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "unknown_base"
    later = live.generate([*prompt, 77, 78], note(conversation, "4", "3"))
    assert later.outcome is not None
    assert later.outcome["status"] == "unchanged"


def test_release_can_scrub(live: Live) -> None:
    conversation, _ = _edited(live)
    purge = _release(live, conversation, scrub=True).json()["purge"]
    assert purge["scrubbed_tokens"] == live.counts()["available"]


def test_nothing_is_scrubbed_while_the_pool_has_no_memory(live: Live) -> None:
    conversation, _ = _edited(live)
    assert live.http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
    try:
        reply = _release(live, conversation, scrub=True)
    finally:
        assert live.http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
    assert reply.status_code == 200
    assert reply.json()["purge"]["scrubbed_tokens"] == 0
    conversation, _ = _edited(live)
    assert _release(live, conversation, scrub=True).json()["purge"]["scrubbed_tokens"] > 0


def test_release_of_one_callers_namespace_is_not_that_of_another(live: Live) -> None:
    conversation, prompt = _edited(live, cache_salt="tenant a")
    assert _release(live, conversation).status_code == 404
    assert _release(live, conversation, cache_salt="tenant b").status_code == 404
    assert live.cached(prompt, conversation=conversation, cache_salt="tenant a") > 0
    assert _release(live, conversation, cache_salt="tenant a").status_code == 200


def test_the_state_of_a_conversation(live: Live) -> None:
    conversation, prompt = _edited(live, cache_salt="tenant a", extra_key="adapter")
    assert _state(live, conversation).status_code == 404
    found = _state(live, conversation, **{CACHE_SALT_HEADER: "tenant a", EXTRA_KEY_HEADER: "adapter"}).json()
    assert found["conversation_hash"] == hash_id(conversation)
    assert found["own_tokens"] >= len(prompt) - 1
    first, second = found["turns"]
    assert (first["turn"], first["own_namespace"], first["edits"]) == ("1", False, [])
    assert first["cached_tokens"] == first["prompt_tokens"] == 300
    assert (second["turn"], second["own_namespace"]) == ("2", True)
    (edit,) = second["edits"]
    assert (edit["turn"], edit["position"], edit["removed_tokens"], edit["replacement_tokens"]) == ("2", 50, 30, 4)
    assert not any(str(token) in json.dumps(found) for token in (conversation, str(prompt[:3])[1:-1]))


def test_the_state_needs_the_id_in_a_header(live: Live) -> None:
    conversation, _ = _edited(live)
    reply = live.http.get("/leyline/conversation", params={"conversation": conversation})
    assert (reply.status_code, reply.json()["reason"]) == (400, "bad_note")
    assert "header" in reply.json()["message"]


@pytest.mark.parametrize("field", ["cache_salt", "cache_salts"])
def test_a_caller_cannot_name_a_namespace_of_the_server(live: Live, field: str) -> None:
    salt: Any = "leyline-" + "0" * 64
    body = {"input_ids": live.ids(5, 1), "sampling_params": {"max_new_tokens": 1}, "cache_salt": salt}
    if field == "cache_salts":
        body |= {"input_ids": [live.ids(5, 1), live.ids(5, 2)], "cache_salt": ["mine", salt]}
    response = live.http.post("/generate", json=body)
    assert response.status_code == 400
    assert "leyline-" in response.text


# --- with keys --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(model_dir: Path, probe_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("locked") / "server.log"
    keys = {"api_key": "user", "admin_api_key": "admin"}
    args = ("--log-requests", "--log-requests-level", "3")
    with (
        serve(model_dir, env=probe_env, extra_args=args, log_path=log, fork=True, **keys) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http, log


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_hash_is_for_admins_and_the_id_for_its_owner(locked: tuple[httpx.Client, Path]) -> None:
    http, _ = locked
    conversation = new_conversation()
    params = {"max_new_tokens": 1, "custom_params": {"leyline": json.dumps(note(conversation, "1"))}}
    body = {"input_ids": list(range(20, 60)), "sampling_params": params}
    assert http.post("/generate", json=body, headers=_key("user")).status_code == 200
    by_hash = {"conversation_hash": hash_id(conversation)}
    for key, status in (("", 401), ("user", 401), ("admin", 200)):
        headers = _key(key) if key else {}
        assert http.get("/leyline/admin/conversation", params=by_hash, headers=headers).status_code == status
    assert http.post("/leyline/admin/release", json=by_hash, headers=_key("user")).status_code == 401
    owner = {CONVERSATION_HEADER: conversation}
    assert http.get("/leyline/conversation", headers=owner).status_code == 401
    assert http.get("/leyline/conversation", headers=owner | _key("user")).status_code == 200
    assert http.post("/leyline/admin/release", json=by_hash, headers=_key("admin")).status_code == 200
    assert http.get("/leyline/conversation", headers=owner | _key("user")).status_code == 404


def test_logs_hold_the_hash_and_never_the_id(locked: tuple[httpx.Client, Path]) -> None:
    """Also where the server logs whole requests; metrics have neither."""
    http, log = locked
    conversation, base = new_conversation(), list(range(100, 300))
    for turn, ids in (("1", base), ("2", base[:20] + base[60:] + [77])):
        text = json.dumps(note(conversation, turn, str(int(turn) - 1) if turn > "1" else None))
        params = {"max_new_tokens": 1, "custom_params": {"leyline": text}}
        http.post("/generate", json={"input_ids": ids, "sampling_params": params}, headers=_key("user"))
    http.post("/leyline/release", json={"v": 1, "conversation": conversation}, headers=_key("user"))
    lines = [json.loads(line.split("leyline: ", 1)[1]) for line in log.read_text().splitlines() if "leyline: {" in line]
    mine = [line for line in lines if line["conversation"] == hash_id(conversation)]
    assert [line["event"] for line in mine] == ["splice", "release"]
    assert mine[0]["moved_tokens"] == 140
    assert conversation not in log.read_text()
    metrics = http.get("/metrics").text
    assert conversation not in metrics
    assert hash_id(conversation) not in metrics
