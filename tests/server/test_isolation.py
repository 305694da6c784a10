"""Nobody is ever served KV that an edit of somebody else has touched."""

from __future__ import annotations

from typing import Any

import pytest

from .live import Answer, Live, new_conversation, note

pytestmark = pytest.mark.sglang


@pytest.fixture
def edited(live: Live) -> tuple[str, list[int], Answer, Answer]:
    """A conversation that has edited; beside its answer the one a server without any edit gives to that prompt."""
    conversation, base = new_conversation(), live.ids(400, 1)
    prompt = base[:50] + live.ids(6, 2) + base[150:] + live.ids(8, 3)
    clean = live.generate(prompt, max_new_tokens=12)
    live.flush()
    live.generate(base, note(conversation, "1"))
    spliced = live.generate(prompt, note(conversation, "2", "1"), max_new_tokens=12)
    assert spliced.outcome is not None
    assert spliced.outcome["status"] == "spliced"
    return conversation, prompt, spliced, clean


def test_the_edited_conversation_is_indeed_served_other_kv(edited: tuple[str, list[int], Answer, Answer]) -> None:
    """Else the tests below could not fail."""
    _, _, spliced, clean = edited
    assert spliced.output_ids != clean.output_ids


@pytest.mark.parametrize("who", ["without_a_note", "another_conversation", "the_same_conversation_elsewhere"])
def test_the_same_text_of_somebody_else_meets_clean_rows_only(
    live: Live, edited: tuple[str, list[int], Answer, Answer], who: str
) -> None:
    conversation, prompt, _, clean = edited
    their_note: dict[str, Any] | None = None
    body: dict[str, Any] = {}
    if who == "another_conversation":
        their_note = note(new_conversation(), "1")
    if who == "the_same_conversation_elsewhere":
        # The id is a bearer secret within one namespace of the caller, not across them.
        their_note, body = note(conversation, "1"), {"cache_salt": "tenant b"}
    answer = live.generate(prompt, their_note, max_new_tokens=12, **body)
    # Shared is the base's prefix alone: R was computed into the conversation's own namespace.
    assert answer.cached_tokens == (0 if body else 50)
    assert answer.output_ids == clean.output_ids


def test_a_client_cannot_name_the_namespace(live: Live, edited: tuple[str, list[int], Answer, Answer]) -> None:
    conversation, prompt, _, _ = edited
    for salt in (conversation, "leyline", "leyline-" + conversation):
        assert live.generate(prompt, cache_salt=salt).cached_tokens == 0
        assert live.generate(prompt, extra_key=salt).cached_tokens == 0


def test_callers_namespaces_stay_apart(live: Live) -> None:
    """The same conversation id under two cache salts is two conversations: the base of one is unknown to the other."""
    conversation, base = new_conversation(), live.ids(200, 4)
    live.generate(base, note(conversation, "1"), cache_salt="tenant a")
    answer = live.generate(base[:20] + base[60:] + [77], note(conversation, "2", "1"), cache_salt="tenant b")
    assert answer.outcome is not None
    assert answer.outcome["reason"] == "unknown_base"
    assert answer.cached_tokens == 0
    answer = live.generate(base[:20] + base[60:] + [77], note(conversation, "2", "1"), cache_salt="tenant a")
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"


def test_the_clean_prefix_stays_shared_until_the_first_edit(live: Live) -> None:
    system = live.ids(200, 5)
    first = live.generate(system + live.ids(50, 6), note(new_conversation(), "1"))
    second = live.generate(system + live.ids(50, 7), note(new_conversation(), "1"))
    assert first.cached_tokens == 0
    assert second.cached_tokens == 200


def test_the_longer_match_serves_the_request(live: Live, edited: tuple[str, list[int], Answer, Answer]) -> None:
    """Where somebody has prefilled the whole edited prompt cleanly since, those rows answer."""
    conversation, prompt, _, clean = edited
    grown = prompt + live.ids(100, 8)
    reference = live.generate(grown, max_new_tokens=12)
    assert reference.cached_tokens == 50
    answer = live.generate(grown, note(conversation, "3", "2"), max_new_tokens=12)
    assert answer.cached_tokens == len(grown) - 1
    assert answer.output_ids == reference.output_ids
    assert clean.output_ids != answer.output_ids
