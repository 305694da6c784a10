"""What becomes of each request's tokens."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.edits import Edit, apply_edits
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.core.plan import apply_directives
from leyline_agent.core.protocol import Mode
from leyline_agent.explain import EstimatedMeter, ExactMeter, Preview, RenderError, preview, read_conversation
from leyline_agent.explain.turn_plan import plan_as_json
from leyline_agent.policy import apply_policy, load_policy, parse_policy, request_points
from tests.explain.conversations import WordTokenizer, agent, recorded
from tests.explain.goldens import DEMO

_STUB = parse_policy('version: 1\nrules: [{name: r, select: {role: tool, older_than: {turns: 1}}, replace: "[x]"}]')
_DROP = parse_policy("version: 1\nrules: [{name: r, select: {role: tool, older_than: {turns: 1}}, drop: true}]")
_SECRET = """\
version: 1
rules: [{name: s, select: {role: [assistant, tool], matches: "key-[0-9]+"}, redact: "[k]", mode: forget}]
"""


def _estimated(policy: Any, messages: list[dict[str, Any]], tools: list[Any] = []) -> Preview:  # noqa: B006
    conversation = recorded(messages, tools)
    return preview(policy, conversation, EstimatedMeter(conversation))


def _exact(policy: Any, messages: list[dict[str, Any]]) -> Preview:
    conversation = recorded(messages)
    return preview(policy, conversation, ExactMeter(conversation, WordTokenizer(), "words"))


@pytest.mark.parametrize("make", [_estimated, _exact], ids=["estimate", "exact"])
def test_a_prompt_that_only_grows_is_kept_whole(make: Any) -> None:
    turns = make(load_policy("none"), agent(3)).turns

    assert [turn.reuse.moved_tokens for turn in turns] == [0, 0, 0, 0]
    assert [turn.reuse.changes for turn in turns] == [()] * 4
    # The base has the answer, so only the tool's output and the next header are new.
    assert all(turn.reuse.recomputed_tokens < turn.reuse.prompt_tokens / 2 for turn in turns[2:])


@pytest.mark.parametrize("make", [_estimated, _exact], ids=["estimate", "exact"])
def test_the_first_request_has_nothing_to_keep(make: Any) -> None:
    first = make(_STUB, agent(3)).turns[0].reuse

    assert (first.kept_tokens, first.moved_tokens) == (0, 0)
    assert first.recomputed_tokens == first.recomputed_tokens_without_splice == first.prompt_tokens


@pytest.mark.parametrize("make", [_estimated, _exact], ids=["estimate", "exact"])
def test_kept_moved_and_recomputed_tokens_add_up_to_the_prompt(make: Any) -> None:
    for turn in make(_STUB, agent(5)).turns:
        reuse = turn.reuse
        assert reuse.kept_tokens + reuse.moved_tokens + reuse.recomputed_tokens == reuse.prompt_tokens
        assert reuse.recomputed_tokens_without_splice == reuse.recomputed_tokens + reuse.moved_tokens
        assert reuse.recomputed_tokens >= 1


def test_an_estimate_counts_whole_messages() -> None:
    # Four tokens around each message. Task 6; answers 4 + 2 + 1 + 2 for "step 0", "bash", '{"n": 0}'; outputs 4 + 12
    # for 48 characters, their stub 5.
    turn = _estimated(_STUB, agent(2, lines=3)).turns[2]

    assert (turn.tokens_before, turn.reuse.prompt_tokens) == (6 + 2 * 9 + 2 * 16, 6 + 2 * 9 + 5 + 16)
    assert (turn.reuse.kept_tokens, turn.reuse.moved_tokens, turn.reuse.recomputed_tokens) == (6 + 9, 9, 5 + 16)
    (change,) = turn.reuse.changes
    assert (change.start, change.end, change.replacement_tokens, change.mode) == (15, 31, 5, Mode.AMORTIZE)


def test_tools_stand_in_front_and_are_kept() -> None:
    tools = [{"type": "function", "function": {"name": "bash"}}]
    with_tools, without = _estimated(_STUB, agent(3), tools).turns, _estimated(_STUB, agent(3)).turns
    tokens = -(-len(json.dumps(tools[0])) // 4)

    for turn, plain in itertools.islice(zip(with_tools, without, strict=True), 1, None):
        assert turn.reuse.kept_tokens == plain.reuse.kept_tokens + tokens
        assert turn.reuse.recomputed_tokens == plain.reuse.recomputed_tokens


def test_exact_directives_lead_from_the_base_to_the_prompt() -> None:
    conversation = read_conversation(DEMO)
    meter = ExactMeter(conversation, WordTokenizer(), "words")
    for turn in preview(load_policy("keep_last_tool_outputs"), conversation, meter).turns[1:]:
        assert turn.base is not None
        base_ids, new_ids = meter.base_ids(turn.base), meter.prompt_ids(turn.pieces)
        same = next(idx for idx, old in enumerate([*base_ids, None]) if old != new_ids[idx])
        result = apply_directives(base_ids, diff_token_ids(base_ids, new_ids))
        replaced = sum(change.replacement_tokens for change in turn.reuse.changes)

        assert turn.reuse.kept_tokens == same
        assert result == new_ids[: len(result)]
        assert turn.reuse.recomputed_tokens == len(new_ids) - len(result) + replaced


@pytest.mark.parametrize(("policy", "moved"), [(load_policy("none"), 0), (_DROP, 4)], ids=["kept", "moved"])
def test_the_last_token_is_computed_even_where_all_is_cached(policy: Any, moved: int) -> None:
    # The last answer follows another one, so its prompt is the base itself, or what a drop leaves of it.
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "the task"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "an output"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    reuse = _estimated(policy, messages).turns[-1].reuse

    assert (reuse.moved_tokens, reuse.recomputed_tokens) == (moved, 1)


def test_what_is_dropped_is_a_directive_without_a_replacement() -> None:
    messages = agent(4)
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = ""
    # Task 6; a call without text 4 + 1 + 2 and its output 53 go; the next call and its output move.
    turn = _estimated(_DROP, messages).turns[2]

    assert [(change.start, change.end, change.replacement_tokens) for change in turn.reuse.changes] == [(6, 66, 0)]


def test_what_was_sent_and_is_to_be_forgotten_moves_nothing() -> None:
    messages = agent(4)
    messages[3]["content"] = "the key-1234 is in my answer"
    policy = _SECRET.replace("matches", "older_than: {turns: 1}, matches")
    turn = _estimated(parse_policy(policy), messages).turns[3]

    assert turn.forget
    assert turn.reuse.moved_tokens == 0
    assert {change.mode for change in turn.reuse.changes} == {Mode.FORGET}


def test_a_secret_that_was_never_sent_costs_nothing() -> None:
    messages = agent(3)
    messages[4]["content"] = "key-1234\n" * 9
    redacted = _estimated(parse_policy(_SECRET), messages).turns[2]

    assert redacted.applied.new
    assert not redacted.forget
    assert redacted.reuse.changes == ()


def test_json_holds_the_prompt_and_the_edits_that_lead_to_it() -> None:
    messages = agent(4)
    row = _estimated(_STUB, messages).as_json()["turns"][3]
    edits = [
        Edit(edit["start"], edit["end"], tuple(messages_from_openai(edit["replacement"]))) for edit in row["edits"]
    ]
    given = messages_from_openai(messages[: row["num_messages"]])

    assert [message.to_openai() for message in apply_edits(given, edits)] == row["messages"]
    assert [edit["new"] for edit in row["edits"]] == [False, True]
    assert [made["message_idxs"] for made in row["made"]] == [[4]]
    assert "tool output of bash, 1 turn old" in row["made"][0]["reason"]


def test_json_says_how_it_counted_and_lists_directives_on_demand() -> None:
    estimate, exact = _estimated(_STUB, agent(3)), _exact(_STUB, agent(3))

    assert (estimate.as_json()["counted"], estimate.as_json()["exact"]) == ("estimate", False)
    assert (exact.as_json()["counted"], exact.as_json()["exact"]) == ("words", True)
    assert "directives" not in estimate.as_json()["turns"][2]
    (directive,) = estimate.as_json(directives=True)["turns"][2]["directives"]
    assert directive["mode"] == "amortize"


def test_edits_are_the_same_however_tokens_are_counted() -> None:
    policy = load_policy("token_budget")
    messages = agent(40, lines=120)

    assert [turn.applied.edits for turn in _estimated(policy, messages).turns] == [
        turn.applied.edits for turn in _exact(policy, messages).turns
    ]


def test_a_turn_is_what_the_policy_makes_of_its_request() -> None:
    messages = recorded(agent(5)).messages
    for turn, point in zip(_estimated(_STUB, agent(5)).turns, request_points(messages), strict=True):
        assert [piece.message for piece in turn.pieces] == list(apply_policy(_STUB, messages[:point]).messages)


def test_a_plan_has_ids_that_lead_from_base_to_prompt() -> None:
    messages = agent(4)
    messages[3]["content"] = "a long answer that is worth to be moved " * 9
    conversation = recorded(messages)
    meter = ExactMeter(conversation, WordTokenizer(), "words")
    plan = plan_as_json(_STUB, conversation, meter, 3)
    turn = preview(_STUB, conversation, meter).turns[2]
    assert turn.base is not None
    base_ids, new_ids = meter.base_ids(turn.base), meter.prompt_ids(turn.pieces)
    (directive,) = plan["directives"]
    result = [*base_ids[: directive["start"]], *directive["replacement_ids"], *base_ids[directive["end"] :]]

    assert result == new_ids[: len(result)]
    assert plan["base_len"] == len(base_ids)
    assert plan["moved_tokens"] == turn.reuse.moved_tokens > 0


@pytest.mark.parametrize("turn", [0, 6, -1])
def test_a_plan_of_no_request_is_refused(turn: int) -> None:
    conversation = recorded(agent(4))

    with pytest.raises(ValueError, match=f"got {turn}, expected 1 to 5"):
        plan_as_json(_STUB, conversation, ExactMeter(conversation, WordTokenizer(), "words"), turn)


def test_a_plan_of_a_conversation_without_requests_is_refused() -> None:
    conversation = recorded([])

    with pytest.raises(ValueError, match="has no request"):
        plan_as_json(_STUB, conversation, ExactMeter(conversation, WordTokenizer(), "words"))


def test_a_tokenizer_that_cannot_render_is_told_with_the_prompt() -> None:
    class Broken(WordTokenizer):
        def render(self, messages: Any, tools: Any = None, **arguments: Any) -> list[int]:
            raise ValueError("roles must alternate")

    conversation = recorded(agent(1))
    with pytest.raises(RenderError, match="first 1 messages cannot be rendered by words: roles must alternate"):
        preview(_STUB, conversation, ExactMeter(conversation, Broken(), "words"))


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": "hello"}]], ids=["none", "an answer alone"])
def test_a_conversation_without_a_request_has_no_turns(messages: list[dict[str, Any]]) -> None:
    previewed = _estimated(_STUB, messages)

    assert previewed.turns == ()
    assert previewed.totals()["tokens_after"] == 0


def test_nothing_of_the_conversation_is_changed() -> None:
    conversation = recorded(agent(4))
    before = [message.to_openai() for message in conversation.messages]
    preview(_STUB, conversation, EstimatedMeter(conversation))

    assert [message.to_openai() for message in conversation.messages] == before
    assert all(isinstance(message, Message) for message in conversation.messages)
