"""Forgetting: rows that a removed text has touched are never met again by the conversation."""

from __future__ import annotations

import pytest

from leyline_agent.core.protocol import hash_token_ids

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang


def _two_edits(live: Live) -> tuple[str, list[int], list[str]]:
    conversation, base = new_conversation(), live.ids(500, 1)
    live.generate(base, note(conversation, "1"))
    prompt = base[:100] + base[150:300] + live.ids(5, 2) + base[350:]
    outcome = live.generate(prompt, note(conversation, "2", "1")).outcome
    assert outcome is not None
    assert outcome["status"] == "spliced"
    return conversation, prompt, [directive["edit_id"] for directive in outcome["directives"]]


@pytest.mark.parametrize(
    ("which", "kept"),
    [("first", 100), ("second", 250), ("both", 100), ("all", 100), ("unknown", 0)],
)
def test_forget_keeps_only_what_lies_left_of_the_edit(live: Live, which: str, kept: int) -> None:
    conversation, prompt, (first, second) = _two_edits(live)
    asked = {"first": [first], "second": [second], "both": [second, first], "all": "all", "unknown": [first, "x"]}[
        which
    ]
    grown = prompt + live.ids(10, 3)
    answer = live.generate(grown, note(conversation, "3", "2", forget=asked))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "reprefill"
    # In its own namespace everything right of it is gone; how much of it was cached is not of interest here.
    assert answer.outcome["purge"]["dropped_tokens"] > 0
    # The shared namespace holds the base's own prefix, rows of exactly these ids: 100 of them are always clean.
    assert answer.cached_tokens == max(kept, 100)


def test_forgotten_rows_do_not_come_back(live: Live) -> None:
    """After a forget the same prompt gives what a server without any splice gives, also turns later."""
    conversation, prompt, _ = _two_edits(live)
    grown = prompt + live.ids(10, 4)
    live.generate(grown, note(conversation, "3", "2", forget="all"))
    later = live.generate(grown + live.ids(10, 5), note(conversation, "4", "3"), max_new_tokens=12)
    live.flush()
    assert live.generate(grown + live.ids(10, 5), max_new_tokens=12).output_ids == later.output_ids


def test_forget_without_a_known_base_gives_up_the_whole_namespace(live: Live) -> None:
    conversation, prompt, _ = _two_edits(live)
    assert live.cached(prompt, conversation=conversation) > 100
    live.generate(prompt, note(conversation, "3", "never sent", forget="all"))
    # A new namespace: what is cached of the prompt there is nothing, or rows prefilled after the forget.
    assert live.cached(prompt, conversation=conversation) == 0


def test_an_explicit_forget_splices_nothing_from_it_on(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(500, 6)
    live.generate(base, note(conversation, "1"))
    directives = [
        {"start": 50, "end": 60},
        {"start": 200, "end": 220, "replacement_ids": [11, 12], "mode": "forget"},
        {"start": 300, "end": 310},
    ]
    edited = base[:50] + base[60:200] + [11, 12] + base[220:300] + base[310:] + live.ids(5, 7)
    answer = live.generate(
        edited,
        note(conversation, "2", "1", directives=directives, base_len=500, base_hash=hash_token_ids(base)),
        max_new_tokens=12,
    )
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
    assert answer.outcome["moved_tokens"] == 140
    assert answer.cached_tokens == 190


def test_reprefill_keeps_what_lies_left_of_the_first_difference(live: Live) -> None:
    conversation, prompt, _ = _two_edits(live)
    corrected = prompt[:300] + live.ids(3, 8) + prompt[303:] + live.ids(4, 9)
    answer = live.generate(corrected, note(conversation, "3", "2", mode="reprefill"))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "reprefill"
    assert answer.cached_tokens == 300


def test_reprefill_serves_nothing_right_of_the_first_difference_whoever_left_it(live: Live) -> None:
    """The same prompt was spliced before; now it is to be prefilled from its first difference on, and is."""
    conversation, prompt, _ = _two_edits(live)
    answer = live.generate(prompt, note(conversation, "3", "1", mode="reprefill"), max_new_tokens=12)
    assert answer.cached_tokens == 100
    live.flush()
    assert answer.output_ids == live.generate(prompt, max_new_tokens=12).output_ids


def test_reprefill_does_not_prefer_spliced_rows_to_as_many_clean_ones(live: Live) -> None:
    conversation, prompt, _ = _two_edits(live)
    clean = live.generate(prompt, max_new_tokens=12).output_ids
    answer = live.generate(prompt, note(conversation, "3", "1", mode="reprefill"), max_new_tokens=12)
    assert answer.output_ids == clean


@pytest.mark.parametrize("how", ["reprefill", "stale_base", "no_base"])
def test_forget_after_a_turn_whose_log_does_not_cover_its_rows(live: Live, how: str) -> None:
    """Turn 4 meets rows that turn 3 left, under a log in another turn's positions; its forget must not trust that."""
    conversation, prompt, (_, second) = _two_edits(live)
    shorter = prompt[:20] + prompt[80:]
    live.generate(shorter, note(conversation, "3", "2"))
    said = {
        "reprefill": {"base": "2", "mode": "reprefill"},
        "stale_base": {"base": "2", "directives": [], "base_len": 9, "base_hash": "0" * 64},
        "no_base": {},
    }[how]
    live.generate(shorter + live.ids(5, 12), note(conversation, "4", **said))
    later = shorter + live.ids(5, 12) + live.ids(5, 13)
    answer = live.generate(later, note(conversation, "5", "4", forget=[second]), max_new_tokens=12)
    live.flush()
    assert answer.output_ids == live.generate(later, max_new_tokens=12).output_ids


def test_forgetting_all_does_not_trust_the_log(live: Live) -> None:
    """An edit whose caller left before its turn ended is in no log. What "all" stands for must not depend on one."""
    conversation, prompt, _ = _two_edits(live)
    # The same prompt again: nothing differs, and this turn's log is that of a base without edits.
    live.generate(prompt, note(conversation, "3", "1", mode="reprefill"))
    answer = live.generate(prompt + live.ids(4, 11), note(conversation, "4", "3", forget="all"), max_new_tokens=12)
    live.flush()
    assert answer.output_ids == live.generate(prompt + live.ids(4, 11), max_new_tokens=12).output_ids
