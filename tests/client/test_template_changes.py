"""What the chat template is behind, and not an edit: what is counted of it, and what `template_changes` asks for."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from leyline_agent import Conversation
from leyline_agent.core.protocol import DirectiveOutcome, Outcome, Reason, Status, outcome_header
from leyline_agent.policy import parse_policy
from leyline_agent.prepared_turn import PreparedTurn

Chat = dict[str, Any]
EVERY_OUTPUT = 'version: 1\nrules: [{name: r, select: {role: tool}, replace: "[gone]"}]'
ANSWER: Chat = {"role": "assistant", "content": "I look.", "reasoning_content": "Where?"}


def _history() -> list[Chat]:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "system", "content": "The port is 80."},
        {"role": "user", "content": "Debug it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "an output"},
    ]


class Turns:
    """A conversation with one answered turn, and the next one about to be sent."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.messages = _history()
        self.body: Chat = {"model": "m"}
        self.answer(self.prepare())
        self.messages += [copy.deepcopy(ANSWER), {"role": "user", "content": "Go on."}]

    def prepare(self) -> PreparedTurn:
        return self.conversation.prepare({**self.body, "messages": self.messages})

    def answer(self, prepared: PreparedTurn, outcome: Outcome | None = None) -> None:
        self.conversation.commit(prepared, ANSWER, outcome, expects_outcome=False)


def _nothing(_: Turns) -> None:
    pass


def _without_reasoning(turns: Turns) -> None:
    del turns.messages[4]["reasoning_content"]


def _edit_an_output(turns: Turns) -> None:
    turns.conversation.edit(turns.messages[3], "[stale]")


def _drop_an_exchange(turns: Turns) -> None:
    turns.conversation.edit(turns.messages[3], None)


def _edit_the_answer(turns: Turns) -> None:
    turns.conversation.edit(turns.messages[4], "I looked.")


def _edit_what_is_new(turns: Turns) -> None:
    turns.conversation.edit(turns.messages[5], "[later]")


def _correct_a_fact(turns: Turns) -> None:
    turns.messages[0]["content"] = "The port is 81."


def _correct_the_answer(turns: Turns) -> None:
    turns.messages[4]["content"] = "I look there."


def _other_tools(turns: Turns) -> None:
    turns.body["tools"] = [{"type": "function", "function": {"name": "write"}}]


@pytest.mark.parametrize(
    ("change", "by_template"),
    [
        (_nothing, "all"),
        (_without_reasoning, "all"),
        (_edit_what_is_new, "all"),
        (_edit_an_output, "answer"),
        (_drop_an_exchange, "answer"),
        (_other_tools, "answer"),
        (_correct_a_fact, "none"),
        (_edit_the_answer, "none"),
        (_correct_the_answer, "none"),
    ],
)
def test_what_the_template_alone_can_be_behind(change: Any, by_template: str) -> None:
    turns = Turns(Conversation())
    change(turns)
    assert turns.prepare().by_template == by_template


def test_a_policy_that_edits_what_has_just_come_changes_nothing_of_the_base() -> None:
    conversation = Conversation(parse_policy(EVERY_OUTPUT))
    history = _history()
    for _ in range(2):
        prepared = conversation.prepare({"messages": history})
        assert json.dumps(prepared.body["messages"]).count("[gone]") == sum(m["role"] == "tool" for m in history)
        conversation.commit(prepared, history[2])
        history += history[2:4]
    assert prepared.by_template == "all"


def test_a_reminder_that_vanished_is_a_change_and_the_answer_is_told_apart() -> None:
    turns = Turns(Conversation())
    turns.conversation = Conversation()
    turns.messages = [*_history(), {"role": "user", "content": "It is late."}]
    turns.answer(turns.prepare())
    turns.messages = [*_history(), ANSWER, {"role": "user", "content": "Go on."}]
    assert turns.prepare().by_template == "answer"


def test_an_edit_that_stays_is_no_change() -> None:
    turns = Turns(Conversation())
    _edit_an_output(turns)
    prepared = turns.prepare()
    turns.answer(prepared)
    turns.messages += [ANSWER, {"role": "user", "content": "And?"}]
    assert (prepared.by_template, turns.prepare().by_template) == ("answer", "all")


def test_a_first_turn_has_nothing_to_differ_from() -> None:
    assert Conversation().prepare({"messages": _history()}).by_template == "none"


@pytest.mark.parametrize(
    ("change", "mode", "template_changes"),
    [
        (_nothing, "reprefill", "amortize"),
        (_edit_what_is_new, "reprefill", "amortize"),
        (_edit_an_output, "amortize", "reprefill"),
        # What differs in an edited answer is the edit's.
        (_edit_the_answer, "amortize", "amortize"),
        (_correct_a_fact, "reprefill", "amortize"),
    ],
)
def test_the_note_of_a_conversation_that_splices_no_template_changes(
    change: Any, mode: str, template_changes: str
) -> None:
    turns = Turns(Conversation(template_changes="reprefill"))
    change(turns)
    note = turns.prepare().note
    assert note is not None
    assert (note.mode, note.template_changes) == (mode, template_changes)


