"""What is refused: the reason is told, the request is answered as if it had no note, and nothing is lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from leyline_agent.core.protocol import hash_token_ids

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang


def _explicit(base: list[int], directives: Any, **more: Any) -> dict[str, Any]:
    return {"directives": directives, "base_len": len(base), "base_hash": hash_token_ids(base), **more}


BASE_TOKENS = 200

# What the note of turn 2 says beside conversation and turn, and the reason it is refused for.
BAD_NOTES: dict[str, tuple[Any, str]] = {
    "not_json": ("{", "bad_note"),
    "empty": ("", "bad_note"),
    "a_list": ("[]", "bad_note"),
    "unknown_version": ({"v": 2}, "unsupported_version"),
    "unknown_key": ({"color": "red"}, "bad_note"),
    "unknown_mode": ({"mode": "shrink"}, "bad_note"),
    "guessable_id": ({"conversation": "me"}, "bad_note"),
    "unknown_base": ({"base": "never"}, "unknown_base"),
    "half_explicit": ({"directives": []}, "bad_note"),
    "out_of_order": ([{"start": 100, "end": 110}, {"start": 20, "end": 30}], "bad_directives"),
    "overlapping": ([{"start": 20, "end": 60}, {"start": 50, "end": 90}], "bad_directives"),
    "end_before_start": ([{"start": 60, "end": 20}], "bad_directives"),
    "negative": ([{"start": -5, "end": 20}], "bad_directives"),
    "beyond_the_base": ([{"start": 20, "end": 100_000}], "bad_directives"),
    "unknown_directive_mode": ([{"start": 20, "end": 30, "mode": "burn"}], "bad_directives"),
    "negative_id": ([{"start": 20, "end": 30, "replacement_ids": [-1]}], "bad_directives"),
    "id_beyond_the_vocabulary": ([{"start": 20, "end": 30, "replacement_ids": [9_999_999]}], "token_out_of_vocabulary"),
    "id_beyond_int32": ([{"start": 20, "end": 30, "replacement_ids": [1 << 40]}], "token_out_of_vocabulary"),
    "not_a_prefix_of_the_prompt": ([{"start": 20, "end": 30, "replacement_ids": [11]}], "stale_base"),
    "wrong_hash": ({"directives": [], "base_len": 200, "base_hash": "0" * 64}, "stale_base"),
    "longer_than_the_base": ({"directives": [], "base_len": 9000, "base_hash": "0" * 64}, "stale_base"),
}


@pytest.mark.parametrize("case", BAD_NOTES)
def test_a_bad_note_is_told_and_the_request_served(live: Live, case: str) -> None:
    said, reason = BAD_NOTES[case]
    conversation, base = new_conversation(), live.ids(BASE_TOKENS, 1)
    edited = base[:20] + base[90:] + live.ids(4, 2)
    clean = live.generate(edited)
    live.flush()
    live.generate(base, note(conversation, "1"))
    slots = live.rows(base)["slots"]
    if isinstance(said, list):
        said = _explicit(base, said)
    if isinstance(said, dict):
        said = json.dumps({**note(conversation, "2", "1"), **said})
    answer = live.generate(edited, said)
    assert answer.outcome is not None
    assert (answer.outcome["status"], answer.outcome["reason"]) == ("refused", reason), answer.outcome
    assert answer.outcome["message"]
    assert conversation not in json.dumps(answer.outcome)
    assert answer.output_ids == clean.output_ids
    assert answer.cached_tokens == 20
    # What the base held it still holds, and the conversation goes on.
    assert live.rows(base)["slots"][:BASE_TOKENS] == slots[:BASE_TOKENS]
    later = live.generate(edited, note(conversation, "3", "1"))
    assert later.outcome is not None
    assert later.outcome["status"] == "spliced"


def test_ten_megabytes_of_note(live: Live) -> None:
    ids = live.ids(50, 3)
    started = time.monotonic()
    answer = live.generate(ids, " " * 10_000_000)
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "note_too_large"
    assert len(answer.output_ids) == 4
    assert time.monotonic() - started < 5


def test_a_note_that_is_no_string(live: Live) -> None:
    answer = live.generate(live.ids(50, 4), sampling={"custom_params": {"leyline": {"v": 1}}})
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "bad_note"
    assert len(answer.output_ids) == 4


@pytest.mark.parametrize("ids", [[5, 10_000_000], [5, -3]], ids=["beyond", "negative"])
def test_a_prompt_with_ids_outside_the_vocabulary_is_a_400(live: Live, ids: list[int]) -> None:
    """They kill a stock server when they reach a prefill; with a note they do not get that far."""
    answer = live.generate(ids, note(new_conversation(), "1"))
    assert answer.status_code == 400
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "token_out_of_vocabulary"


@pytest.mark.parametrize(
    "body",
    [{"input_ids": [[11, 12, 13], [14, 15]]}, {"text": "not tokenized yet"}],
    ids=["batch", "text"],
)
def test_requests_without_one_list_of_ids_are_served_plain(live: Live, body: dict[str, Any]) -> None:
    params = {"max_new_tokens": 2, "custom_params": {"leyline": json.dumps(note(new_conversation(), "1"))}}
    response = live.http.post("/generate", json={**body, "sampling_params": params})
    assert response.status_code == 200
    assert json.loads(response.headers["x-leyline"])["reason"] == "unsupported_request"


def test_an_evicted_base_is_refused_and_the_turn_re_prefilled(live: Live) -> None:
    """The memory of a turn outlives its rows where the cache is full; flushing from under it is the extreme case."""
    conversation, base = new_conversation(), live.ids(200, 5)
    live.generate(base, note(conversation, "1"))
    live.evict_all()
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"))
    assert answer.outcome is not None
    assert (answer.outcome["status"], answer.outcome["reason"]) == ("refused", "evicted")
    assert answer.cached_tokens == 0
    later = live.generate(base[:20] + base[110:] + [77], note(conversation, "3", "2"))
    assert later.outcome is not None
    assert later.outcome["status"] == "spliced"


def test_a_flush_forgets_the_turns(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(200, 6)
    live.generate(base, note(conversation, "1"))
    live.flush()
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"))
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "unknown_base"


def test_a_partly_cached_base_gives_what_it_has(live: Live) -> None:
    """The base is cut to its cached length: 150 of 200 tokens are left, so 60 of the 110 behind the edit are moved."""
    conversation, base = new_conversation(), live.ids(200, 7)
    live.generate(base, note(conversation, "1"))
    live.evict_all()
    live.generate(base[:150], max_new_tokens=0)
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
    assert answer.outcome["moved_tokens"] == 60
    assert answer.cached_tokens == 80


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "log probabilities"),
    ],
    ids=["logprobs_of_the_prompt"],
)
def test_what_a_splice_cannot_help_is_served_plain(live: Live, body: dict[str, Any], said: str) -> None:
    conversation, base = new_conversation(), live.ids(200, 8)
    live.generate(base, note(conversation, "1"))
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"), **body)
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "unsupported_request"
    assert said in answer.outcome["message"]


def test_a_prompt_beyond_the_context_is_a_400_and_nothing_is_spliced(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(200, 9)
    live.generate(base, note(conversation, "1"))
    before = live.counts()
    answer = live.generate(base[:20] + [13] * 66_000 + base[30:], note(conversation, "2", "1"))
    assert answer.status_code == 400
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "unsupported_request"
    assert live.counts() == before


def test_a_refused_flush_forgets_nothing(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(200, 10)
    live.generate(base, note(conversation, "1"))
    body = {
        "input_ids": live.ids(20, 11),
        "stream": True,
        "sampling_params": {"max_new_tokens": 60, "ignore_eos": True},
    }
    with live.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert live.http.post("/flush_cache").status_code == 400
        assert list(lines)
    answer = live.generate(base[:20] + base[90:] + [77], note(conversation, "2", "1"))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
