from __future__ import annotations

from typing import Any

import pytest

from leyline_agent import Conversation, Policy
from leyline_agent.prepared_turn import PreparedTurn

Chat = dict[str, Any]


def entry(call_id: str) -> Chat:
    return {"id": call_id, "type": "function", "function": {"name": "read", "arguments": "{}"}}


def result(call_id: str) -> Chat:
    return {"role": "tool", "tool_call_id": call_id, "content": f"output of {call_id}, which is long"}


HISTORY: list[Chat] = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [entry("a"), entry("b")]},
    result("a"),
    result("b"),
    {"role": "assistant", "content": "Next.", "tool_calls": [entry("c")]},
    result("c"),
]


def prepare(conversation: Conversation, messages: list[Chat] = HISTORY) -> PreparedTurn:
    return conversation.prepare({"messages": messages})


def sent(conversation: Conversation, messages: list[Chat] = HISTORY) -> list[Chat]:
    edited: list[Chat] = prepare(conversation, messages).body["messages"]
    return edited


def test_edit_by_message_or_index_is_made_again_each_turn() -> None:
    conversation = Conversation()
    conversation.edit(result("a"), "A")
    assert sent(conversation)[2]["content"] == "A"
    conversation.edit(3, "B")
    longer = sent(conversation, [*HISTORY, {"role": "user", "content": "more"}])
    assert [longer[2]["content"], longer[3]["content"]] == ["A", "B"]


def test_edit_is_amortized_and_undone_says_reprefill() -> None:
    conversation = Conversation()
    conversation.commit(prepare(conversation), {"role": "assistant", "content": "x"})
    longer = [*HISTORY, {"role": "assistant", "content": "x"}]
    conversation.edit(2, "A")
    turn = prepare(conversation, longer)
    assert turn.note is not None
    assert turn.note.mode == "amortize"
    conversation.commit(turn, {"role": "assistant", "content": "y"})
    conversation.undo_edit(result("a"))
    undone = prepare(conversation, [*longer, {"role": "assistant", "content": "y"}])
    assert undone.note is not None
    assert undone.note.mode == "reprefill"
    # The turn got no outcome, so its edits are not known by id.
    assert undone.note.forget == "all"
    assert undone.unexplained == ("the edit of message 2 was undone",)


def test_edit_that_forgets_says_forget() -> None:
    conversation = Conversation()
    conversation.commit(prepare(conversation), {"role": "assistant", "content": "x"})
    conversation.edit(2, "A", mode="forget")
    turn = prepare(conversation, [*HISTORY, {"role": "assistant", "content": "x"}])
    assert turn.note is not None
    assert turn.note.mode == "forget"


def test_one_of_equal_messages_is_edited_by_occurrence() -> None:
    same = {"role": "user", "content": "again"}
    conversation = Conversation()
    conversation.edit(same, "second", occurrence=1)
    assert [m["content"] for m in sent(conversation, [same, same, same])] == ["again", "second", "again"]


def test_dropping_a_result_drops_its_call_only() -> None:
    conversation = Conversation()
    conversation.edit(result("a"), None)
    messages = sent(conversation)
    assert messages[1]["tool_calls"] == [entry("b")]
    assert messages[2:] == HISTORY[3:]


def test_dropping_the_only_result_leaves_the_text_of_its_message() -> None:
    conversation = Conversation()
    conversation.edit(result("c"), None)
    assert sent(conversation)[4:] == [{"role": "assistant", "content": "Next."}]


def test_dropping_all_results_or_the_call_drops_the_whole_turn() -> None:
    by_results, by_call = Conversation(), Conversation()
    by_results.edit(result("a"), None)
    by_results.edit(result("b"), None)
    by_call.edit(HISTORY[1], None)
    assert sent(by_results) == sent(by_call) == [HISTORY[0], *HISTORY[4:]]


def test_replacement_that_parts_a_call_from_its_result_is_refused() -> None:
    conversation = Conversation()
    with pytest.raises(ValueError, match="a call and its results belong together"):
        conversation.edit(HISTORY[1], {"role": "assistant", "content": "I called nothing."})
    with pytest.raises(ValueError, match="a call and its results belong together"):
        conversation.edit(result("a"), {"role": "user", "content": "output"})


def test_unknown_index_and_unknown_undo_are_refused() -> None:
    conversation = Conversation()
    with pytest.raises(ValueError, match="expected one within the 0 messages"):
        conversation.edit(0, "x")
    with pytest.raises(ValueError, match="no edit of message"):
        conversation.undo_edit(HISTORY[0])


def policy(**rule: Any) -> Policy:
    rule = {"name": "r", "select": {"role": "tool", "older_than": {"turns": 1}}, **rule}
    return Policy.model_validate({"version": 1, "rules": [rule]})


def test_manual_edit_wins_over_a_policys_stub() -> None:
    conversation = Conversation(policy(replace="[p]"))
    conversation.edit(result("a"), "[m]")
    assert [m["content"] for m in sent(conversation)[2:4]] == ["[m]", "[p]"]


def test_manual_edit_of_a_result_keeps_a_policy_from_dropping_its_call() -> None:
    conversation = Conversation(policy(drop=True))
    conversation.edit(result("a"), "[m]")
    assert sent(conversation)[1] == HISTORY[1]
    assert [m["content"] for m in sent(conversation)[2:4]] == ["[m]", HISTORY[3]["content"]]


def test_collapse_takes_manual_edits_in_and_keeps_their_forgetting() -> None:
    conversation = Conversation(policy(collapse="[{turns}]"))
    conversation.edit(result("a"), "[m]", mode="forget")
    turn = prepare(conversation)
    assert [m["content"] for m in turn.body["messages"]] == ["u", "[1]", "Next.", HISTORY[5]["content"]]
    assert [edit.mode for edit in turn.edits] == ["forget"]
