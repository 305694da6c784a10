"""Replaying a policy request by request: triggers, batches, and going on from the turn before."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.errors import PolicyError
from leyline_agent.policy import PolicyRun, TextTokens, apply_policy, engine, parse_policy, request_points

_HEAD = "version: 1\nrules: [{name: r, select: {role: tool}, "
_REPLACE = 'replace: "[x]"}]\n'


def _agent(num_turns: int, text: str = "word " * 100) -> list[Message]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "the task"}]
    for turn in range(num_turns):
        call = {"id": str(turn), "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": str(turn), "content": text})
    return messages_from_openai(messages)


def _turns_that_edit(policy: str, messages: list[Message], **options: Any) -> list[int]:
    return sorted({made.turn for made in apply_policy(parse_policy(policy), messages, **options).made})


@pytest.mark.parametrize(
    ("when", "turns"),
    [
        ("{every: 4 turns}", [4, 8, 12]),
        ("{turns: 10}", [10, 11, 12]),
        ("{messages: 20}", [10, 11, 12]),
        ("{tool_uses: 5}", [5, 10]),
        # Two tokens of the task, 102 of each turn; of an edited turn three are left: 614 at turn 6, 632 at turn 12.
        ("{tokens: 600}", [6, 12]),
        ("{context: 0.6}", [6, 12]),
        ("{any_of: [{turns: 11}, {every: 4 turns}]}", [4, 8, 11, 12]),
        ("{all_of: [{turns: 5}, {every: 4 turns}]}", [8, 12]),
        ("{turns: 5, every: 4 turns}", [8, 12]),
    ],
)
def test_a_trigger_fires_at_the_turns_it_says(when: str, turns: list[int]) -> None:
    counter = TextTokens(lambda text: len(text.split()), per_message=0)

    assert (
        _turns_that_edit(f"{_HEAD}when: {when}, {_REPLACE}", _agent(12), counter=counter, context_window=1000) == turns
    )


def test_a_batch_is_made_whole_and_stays_in_between() -> None:
    policy = parse_policy(f"{_HEAD}when: {{every: 5 turns}}, keep: {{last: 2}}, {_REPLACE}")
    messages = _agent(12)
    run = PolicyRun(policy)

    edited = [len(run.apply(messages[:point]).edits) for point in request_points(messages)]

    assert edited == [0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8]


def test_a_gate_holds_until_enough_has_piled_up_and_what_went_stays() -> None:
    # Four outputs have 516 tokens, of which their stubs would leave 20: that is tried, and taken back.
    policy = parse_policy(f"{_HEAD}keep: {{min_reclaim_tokens: 510}}, {_REPLACE}")
    messages = _agent(9)
    run = PolicyRun(policy)

    edited = [len(run.apply(messages[:point]).edits) for point in request_points(messages)]

    assert edited == [0, 0, 0, 0, 0, 5, 5, 5, 5, 5]
    assert [made.before[0].text for made in run.apply(messages).made] == ["word " * 100] * 5


@pytest.mark.parametrize("action", ["drop: true", 'collapse: "[{turns} turns]"'])
def test_a_gate_that_is_far_away_is_not_tried_at_every_turn(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To edit all that has piled up and to take it back takes milliseconds a turn, and more each turn."""
    tried: list[int] = []
    monkeypatch.setattr(engine, "carry_out", lambda work, candidates: tried.append(len(candidates)))
    policy = parse_policy(f"{_HEAD}{action}, keep: {{min_reclaim_tokens: 900000}}}}]\n")

    assert apply_policy(policy, _agent(9)).idle[0].why == "below_min_reclaim"
    assert tried == []


def test_a_later_rule_is_asked_about_what_an_earlier_one_left() -> None:
    policy = parse_policy(
        """\
version: 1
rules:
  - {name: gently, select: {role: tool, older_than: {turns: 1}}, when: {tokens: 800}, replace: "[gone]"}
  - {name: firmly, select: {role: tool, older_than: {turns: 1}}, when: {tokens: 800}, drop: true}
"""
    )

    assert {made.rule for made in apply_policy(policy, _agent(20)).made} == {"gently"}


def test_a_share_of_an_unknown_window_is_an_error_that_says_what_to_add() -> None:
    policy = parse_policy(f"{_HEAD}when: {{any_of: [{{context: 0.5}}]}}, {_REPLACE}")

    with pytest.raises(PolicyError, match="'context_window: 128000'"):
        apply_policy(policy, [])


