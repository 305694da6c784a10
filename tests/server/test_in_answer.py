"""Which differences from a base lie in its answer, and what is kept of one where the note asks for a re-prefill."""

from __future__ import annotations

from array import array

import pytest
from leyline_sglang.note import first_in_answer

from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.protocol import Directive, hash_token_ids

from .live import Answer, Live, new_conversation, note

ASK, END = 1, 2
"""The tokens that ask for an answer, and those that end a message."""


def _text(first: int, count: int = 40) -> list[int]:
    return list(range(first, first + count))


def _first(base: list[int], new: list[int], answer_start: int) -> tuple[int | None, list[Directive]]:
    directives = diff_token_ids(base, new)
    return first_in_answer(array("i", base), directives, answer_start=answer_start), directives


def test_a_call_written_anew_lies_in_the_answer() -> None:
    prompt, answer = [*_text(100), ASK], [*_text(300, 5), 7, *_text(400), END]
    new = [*prompt, *_text(300, 5), 8, 8, *_text(400), END, *_text(500)]
    assert _first(prompt + answer, new, len(prompt))[0] == 0


def test_reasoning_that_the_prompt_has_opened_lies_in_the_answer() -> None:
    prompt, answer = [*_text(100), ASK, 50, 51], [*_text(300), 52, *_text(400), END]
    first, directives = _first(prompt + answer, [*_text(100), ASK, *_text(400), END, *_text(500)], len(prompt))
    assert directives[0].start == len(prompt) - 2
    assert first == 0


def test_an_empty_reasoning_in_the_prompt_alone_counts_as_the_answers() -> None:
    """Qwen3 asks for an answer without reasoning by an empty one, which the history has not."""
    prompt, answer = [*_text(100), ASK, 50, 51], [*_text(400), END]
    assert _first(prompt + answer, [*_text(100), ASK, *_text(400), END, *_text(500)], len(prompt))[0] == 0


def test_what_the_history_puts_before_an_answer_counts_as_the_answers() -> None:
    prompt, answer = [*_text(100), ASK], [*_text(400), END]
    assert _first(prompt + answer, [*prompt, 50, 51, *_text(400), END, *_text(500)], len(prompt))[0] == 0


def test_an_output_before_the_answer_lies_outside() -> None:
    prompt, answer = [*_text(100), END, *_text(200), END, ASK], [*_text(400), END]
    new = [*_text(100), END, 9, END, ASK, *_text(400), END, *_text(500)]
    assert _first(prompt + answer, new, len(prompt))[0] is None


@pytest.mark.parametrize("alike", [0, 1, 12], ids=["no_more", "a_token", "a_dozen"])
def test_an_exchange_that_began_as_the_answer_does_is_not_taken_for_it(alike: int) -> None:
    """The diff keeps the head of the dropped call, and takes that of the answer for what went."""
    head = [ASK, *_text(300, alike)]
    dropped = [*head, *_text(600), END, *_text(700), END]
    prompt = [*_text(100), END, *dropped, ASK]
    base = [*prompt, *head[1:], *_text(800), END]
    new = [*_text(100), END, *head, *_text(800), END, *_text(500)]
    first, directives = _first(base, new, len(prompt))
    assert directives[0].end == len(prompt) + alike
    assert first is None


def test_a_message_that_is_put_in_before_the_answer_is_not_taken_for_it() -> None:
    prompt, answer = [*_text(100), END, ASK], [*_text(400), END]
    directive = Directive(start=len(prompt), end=len(prompt), replacement_ids=(*_text(200), END, ASK))
    assert first_in_answer(array("i", prompt + answer), [directive], answer_start=len(prompt)) is None


def test_what_lies_right_of_a_difference_in_the_answer_does_too() -> None:
    prompt, answer = [*_text(100), ASK], [7, *_text(400), 8, *_text(500), END]
    new = [9, *_text(101, 39), ASK, 10, *_text(400), *_text(500), END, *_text(600)]
    first, directives = _first(prompt + answer, new, len(prompt))
    assert (first, len(directives)) == (1, 3)


