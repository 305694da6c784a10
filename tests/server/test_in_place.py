"""Moves in place: rows of a conversation's own namespace stay in their slots, and are those that a copy would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang


def _own(live: Live, prompt: list[int], conversation: str) -> dict[str, Any]:
    return live.rows(prompt, conversation=conversation)


def _spliced(live: Live, conversation: str, prompt: list[int], turn: str, base: str) -> dict[str, Any]:
    outcome = live.generate(prompt, note(conversation, turn, base), max_new_tokens=1).outcome
    assert outcome is not None
    assert outcome["status"] == "spliced", outcome
    return outcome


def _first_edit(live: Live, seed: int = 1) -> tuple[str, list[int]]:
    """A conversation with a namespace of its own, and the prompt in it."""
    conversation, base = new_conversation(), live.ids(600, seed)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    prompt = base[:50] + base[80:]
    _spliced(live, conversation, prompt, "2", "1")
    return conversation, prompt


# The kept rows of the second edit: [100, 100 + 30) is cut out, three tokens stand there instead.
def _second_edit(live: Live, prompt: list[int]) -> list[int]:
    return prompt[:100] + live.ids(3, 2) + prompt[130:]


def test_a_later_edit_moves_rows_where_they_are(live: Live) -> None:
    conversation, prompt = _first_edit(live)
    before, used = _own(live, prompt, conversation), live.counts()["available"]
    edited = _second_edit(live, prompt)
    outcome = _spliced(live, conversation, edited, "3", "2")
    after = _own(live, edited, conversation)
    num_kept = outcome["moved_tokens"]
    assert num_kept == 570 - 130 - 1
    assert after["slots"][103 : 103 + num_kept] == before["slots"][130 : 130 + num_kept]
    # R took three slots, the removed span gave back thirty.
    assert live.counts()["available"] >= used + 27
    assert live.cached(prompt, conversation=conversation) == 100


def test_rows_moved_in_place_are_those_of_a_copy_bit_for_bit(live: Live) -> None:
    in_place, prompt = _first_edit(live)
    copied, _ = _first_edit(live)
    # Two branches off the base of the next edit: what lies below a branch is copied.
    for suffix in (5, 6):
        live.generate(prompt + live.ids(4, suffix), note(copied, f"branch {suffix}", "2"), max_new_tokens=1)
    edited = _second_edit(live, prompt)
    found = {}
    for conversation in (in_place, copied):
        slots = _own(live, prompt, conversation)["slots"]
        _spliced(live, conversation, edited, "3", "2")
        found[conversation] = _own(live, edited, conversation)
        stayed = found[conversation]["slots"][103:500] == slots[130:527]
        assert stayed == (conversation == in_place)
    for layer, rows in found[in_place]["rows"].items():
        assert torch.equal(torch.tensor(rows), torch.tensor(found[copied]["rows"][layer])), layer


def test_several_directives_move_in_place_and_nothing_stays_parked(live: Live) -> None:
    conversation, prompt = _first_edit(live)
    before = _own(live, prompt, conversation)["slots"]
    edited = prompt[:100] + live.ids(2, 3) + prompt[120:300] + live.ids(5, 4) + prompt[330:450] + prompt[470:]
    outcome = _spliced(live, conversation, edited, "3", "2")
    assert [(d["start"], d["end"]) for d in outcome["directives"]] == [(100, 120), (300, 330), (450, 470)]
    after = _own(live, edited, conversation)["slots"]
    assert after[102:282] == before[120:300]
    assert after[287:407] == before[330:450]
    assert after[407:505] == before[470:568]
    state = live.http.get("/leyline/conversation", headers={"x-leyline-conversation": conversation}).json()
    # The last token of the prompt has no row in the conversation's namespace until the next turn.
    assert state["own_tokens"] - len(after) in (0, 1)


def test_a_retry_of_an_edited_turn_finds_its_rows(live: Live) -> None:
    conversation, prompt = _first_edit(live)
    edited = _second_edit(live, prompt)
    first = live.generate(edited, note(conversation, "3", "2"))
    again = live.generate(edited, note(conversation, "3", "2"))
    assert again.outcome is not None
    assert again.outcome["status"] == "spliced"
    assert "moved_tokens" not in again.outcome
    assert again.output_ids == first.output_ids
    assert again.cached_tokens >= first.cached_tokens


def test_the_first_edit_copies_since_others_share_the_rows(live: Live) -> None:
    base, conversation = live.ids(400, 9), new_conversation()
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    _spliced(live, conversation, base[:50] + base[80:] + [77], "2", "1")
    assert live.cached(base) == 400


def test_twenty_edits_take_no_more_slots_than_the_prompt(live: Live) -> None:
    conversation, prompt = _first_edit(live)
    for turn in range(20):
        edited = prompt[: 100 + turn] + prompt[104 + turn :] + live.ids(4, 100 + turn)
        _spliced(live, conversation, edited, str(turn + 3), str(turn + 2))
        prompt = edited
    state = live.http.get("/leyline/conversation", headers={"x-leyline-conversation": conversation}).json()
    assert state["own_tokens"] <= len(prompt) + 1