def test_the_window_may_stand_in_the_policy_and_the_callers_goes_first() -> None:
    policy = parse_policy(f"{_HEAD}when: {{context: 0.5}}, {_REPLACE}context_window: 100\n")

    assert apply_policy(policy, _agent(2)).edits
    assert not apply_policy(policy, _agent(2), context_window=100_000).edits
    assert not apply_policy(policy.with_context_window(100_000), _agent(2)).edits


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "100"])
def test_a_context_window_is_a_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(PolicyError, match="expected a whole number above 0"):
        parse_policy(f"{_HEAD}{_REPLACE}").with_context_window(tokens)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda messages: messages[:-2], id="shorter"),
        pytest.param(lambda messages: [*messages[:2], *messages[3:]], id="a message less"),
        pytest.param(
            lambda messages: [
                *messages[:-1],
                Message.from_openai({"role": "tool", "tool_call_id": "5", "content": "other " * 90}),
            ],
            id="another message",
        ),
        pytest.param(
            lambda messages: [messages[0], *messages[3:], *messages[1:3], *messages[-2:]],
            id="another beginning, and an answer where one would go on",
        ),
        pytest.param(
            lambda messages: [*messages, Message.from_openai({"role": "user", "content": "hurry"})], id="no answer"
        ),
    ],
)
def test_a_list_that_does_not_go_on_is_replayed_from_its_beginning(change: Any) -> None:
    policy = parse_policy(f"{_HEAD}when: {{every: 2 turns}}, {_REPLACE}")
    messages = _agent(6)
    run = PolicyRun(policy)
    run.apply(messages)

    assert run.apply(change(messages)) == apply_policy(policy, change(messages))


def test_other_tools_are_another_conversation() -> None:
    policy = parse_policy(f"{_HEAD}when: {{tokens: 1000}}, {_REPLACE}")
    tools = [{"type": "function", "function": {"name": "bash", "description": "d " * 2000}}]
    messages = _agent(3)
    run = PolicyRun(policy)
    run.apply(messages[:-2])

    applied = run.apply(messages, tools=tools)

    assert applied == apply_policy(policy, messages, tools=tools)
    assert applied.edits


def test_an_error_on_the_way_leaves_nothing_half_done() -> None:
    class Counter(TextTokens):
        fail = False

        def count_message(self, message: Any) -> int:
            if self.fail and message["role"] == "tool":
                raise RuntimeError("no")
            return super().count_message(message)

    counter = Counter(len)
    policy = parse_policy(_HEAD + _REPLACE)
    messages = _agent(4)
    run = PolicyRun(policy, counter=counter)
    run.apply(messages[:5])
    counter.fail = True
    with pytest.raises(RuntimeError):
        run.apply(messages)
    counter.fail = False

    assert run.apply(messages) == apply_policy(policy, messages, counter=counter)


def test_threads_may_share_a_run() -> None:
    policy = parse_policy(f"{_HEAD}when: {{every: 2 turns}}, {_REPLACE}")
    conversations = [_agent(8, text=f"{number} word " * 50) for number in range(3)]
    expected = [apply_policy(policy, messages).edits for messages in conversations]
    run = PolicyRun(policy)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            if run.apply(conversations[number]).edits != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_requests_are_what_an_answer_follows_and_the_whole_list() -> None:
    messages = _agent(2)

    assert request_points(messages) == [1, 3, 5]
    assert request_points(messages[:4]) == [1, 3]
    assert request_points([]) == []
    assert request_points(messages[1:]) == [2, 4]


def test_a_report_counts_what_was_given_and_what_is_left() -> None:
    counter = TextTokens(lambda text: len(text.split()), "words", per_message=1)

    applied = apply_policy(parse_policy(_HEAD + _REPLACE), _agent(2), counter=counter)

    # The task and its frame; in each turn a call of two words, an output of 100, and two frames.
    assert (applied.turn, applied.counted) == (2, "words")
    assert (applied.tokens_before, applied.tokens_after) == (3 + 2 * 104, 3 + 2 * 5)
    assert applied.tokens_after == sum(counter.count_message(message.raw) for message in applied.messages)


def test_calls_that_are_one_object_go_one_by_one() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "output"}
    messages = messages_from_openai([{"role": "assistant", "tool_calls": [call, call]}, result, result])
    policy = parse_policy("version: 1\nrules: [{name: r, select: {role: tool}, keep: {last: 1}, drop: true}]")

    edited = apply_policy(policy, messages).messages

    assert [len(edited[0].tool_calls), len(edited)] == [1, 2]
