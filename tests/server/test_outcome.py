"""Where a client sees the outcome, and that the note changes nothing else of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang

TOOLS = [
    {
        "type": "function",
        "function": {"name": "cat", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]


def _messages(output: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "You fix packages."},
        {"role": "user", "content": "The tests fail."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "cat", "arguments": '{"path": "x.py"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": output},
        {"role": "user", "content": "Go on, " + "step by step, " * 30},
    ]


def _body(output: str, their_note: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": _messages(output), "tools": TOOLS, "temperature": 0, "max_tokens": 4, **more}
    if their_note is not None:
        body["custom_params"] = {**more.get("custom_params", {}), "leyline": json.dumps(their_note)}
    return body


LONG = "def f(x):\n    return x + 1\n" * 20


def test_chat_header_and_metadata(live: Live) -> None:
    conversation = new_conversation()
    live.http.post("/v1/chat/completions", json=_body(LONG, note(conversation, "1")))
    response = live.http.post("/v1/chat/completions", json=_body("[evicted]", note(conversation, "2", "1")))
    header, metadata = json.loads(response.headers["x-leyline"]), response.json()["metadata"]["leyline"]
    assert header["status"] == metadata["status"] == "spliced"
    assert header["turn"] == metadata["turn"] == "2"
    assert header["moved_tokens"] == metadata["moved_tokens"] > 50
    assert [d["edit_id"] for d in header["directives"]] == [d["edit_id"] for d in metadata["directives"]]
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_chat_stream_has_the_header(live: Live) -> None:
    conversation = new_conversation()
    with live.http.stream(
        "POST", "/v1/chat/completions", json=_body(LONG, note(conversation, "1"), stream=True)
    ) as first:
        assert json.loads(first.headers["x-leyline"])["status"] == "unchanged"
        first.read()
    with live.http.stream(
        "POST", "/v1/chat/completions", json=_body("[evicted]", note(conversation, "2", "1"), stream=True)
    ) as second:
        assert json.loads(second.headers["x-leyline"])["status"] == "spliced"
        assert second.read().decode().rstrip().endswith("[DONE]")


def test_completions_given_ids(live: Live) -> None:
    conversation, ids = new_conversation(), live.ids(300, 1)

    def post(prompt: Any, their_note: dict[str, Any]) -> Any:
        return live.http.post(
            "/v1/completions",
            json={
                "model": "m",
                "prompt": prompt,
                "max_tokens": 2,
                "temperature": 0,
                "custom_params": {"leyline": json.dumps(their_note)},
            },
        )

    post(ids, note(conversation, "1"))
    assert (
        json.loads(post(ids[:20] + ids[80:] + [50], note(conversation, "2", "1")).headers["x-leyline"])["status"]
        == "spliced"
    )
    refused = post("text is not tokenized yet", note(conversation, "3", "2"))
    assert refused.status_code == 200
    assert json.loads(refused.headers["x-leyline"])["reason"] == "unsupported_request"


def test_a_request_without_a_note_says_nothing(live: Live) -> None:
    response = live.http.post("/v1/chat/completions", json=_body(LONG))
    assert "x-leyline" not in response.headers
    assert "leyline" not in (response.json().get("metadata") or {})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cache_salt": "mine"},
        {"extra_key": "mine"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"custom_params": {"thinking_budget": 5}},
        {"rid": "my-own-id", "seed": 3},
    ],
    ids=["plain", "cache_salt", "extra_key", "chat_template_kwargs", "custom_params", "rid"],
)
def test_the_note_leaves_prompt_ids_and_answer_as_they_are(live: Live, more: dict[str, Any]) -> None:
    def post(their_note: dict[str, Any] | None) -> Any:
        live.flush()
        body = _body(LONG, their_note, return_prompt_token_ids=True, **more)
        return live.http.post("/v1/chat/completions", json=body).json()

    with_note, without = post(note(new_conversation(), "1")), post(None)
    ids = with_note["choices"][0]["prompt_token_ids"]
    assert ids == without["choices"][0]["prompt_token_ids"]
    assert len(ids) == with_note["usage"]["prompt_tokens"] > 100
    assert with_note["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    assert with_note["choices"][0]["message"] == without["choices"][0]["message"]


def test_a_header_stays_short_however_many_edits(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(9000, 2)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    edited = [token for idx, token in enumerate(base) if idx % 100 >= 5 or idx > 8500]
    answer = live.generate(edited, note(conversation, "2", "1"), max_new_tokens=1)
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
    assert answer.outcome["num_directives"] == 86 > len(answer.outcome["directives"])
    assert len(json.dumps(answer.outcome)) < 5000
    assert len(answer.body["meta_info"]["leyline"]["directives"]) == 86


def test_metrics_count_turns_by_outcome_and_tokens(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(300, 5)
    before = _metrics(live)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    spliced = live.generate([*base[:100], 77, 78, *base[140:]], note(conversation, "2", "1")).outcome
    refused = live.generate(base, "no note", max_new_tokens=1).outcome
    forgotten = live.generate(base[:50], note(conversation, "3", "2", mode="forget"), max_new_tokens=1).outcome
    assert spliced is not None
    assert refused is not None
    assert forgotten is not None
    more = {name: value - before.get(name, 0) for name, value in _metrics(live).items()}
    assert more['leyline_turns_total{reason="",status="unchanged"}'] == 1
    assert more['leyline_turns_total{reason="",status="spliced"}'] == 1
    assert more['leyline_turns_total{reason="bad_note",status="refused"}'] == 1
    assert sum(value for name, value in more.items() if name.startswith("leyline_turns_total")) == 4
    assert more["leyline_moved_tokens_total"] == spliced["moved_tokens"] > 100
    assert more["leyline_prefilled_tokens_total"] == spliced["prefilled_tokens"] > 0
    assert more["leyline_dropped_tokens_total"] == forgotten["purge"]["dropped_tokens"] > 0
    assert more["leyline_scheduler_seconds_count"] >= 1
    assert not any(name.startswith("leyline") and conversation in name for name in more)


def _metrics(live: Live) -> dict[str, float]:
    lines = [line for line in live.http.get("/metrics").text.splitlines() if line.startswith("leyline_")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
