"""`POST /leyline/splice` and `GET /leyline/capabilities`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from evals.serving import serve
from leyline_agent.cli import main

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang


def _splice(live: Live, base: list[int], directives: Any, conversation: str | None = None, **more: Any) -> Any:
    body = {"v": 1, "conversation": conversation or new_conversation(), "base_ids": base, "directives": directives}
    return live.http.post("/leyline/splice", json={**body, **more})


def test_capabilities(live: Live) -> None:
    found = live.http.get("/leyline/capabilities").json()
    assert found["supported"] is True
    assert found["unsupported"] == []
    assert found["sglang"] == "0.5.23"
    assert "generate_request" in found["installed"]
    assert "secret" not in json.dumps(found["settings"])


def test_a_splice_outside_of_a_request_serves_the_next_one(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(300, 1)
    live.generate(base, max_new_tokens=1)
    reply = _splice(live, base, [{"start": 20, "end": 80, "replacement_ids": [44, 45]}], conversation)
    assert reply.status_code == 200
    outcome = reply.json()["outcome"]
    assert (outcome["status"], outcome["moved_tokens"], outcome["prefilled_tokens"]) == ("spliced", 220, 2)
    edited = [*base[:20], 44, 45, *base[80:]]
    assert reply.json()["token_ids"] == edited
    # The conversation is served from there; nobody else is.
    assert live.generate([*edited, 50], note(conversation, "1")).cached_tokens == len(edited)
    assert live.generate([*edited, 50], note(new_conversation(), "1")).cached_tokens == 22


def test_the_servers_key_covers_our_routes(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(model_dir, api_key="secret", fork=True) as server:
        for method, route in (("GET", "/leyline/capabilities"), ("POST", "/leyline/splice")):
            for key, status in (("", 401), ("wrong", 401), ("secret", 200 if method == "GET" else 400)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                assert httpx.request(method, server.url + route, headers=headers, timeout=30).status_code == status
        assert main(["health", server.url, "--api-key", "secret"]) == 0
        assert main(["health", server.url]) == 1
    assert "401" in capsys.readouterr().err


BAD_BODIES: dict[str, tuple[Any, int, str]] = {
    "not_json": (b"{", 400, "bad_note"),
    "empty": (b"", 400, "bad_note"),
    "a_list": (b"[]", 400, "bad_note"),
    "unknown_version": ({"v": 7}, 400, "unsupported_version"),
    "ten_megabytes": (b"[" * 10_000_000, 413, "note_too_large"),
    "no_directives": ([], 400, "bad_directives"),
    "out_of_order": ([{"start": 100, "end": 110}, {"start": 20, "end": 30}], 400, "bad_directives"),
    "overlapping": ([{"start": 20, "end": 60}, {"start": 50, "end": 90}], 400, "bad_directives"),
    "end_before_start": ([{"start": 60, "end": 20}], 400, "bad_directives"),
    "beyond_the_base": ([{"start": 20, "end": 100_000}], 400, "bad_directives"),
    "unknown_mode": ([{"start": 20, "end": 30, "mode": "burn"}], 400, "bad_directives"),
    "negative_id": ([{"start": 20, "end": 30, "replacement_ids": [-1]}], 400, "bad_directives"),
    "id_beyond_the_vocabulary": (
        [{"start": 20, "end": 30, "replacement_ids": [9_999_999]}],
        400,
        "token_out_of_vocabulary",
    ),
    "a_float": ([{"start": 20.5, "end": 30}], 400, "bad_directives"),
    "base_id_beyond_the_vocabulary": ({"base_ids": [5, 9_999_999]}, 400, "token_out_of_vocabulary"),
    "base_id_beyond_int32": ({"base_ids": [5, 1 << 40]}, 400, "token_out_of_vocabulary"),
    "base_id_negative": ({"base_ids": [5, -9]}, 400, "bad_note"),
    "base_not_cached": ({"base_ids": [1999] * 300}, 409, "evicted"),
    "beyond_the_cached_length": ({"base_ids": None}, 409, "evicted"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_bad_body_is_answered_within_a_second(live: Live, case: str) -> None:
    said, status, reason = BAD_BODIES[case]
    base = live.ids(300, 2)
    live.generate(base[:200] if case == "beyond_the_cached_length" else base, max_new_tokens=1)
    before = live.counts()
    body: dict[str, Any] = {
        "v": 1,
        "conversation": new_conversation(),
        "base_ids": base,
        "directives": [{"start": 210, "end": 230, "replacement_ids": [44]}],
    }
    started = time.monotonic()
    if isinstance(said, bytes):
        response = live.http.post("/leyline/splice", content=said)
    else:
        body.update(
            {"directives": said} if isinstance(said, list) else {k: v for k, v in said.items() if v is not None}
        )
        response = live.http.post("/leyline/splice", json=body)
    assert time.monotonic() - started < 1
    assert (response.status_code, response.json()["reason"]) == (status, reason), response.text[:300]
    assert response.json()["message"]
    assert live.counts() == before
    assert len(live.generate(live.ids(20, 3)).output_ids) == 4
