"""The memory of turns: bounded, and never of rows that cannot be reached any more. No server here."""

from __future__ import annotations

from array import array
from typing import Any

from leyline_sglang.sequences import Edit, RememberedTurn, SequenceMemory, hash_id

SCOPE = (None, None)


def _memory(**bounds: int) -> SequenceMemory:
    defaults = {
        "turns_per_conversation": 3,
        "conversation_memory_tokens": 1000,
        "memory_tokens": 1000,
        "scope_memory_tokens": 600,
        "max_conversations": 50,
    }
    return SequenceMemory(**defaults | bounds)


def _turn(num_tokens: int, **more: Any) -> RememberedTurn:
    return RememberedTurn(array("i", range(num_tokens)), **more)


def _remember(memory: SequenceMemory, conversation_id: str, turn_id: str, num_tokens: int, scope: Any = SCOPE) -> Any:
    conversation = memory.open(scope, conversation_id)
    memory.remember(conversation, turn_id, _turn(num_tokens), nonce=conversation.nonce)
    return conversation


def test_a_turn_is_replaced_under_its_id_and_the_oldest_go() -> None:
    memory = _memory()
    for turn_id, num_tokens in (("1", 10), ("2", 20), ("2", 30), ("3", 40), ("4", 50)):
        conversation = _remember(memory, "a", turn_id, num_tokens)
    assert list(conversation.turns) == ["2", "3", "4"]
    assert memory.num_tokens == conversation.num_tokens == 120


def test_every_choice_is_a_sequence_and_a_running_turn_has_its_prompt() -> None:
    assert _turn(3).sequences() == [array("i", [0, 1, 2])]
    turn = _turn(2, outputs=(array("i", [7]), array("i", [8, 9])), edits=(Edit("e", 1, "1", 4, 2),))
    assert turn.sequences() == [array("i", [0, 1, 7]), array("i", [0, 1, 8, 9])]
    assert turn.num_tokens == 5


def test_the_least_recently_used_conversation_goes_when_the_whole_is_too_large() -> None:
    memory = _memory(scope_memory_tokens=1000)
    first = _remember(memory, "a", "1", 400)
    nonce = first.nonce
    _remember(memory, "b", "1", 400)
    memory.open(SCOPE, "a")
    _remember(memory, "c", "1", 400)
    assert memory.num_tokens == 800
    assert memory.open(SCOPE, "a").turns
    assert first.nonce == nonce
    assert not memory.open(SCOPE, "b").turns


def test_a_conversation_whose_turns_were_pushed_out_keeps_its_namespace() -> None:
    """Else what it has cached could neither be forgotten nor released any more."""
    memory = _memory()
    first = _remember(memory, "a", "1", 300)
    nonce, first.has_namespace = first.nonce, True
    for idx in range(3):
        _remember(memory, str(idx), "1", 250)
    assert not first.turns
    assert memory.find(SCOPE, "a") is first
    assert (first.nonce, first.has_namespace) == (nonce, True)


def test_one_conversation_is_bounded_by_itself() -> None:
    memory = _memory(conversation_memory_tokens=250)
    conversation = memory.open(SCOPE, "a")
    for turn in ("1", "2", "3"):
        _remember(memory, "a", turn, 100)
    assert list(conversation.turns) == ["2", "3"]


def test_one_tenant_cannot_push_out_another() -> None:
    memory = _memory()
    theirs = _remember(memory, "theirs", "1", 300, scope=(None, "tenant"))
    for idx in range(10):
        _remember(memory, f"mine {idx}", "1", 250)
    assert theirs.turns
    assert memory.num_tokens == 300 + 500


def test_conversations_without_turns_are_bounded_too() -> None:
    memory = _memory()
    for idx in range(1000):
        memory.open(SCOPE, str(idx))
    assert len(memory) == 50


def test_a_turn_of_a_closed_namespace_or_a_dropped_conversation_is_not_kept() -> None:
    memory = _memory()
    conversation = memory.open(SCOPE, "a")
    old_nonce = conversation.nonce
    memory.close_namespace(conversation)
    memory.remember(conversation, "1", _turn(10), nonce=old_nonce)
    assert memory.num_tokens == 0
    for idx in range(60):
        memory.open(SCOPE, str(idx))
    # It ended after so many others had come that its conversation was dropped.
    memory.remember(conversation, "1", _turn(10), nonce=conversation.nonce)
    assert memory.num_tokens == 0


def test_a_turn_that_runs_through_a_flush_is_kept() -> None:
    """It waited meanwhile, or runs on: either way it leaves its rows in the cache as it ends."""
    memory = _memory()
    conversation = memory.open(SCOPE, "a")
    nonce = conversation.nonce
    memory.forget_all()
    memory.remember(conversation, "1", _turn(10), nonce=nonce)
    assert list(memory.open(SCOPE, "a").turns) == ["1"]


def test_a_turn_larger_than_the_memory_leaves_nothing_and_does_no_harm() -> None:
    memory = _memory()
    _remember(memory, "a", "1", 5000)
    assert memory.num_tokens == 0
    _remember(memory, "a", "2", 10)
    assert memory.num_tokens == 10


def test_forgetting_all_leaves_every_conversation_its_namespace() -> None:
    """By its name whatever is cached there all the same can be forgotten or released."""
    memory = _memory()
    conversation = _remember(memory, "a", "1", 10)
    conversation.has_namespace = True
    nonce = conversation.nonce
    memory.forget_all()
    assert memory.num_tokens == 0
    assert (conversation.nonce, conversation.has_namespace) == (nonce, True)


def test_ids_are_kept_as_hashes() -> None:
    memory = _memory()
    conversation = memory.open(SCOPE, "a secret that nobody may read")
    assert "secret" not in repr(conversation)
    assert conversation.hashed_id == hash_id("a secret that nobody may read")