@pytest.mark.parametrize("change", [_nothing, _edit_an_output, _edit_the_answer, _correct_a_fact])
def test_by_default_no_note_says_anything_of_the_template(change: Any) -> None:
    turns = Turns(Conversation())
    change(turns)
    body = turns.prepare().body
    assert "template_changes" not in json.loads(body["custom_params"]["leyline"])


def test_unexplained_changes_that_are_kept_are_not_laid_to_the_template() -> None:
    turns = Turns(Conversation(unexplained_changes="amortize", template_changes="reprefill"))
    _correct_a_fact(turns)
    prepared = turns.prepare()
    assert prepared.note is not None
    assert (prepared.note.mode, prepared.note.template_changes) == ("amortize", "amortize")
    turns.answer(prepared, _spliced(2))
    assert turns.conversation.telemetry.template_changes == 0


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("template_changes", "'amortize' or 'reprefill'"),
        ("unexplained_changes", "'reprefill' or 'amortize'"),
        ("gate", "'auto' or 'off'"),
        ("plan", "'server' or 'client'"),
        ("counter", "'estimate', 'server' or a TokenCounter"),
    ],
)
def test_an_unknown_way_is_refused(option: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: got 'keep', expected {expected}"):
        Conversation(**{option: "keep"})  # type: ignore[arg-type]


def _spliced(num_directives: int, status: Status = Status.SPLICED, **fields: Any) -> Outcome:
    shown = tuple(DirectiveOutcome(start=9 * idx, end=9 * idx + 5, replacement_tokens=1) for idx in range(2))
    counts = {"moved_tokens": 100, "saved_ms": 7.5, **fields}
    return Outcome(status=status, directives=shown, num_directives=num_directives, **counts)


IN_ANSWER = {"answer_directives": 1, "answer_moved_tokens": 40}


@pytest.mark.parametrize(
    ("change", "outcome", "counts"),
    [
        (_nothing, _spliced(3), (1, 100)),
        (_nothing, _spliced(3, **IN_ANSWER), (1, 100)),
        (_nothing, Outcome(status=Status.UNCHANGED), (0, 0)),
        (_edit_an_output, _spliced(3), (0, 0)),
        (_edit_an_output, _spliced(3, **IN_ANSWER), (1, 40)),
        (_edit_the_answer, _spliced(3, **IN_ANSWER), (0, 0)),
        # It happened; nothing was saved, or not all.
        (_nothing, _spliced(1, Status.REFUSED, reason=Reason.EVICTED, moved_tokens=0, saved_ms=None), (1, 0)),
        (_nothing, _spliced(2, Status.PARTIAL, reason=Reason.EVICTED, moved_tokens=30), (1, 30)),
        (_edit_an_output, _spliced(3, Status.PARTIAL, reason=Reason.EVICTED, answer_directives=1), (1, 0)),
        (_nothing, Outcome(status=Status.REFUSED, reason=Reason.UNKNOWN_BASE), (0, 0)),
        (_nothing, None, (0, 0)),
    ],
)
def test_changes_and_what_they_moved_are_counted_apart(
    change: Any, outcome: Outcome | None, counts: tuple[int, int]
) -> None:
    turns = Turns(Conversation(on_fallback=lambda reason, outcome: None))
    change(turns)
    turns.answer(turns.prepare(), outcome)
    telemetry = turns.conversation.telemetry
    assert (telemetry.template_changes, telemetry.template_moved_tokens) == counts
    assert telemetry.moved_tokens == (outcome.moved_tokens if outcome else 0)
    assert telemetry.saved_ms == ((outcome.saved_ms or 0) if outcome else 0)


def test_a_header_that_lists_not_all_directives_still_says_what_lies_in_the_answer() -> None:
    many = tuple(
        DirectiveOutcome(start=9 * idx, end=9 * idx + 5, replacement_tokens=1, edit_id="e" * 12, in_answer=idx == 199)
        for idx in range(200)
    )
    whole = Outcome(status=Status.SPLICED, directives=many, num_directives=200, moved_tokens=900, **IN_ANSWER)
    shown = Outcome.model_validate_json(outcome_header(whole))
    assert not any(directive.in_answer for directive in shown.directives)
    turns = Turns(Conversation())
    _edit_an_output(turns)
    turns.answer(turns.prepare(), shown)
    assert turns.conversation.telemetry.template_moved_tokens == 40
