"""R computed in the batch of the request that reads it: the same rows and answers as in a batch before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from .live import Answer, Live, new_conversation, note

pytestmark = pytest.mark.sglang

BASE_TOKENS = 300
# Relative L2 of rows that two batches have computed: 4.2e-6 was seen in 40 edits of 300 tokens.
SAME_ROWS = 2e-5


@pytest.fixture(scope="module")
def two_steps(serve_probed: Callable[..., AbstractContextManager[Live]]) -> Iterator[Live]:
    with serve_probed(LEYLINE_ONE_STEP="0") as live:
        yield live


def _talk(live: Live, seed: int, *, num_edits: int = 3) -> list[tuple[Answer, list[int], dict[str, Any]]]:
    """Edit a conversation in one to four places each turn; return answers, prompts and what is cached of them."""
    rng = random.Random(seed)
    conversation, prompt = new_conversation(), live.ids(BASE_TOKENS, seed)
    answer = live.generate(prompt, note(conversation, "0"))
    turns = []
    for turn in range(1, num_edits + 1):
        base, prompt = prompt + answer.output_ids[:-1], []
        cuts = sorted(rng.sample(range(10, len(base) - 10), 2 * rng.choice([1, 1, 2, 4])))
        at = 0
        for start, end in zip(cuts[::2], cuts[1::2], strict=True):
            prompt += base[at:start] + live.ids(rng.choice([0, 3, 12]), rng.randrange(1 << 30))
            at = min(end, start + 30)
        prompt += base[at:] + live.ids(5, rng.randrange(1 << 30))
        answer = live.generate(prompt, note(conversation, str(turn), str(turn - 1)))
        turns.append((answer, prompt, live.rows(prompt, conversation=conversation)))
    return turns


def _facts(answer: Answer) -> dict[str, Any]:
    assert answer.outcome is not None
    names = ("status", "reason", "kept_tokens", "moved_tokens", "prefilled_tokens", "num_directives")
    return {name: answer.outcome.get(name) for name in names}


def _in_one_step(answer: Answer) -> bool:
    """An R in a batch of its own is waited for."""
    assert answer.outcome is not None
    return "prefill" not in answer.outcome["stages_ms"] and bool(answer.outcome.get("prefilled_tokens"))


@pytest.mark.parametrize("seed", range(8))
def test_rows_answers_and_outcomes_are_those_of_two_steps(live: Live, two_steps: Live, seed: int) -> None:
    num_in_one = 0
    for one, two in zip(_talk(live, seed), _talk(two_steps, seed), strict=True):
        assert one[1] == two[1], "the two servers have answered differently before"
        assert _facts(one[0]) == _facts(two[0])
        assert one[0].cached_tokens == two[0].cached_tokens
        assert one[0].output_ids == two[0].output_ids
        num_in_one += _in_one_step(one[0])
        assert not _in_one_step(two[0])
        for layer, rows in one[2]["rows"].items():
            found, expected = torch.tensor(rows), torch.tensor(two[2]["rows"][layer])
            assert found.shape == expected.shape
            assert (found - expected).norm() / expected.norm() < SAME_ROWS
    assert num_in_one, "no R was computed beside its request: this test shows nothing"


def _edited(live: Live, base: list[int], *, replacement_tokens: int = 7) -> list[int]:
    return base[:100] + live.ids(replacement_tokens, 2) + base[150:] + live.ids(5, 3)


def _begin(live: Live) -> tuple[str, list[int]]:
    conversation, prompt = new_conversation(), live.ids(BASE_TOKENS, 1)
    answer = live.generate(prompt, note(conversation, "1"))
    return conversation, prompt + answer.output_ids[:-1]


def _status(answer: Answer) -> str:
    assert answer.outcome is not None
    return answer.outcome.get("reason") or answer.outcome["status"]


def test_edits_beside_requests_that_decode(live: Live) -> None:
    alone = [live.generate(live.ids(40, 50 + idx), max_new_tokens=150).output_ids for idx in range(3)]
    live.flush()
    decoding = [live.send(live.ids(40, 50 + idx), max_new_tokens=150) for idx in range(3)]
    conversations = [new_conversation() for _ in range(3)]
    begun = [live.send(live.ids(BASE_TOKENS, 60 + idx), note(name, "1")) for idx, name in enumerate(conversations)]
    edited = []
    for idx, name in enumerate(conversations):
        base = live.ids(BASE_TOKENS, 60 + idx) + begun[idx].result().output_ids[:-1]
        edited.append(live.send(_edited(live, base), note(name, "2", "1")))
    assert [_status(turn.result()) for turn in edited] == ["spliced"] * 3
    assert [request.result().output_ids for request in decoding] == alone


def test_a_long_replacement_is_computed_in_a_batch_of_its_own(live: Live) -> None:
    conversation, base = _begin(live)
    answer = live.generate(_edited(live, base, replacement_tokens=600), note(conversation, "2", "1"))
    assert _status(answer) == "spliced"
    assert not _in_one_step(answer)
    assert answer.outcome is not None
    assert answer.outcome["prefilled_tokens"] == 600


@pytest.mark.parametrize("rid", [None, "of_two"], ids=["unnamed", "named"])
def test_several_choices_are_served_in_two_steps(live: Live, rid: str | None) -> None:
    conversation, base = _begin(live)
    body = live.body(_edited(live, base), note(conversation, "2", "1"), sampling={"n": 2}, rid=rid)
    response = live.http.post("/generate", json=body)
    assert response.status_code == 200
    for choice in response.json():
        assert choice["meta_info"]["leyline"]["status"] == "spliced"
        assert "prefill" in choice["meta_info"]["leyline"]["stages_ms"]


@pytest.mark.parametrize("num_edits", [1, 2], ids=["copied", "in_place"])
def test_a_request_that_the_engine_gives_up_moves_nothing(live: Live, num_edits: int) -> None:
    """The engine admits it with another prompt, to end it."""
    conversation, base = _begin(live)
    turn = "1"
    if num_edits == 2:
        first = live.generate(base[:50] + base[60:], note(conversation, "1b", "1"))
        base, turn = base[:50] + base[60:] + first.output_ids[:-1], "1b"
    prompt = _edited(live, base)
    live.http.post("/generate", json=live.body(prompt, note(conversation, "2", turn), sampling={"regex": "("}))
    again = live.generate(prompt, note(conversation, "3", turn))
    assert _status(again) == "spliced"


def test_the_next_turn_waits_for_the_edits_only(live: Live) -> None:
    conversation, base = _begin(live)
    long = live.send(_edited(live, base), note(conversation, "2", "1"), max_new_tokens=400)
    live.wait_until(lambda: live.counts()["running"] > 0)
    other = live.generate(base[:60] + live.ids(3, 5) + base[90:], note(conversation, "2b", "1"))
    assert _status(other) == "spliced"
    assert not long.done(), "the other turn waited until this one had ended"
    assert len(long.result().output_ids) == 400


@pytest.mark.parametrize("edits", [1, 2], ids=["copied", "in_place"])
def test_a_kernel_that_fails_costs_a_prefill(live: Live, edits: int) -> None:
    conversation, base = _begin(live)
    if edits == 2:
        first = live.generate(base[:50] + base[60:], note(conversation, "1b", "1"))
        base = base[:50] + base[60:] + first.output_ids[:-1]
    prompt = _edited(live, base)
    plain = live.generate(prompt, cache_salt="plain").output_ids
    live.break_kernel()
    answer = live.generate(prompt, note(conversation, "2", "1b" if edits == 2 else "1"))
    assert _status(answer) == "internal_error"
    if edits == 1:
        assert answer.output_ids == plain
    later = live.generate(prompt + answer.output_ids + live.ids(3, 9), note(conversation, "3", "2"))
    assert later.cached_tokens >= len(prompt)


def test_what_was_done_before_a_failure_stays_and_can_be_forgotten(live: Live) -> None:
    conversation, base = _begin(live)
    first = base[:50] + base[60:]
    live.generate(first, note(conversation, "1b", "1"))
    # Both runs turn where they are; the second fails.
    prompt = first[:80] + live.ids(3, 1) + first[90:150] + live.ids(4, 2) + first[170:] + live.ids(5, 3)
    live.break_kernel(skip=1)
    answer = live.generate(prompt, note(conversation, "2", "1b"))
    assert answer.outcome is not None
    assert (answer.outcome["status"], answer.outcome["reason"]) == ("partial", "internal_error")
    assert answer.outcome["moved_tokens"] == 60
    assert len(live.turn(conversation, "2")["edits"]) == 2, "of the turn before, and the one that was carried out"


def test_an_evicted_base_costs_a_prefill(live: Live) -> None:
    conversation, base = _begin(live)
    prompt = _edited(live, base)
    plain = live.generate(prompt, cache_salt="plain").output_ids
    live.evict(base, 120)
    answer = live.generate(prompt, note(conversation, "2", "1"))
    assert (_status(answer), answer.output_ids) == ("evicted", plain)


def test_a_request_of_somebody_else_under_the_same_id_is_served_as_any_other(live: Live) -> None:
    conversation, base = _begin(live)
    prompt = _edited(live, base)
    live.generate(prompt, note(conversation, "2", "1"))
    announced = {"announce": "same", "ids": prompt, "conversation": conversation}
    live.http.post("/probe", json=announced).raise_for_status()
    mine = live.generate(prompt, rid="same")
    # What is shared of it lies left of the edit; the spliced rows are in the conversation's own namespace.
    assert mine.cached_tokens <= 100 + 7
    assert live.counts()["announced"] == 1, "somebody else's edits were taken"
    live.http.post("/probe", json=announced | {"cancel": True}).raise_for_status()
    live.wait_until(lambda: live.counts()["announced"] == 0)


def test_two_turns_at_once_are_spliced_one_after_the_other(live: Live) -> None:
    conversation, base = _begin(live)
    prompts = [base[:100] + live.ids(7, 20 + idx) + base[150:] + live.ids(5, 30 + idx) for idx in range(2)]
    answers = [live.send(prompt, note(conversation, f"2{idx}", "1")) for idx, prompt in enumerate(prompts)]
    assert [_status(answer.result()) for answer in answers] == ["spliced"] * 2
    for prompt, answer in zip(prompts, answers, strict=True):
        live.flush()
        alone = new_conversation()
        live.generate(live.ids(BASE_TOKENS, 1), note(alone, "1"))
        assert live.generate(prompt, note(alone, "2", "1")).output_ids == answer.result().output_ids


@pytest.fixture(scope="module")
def narrow(serve_probed: Callable[..., AbstractContextManager[Live]]) -> Iterator[Live]:
    """A server that runs two requests at once: an R and its request have no room beside another one."""
    with serve_probed("--max-running-requests", "2") as live:
        yield live
        live.assert_conserved()


def test_a_request_without_room_for_its_r_waits(narrow: Live) -> None:
    conversation, base = _begin(narrow)
    others = [narrow.send(narrow.ids(30, idx), max_new_tokens=60) for idx in range(3)]
    answer = narrow.generate(_edited(narrow, base), note(conversation, "2", "1"))
    assert _status(answer) == "spliced"
    assert _in_one_step(answer)
    assert all(len(other.result().output_ids) == 60 for other in others)


def test_the_next_turn_waits_until_announced_edits_are_done(narrow: Live) -> None:
    """It would meet rows that are keyed and not yet written."""
    live = narrow
    conversation, base = _begin(live)
    busy = [live.send(live.ids(40, 8 + idx), max_new_tokens=300) for idx in range(2)]
    live.wait_until(lambda: live.counts()["running"] == 2)
    first = live.send(_edited(live, base), note(conversation, "2", "1"))
    live.wait_until(lambda: live.counts()["announced"] == 1)
    second = live.send(base[:60] + live.ids(3, 5) + base[90:], note(conversation, "2b", "1"))
    live.wait_until(lambda: live.counts()["edited_requests"] == 1)
    # Each of these asks the scheduler, which would have been told by then.
    assert [live.counts()["announced"] for _ in range(3)] == [1, 1, 1]
    assert not any(one.done() for one in busy), "the first one was admitted meanwhile"
    assert [_status(answer.result()) for answer in (first, second)] == ["spliced"] * 2


def test_what_no_batch_has_room_for_takes_two_steps(narrow: Live) -> None:
    conversation, base = _begin(narrow)
    prompt = base[:50] + narrow.ids(3, 1) + base[80:150] + narrow.ids(3, 2) + base[180:] + narrow.ids(5, 3)
    answer = narrow.generate(prompt, note(conversation, "2", "1"))
    assert _status(answer) == "spliced"
    assert not _in_one_step(answer)


@pytest.mark.parametrize("what", ["edited", "grown"])
@pytest.mark.parametrize("how", ["leaves", "aborts"])
def test_a_request_that_ends_before_it_is_admitted(narrow: Live, how: str, what: str) -> None:
    """Its edits are not carried out, or it is not told from where it would have been served."""
    live = narrow
    conversation, base = _begin(live)
    prompt = _edited(live, base)
    if what == "grown":
        edited = live.generate(prompt, note(conversation, "1", "1"))
        assert _status(edited) == "spliced"
        prompt = prompt + edited.output_ids + live.ids(9, 4)
    # An R needs room of its own, a grown prompt only its own.
    num_busy = {"edited": 1, "grown": 2}[what]
    busy = [live.send(live.ids(40, 8 + idx), max_new_tokens=300) for idx in range(num_busy)]
    live.wait_until(lambda: live.counts()["running"] == num_busy)
    if how == "leaves":
        with live.caller(prompt, note(conversation, "2", "1"), stream=True):
            live.wait_until(lambda: live.counts()["announced"] > 0)
    else:
        answer = live.send(prompt, note(conversation, "2", "1"), rid="mine")
        live.wait_until(lambda: live.counts()["announced"] > 0)
        live.http.post("/abort_request", json={"rid": "mine"})
        assert _status(answer.result()) == {"edited": "aborted", "grown": "unchanged"}[what]
    live.wait_until(lambda: live.counts()["announced"] == 0)
    assert all(len(one.result().output_ids) == 300 for one in busy)
    again = live.generate(prompt, note(conversation, "3", "1"))
    assert _status(again) == {"edited": "spliced", "grown": "unchanged"}[what]
    if what == "grown":
        assert again.cached_tokens == len(prompt) - 10