def _outcome(answer: Answer) -> dict[str, int | str]:
    assert answer.outcome is not None
    names = ("status", "reason", "num_directives", "answer_directives", "moved_tokens", "answer_moved_tokens")
    return {name: answer.outcome[name] for name in names if name in answer.outcome}


def _begin(live: Live, **sampling: int) -> tuple[str, list[int], list[int]]:
    conversation, prompt = new_conversation(), live.ids(300, 1)
    answer = live.generate(prompt, note(conversation, "1"), max_new_tokens=90, **sampling)
    return conversation, prompt, answer.output_ids


@pytest.mark.sglang
def test_a_retry_and_a_partial_one_count_what_was_moved(live: Live) -> None:
    conversation, prompt, output = _begin(live)
    edited = prompt[:50] + live.ids(3, 2) + prompt[80:] + output[:20] + live.ids(2, 3) + output[30:] + live.ids(5, 4)
    whole = {"status": "spliced", "num_directives": 2, "answer_directives": 1}
    answer = live.generate(edited, note(conversation, "2", "1"))
    assert _outcome(answer) == {**whole, "moved_tokens": 220 + 20 + 59, "answer_moved_tokens": 59}
    assert _outcome(live.generate(edited, note(conversation, "2", "1"))) == whole
    live.flush()
    conversation, prompt, output = _begin(live)
    live.evict(prompt + output[:-1], 310)
    refused = live.generate(edited, note(conversation, "2", "1"))
    assert _outcome(refused).get("answer_moved_tokens") is None
    assert refused.outcome is not None
    assert refused.outcome["reason"] == "evicted"


@pytest.mark.sglang
def test_of_several_choices_the_one_that_goes_on_is_looked_at(live: Live) -> None:
    conversation, prompt = new_conversation(), live.ids(300, 1)
    sampling = {"n": 2, "temperature": 1.0, "max_new_tokens": 90}
    body = live.body(prompt, note(conversation, "1"), sampling=sampling)
    outputs = [choice["output_ids"] for choice in live.http.post("/generate", json=body).json()]
    assert outputs[0] != outputs[1]
    edited = prompt + outputs[1][:20] + live.ids(2, 3) + outputs[1][30:] + live.ids(5, 4)
    outcome = _outcome(live.generate(edited, note(conversation, "2", "1")))
    assert (outcome["answer_directives"], outcome["answer_moved_tokens"]) == (1, 59)


@pytest.mark.sglang
def test_a_reprefill_leaves_the_end_of_a_base_alone(live: Live) -> None:
    """A last token that the next prompt has otherwise is no difference: nothing right of it could be kept."""
    conversation, prompt, output = _begin(live)
    grown = prompt + output[:-1] + live.ids(9, 3)
    answer = live.generate(grown, note(conversation, "2", "1", template_changes="reprefill"))
    assert _outcome(answer) == {"status": "unchanged"}
    assert answer.cached_tokens == len(prompt) + len(output) - 1


@pytest.mark.sglang
@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_explicit_directives_in_an_answer_are_carried_out_all_the_same(live: Live, mode: str) -> None:
    conversation, prompt, output = _begin(live)
    base = prompt + output
    explicit = {
        "directives": [{"start": 310, "end": 330, "replacement_ids": [], "mode": mode}],
        "base_len": len(base),
        "base_hash": hash_token_ids(base),
    }
    edited = base[:310] + base[330:] + live.ids(5, 4)
    answer = live.generate(edited, note(conversation, "2", "1", template_changes="reprefill", **explicit))
    assert answer.outcome is not None
    if mode == "amortize":
        assert (answer.outcome["status"], answer.outcome["moved_tokens"]) == ("spliced", len(base) - 330 - 1)
    else:
        assert answer.outcome["purge"]["dropped_tokens"] > 0
        assert live.cached(base) <= 310
