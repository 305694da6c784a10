"""What users of other tools complain about (numbers and issues in the names' order), each with a test of ours."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from leyline_agent import Conversation
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.policy import (
    EstimatedTokens,
    PolicyRun,
    apply_policy,
    explain_policy,
    load_policy,
    parse_policy,
    policy_library,
    request_points,
)

from .histories import unpaired


def _agent(num_turns: int, *, lines: int = 30, parallel: int = 1, same_file: tuple[int, ...] = ()) -> list[Message]:
    """An agent that reads files in each turn, the same one in some."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You repair programs."},
        {"role": "user", "content": "Find out why the tests fail."},
    ]
    for turn in range(num_turns):
        calls = [
            {
                "id": f"{turn}.{idx}",
                "type": "function",
                "function": {
                    "name": "read",
                    "arguments": json.dumps({"path": "same.py" if turn in same_file else f"{turn}.{idx}.py"}),
                },
            }
            for idx in range(parallel)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        for call in calls:
            text = f"{call['id']}: a line of the file\n" * lines
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return messages_from_openai(messages)


def test_1_the_edit_does_not_fire_again_each_turn_for_a_few_hundred_bytes() -> None:
    """langchain#37815, opencode#32515, gajae-code#508."""
    policy = load_policy("token_budget")
    messages = _agent(120)
    run = PolicyRun(policy)
    applied = [run.apply(messages[:point]) for point in request_points(messages)]

    firing = [turn for turn in applied if turn.new]
    assert 2 <= len(firing) <= len(applied) // 8
    for turn in firing:
        assert sum(made.tokens_before - made.tokens_after for made in turn.new) >= 3000
    for earlier, later in itertools.pairwise(applied):
        if not later.new:
            assert later.messages[: len(earlier.messages)] == earlier.messages


def test_1_an_edit_is_not_undone_when_the_prompt_falls_below_the_trigger() -> None:
    policy = parse_policy(
        'version: 1\nwhen: {tokens: 3000}\nrules: [{name: r, select: {role: tool}, keep: {last: 1}, replace: "[x]"}]'
    )
    messages = _agent(40)
    run = PolicyRun(policy)
    applied = [run.apply(messages[:point]) for point in request_points(messages)]

    after_firing = [later for earlier, later in itertools.pairwise(applied) if earlier.new]
    assert after_firing
    assert all(turn.tokens_after < 3000 and turn.edits and not turn.new for turn in after_firing)


def test_2_tools_can_be_included_and_not_only_excluded() -> None:
    """langchain#34145."""
    messages = messages_from_openai(
        [
            {"role": "assistant", "tool_calls": [_call("a", "read_file"), _call("b", "search"), _call("c", "note")]},
            *({"role": "tool", "tool_call_id": name, "content": "output " * 9} for name in "abc"),
        ]
    )

    edited = {
        rule: [edit.start for edit in apply_policy(parse_policy(_RULE.format(rule)), messages).edits]
        for rule in ("tool: [read_*, search]", "exclude_tool: note", "tool: '*', exclude_tool: [note, search]")
    }

    assert list(edited.values()) == [[1, 2], [1, 2], [1]]


_RULE = 'version: 1\nrules: [{{name: r, select: {{role: tool, {0}}}, replace: "[x]"}}]'


def _call(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_3_counts_include_tools_and_system_prompt() -> None:
    """langchain#34664."""
    policy = parse_policy('version: 1\nwhen: {tokens: 300}\nrules: [{name: r, select: {role: tool}, replace: "[x]"}]')
    messages = _agent(1, lines=5)
    tools = [{"type": "function", "function": {"name": "read", "description": "Read a file. " * 100}}]
    long_prompt = [Message.from_openai({"role": "system", "content": "Be good. " * 300}), *messages[1:]]

    assert not apply_policy(policy, messages).edits
    assert apply_policy(policy, messages, tools=tools).edits
    assert apply_policy(policy, long_prompt).edits


def test_3_counts_do_not_take_chinese_for_a_quarter_of_a_token_a_character() -> None:
    """langchain#39754."""
    counter = EstimatedTokens()

    chinese = counter.count_message({"role": "tool", "content": "文件中有一个错误需要修复" * 100})
    english = counter.count_message({"role": "tool", "content": "a" * 1200})

    assert chinese > 1000
    assert english < 400


def test_3_counts_take_a_call_that_is_written_twice_once() -> None:
    """langchain#35558."""
    counter = EstimatedTokens()
    arguments = {"path": "x" * 400}
    block = {"type": "tool_use", "id": "a", "name": "read", "input": arguments}
    call = _call("a", "read", json.dumps(arguments))

    once = counter.count_message({"role": "assistant", "content": "", "tool_calls": [call]})
    as_block = counter.count_message({"role": "assistant", "content": [block]})
    twice = counter.count_message({"role": "assistant", "content": [block], "tool_calls": [call]})

    assert once == as_block == twice


@pytest.mark.parametrize("entry", policy_library(), ids=lambda entry: entry.name)
def test_4_no_tool_message_or_call_is_orphaned(entry: Any) -> None:
    """langchain#33245, #29637, #38352, letta#2605, oasis#70."""
    messages = _agent(30, lines=120, parallel=3)

    edited = apply_policy(load_policy(entry.name), messages).messages

    assert unpaired(edited) == ({}, {})


def test_4_no_token_budget_cuts_between_a_call_and_its_result() -> None:
    policy = parse_policy(
        "version: 1\nwhen: {tokens: 1500}\nkeep: {stop_after_tokens: 300}\n"
        "rules: [{name: r, select: {role: tool}, drop: true}]"
    )
    messages = _agent(30, parallel=3)

    for point in request_points(messages):
        assert unpaired(apply_policy(policy, messages[:point]).messages) == ({}, {})


def test_5_nothing_is_cleared_silently() -> None:
    """claude-code#57788, #42542, agent-framework#7335."""
    policy = load_policy("token_budget")
    messages = _agent(120)

    applied = apply_policy(policy, messages)

    assert {idx for edit in applied.edits for idx in range(edit.start, edit.end)} == {
        idx for made in applied.made for idx in made.message_idxs
    }
    for made in applied.made:
        assert made.before == tuple(messages[idx] for idx in made.message_idxs)
        assert made.reason.startswith("tool output of read, ")
        assert "of 16,000 tokens" in made.reason
        assert made.turn > 0


def test_5_what_a_policy_would_do_can_be_read_before() -> None:
    text = explain_policy(load_policy("token_budget"))

    for words in ("the prompt has 16,000 tokens or more", "the last 3 results", "until 3,000 tokens can go at once"):
        assert words in text


def test_5_a_rule_that_did_nothing_says_why() -> None:
    policy = parse_policy(
        """\
version: 1
rules:
  - {name: trigger, select: {role: tool}, when: {tokens: 9000}, replace: "[x]"}
  - {name: selection, select: {role: tool, tool: other}, replace: "[x]"}
  - {name: guard, select: {role: tool}, keep: {last: 9}, replace: "[x]"}
  - {name: gate, select: {role: tool}, keep: {min_reclaim_tokens: 9000}, replace: "[x]"}
  - {name: gain, select: {role: assistant}, drop_reasoning: true}
"""
    )

    idle = apply_policy(policy, _agent(2)).idle

    assert [(row.rule, row.why) for row in idle] == [
        ("trigger", "trigger"),
        ("selection", "nothing_selected"),
        ("guard", "kept"),
        ("gate", "below_min_reclaim"),
        ("gain", "no_gain"),
    ]
    for row, words in zip(idle, ("of 9,000 tokens", "nothing", "last 9 results", "of 9,000", "reasoning"), strict=True):
        assert words in row.detail


def test_5_a_turn_that_cannot_collapse_is_not_said_to_be_too_short() -> None:
    policy = parse_policy('version: 1\nrules: [{name: r, select: {role: tool}, collapse: "[{turns} turns]"}]')
    use = {"type": "tool_use", "id": "a", "name": "bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "word " * 90}
    messages = messages_from_openai(
        [
            {"role": "user", "content": "task"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": "hurry"}]},
        ]
    )

    (idle,) = apply_policy(policy, messages).idle

    assert (idle.why, "something else stands there" in idle.detail) == ("no_gain", True)


@pytest.mark.parametrize("text", ["one\ntwo\nthree\n" * 40, "no line break at all " * 40, "a\n\n\nb" * 90])
def test_6_a_stub_claims_what_was_lost_no_more_and_no_less(text: str) -> None:
    """deepagents#5563, agent-framework#7393."""
    messages = messages_from_openai(
        [
            {"role": "assistant", "content": "", "tool_calls": [_call("a", "read")]},
            {"role": "tool", "tool_call_id": "a", "content": text},
        ]
    )
    replaced = (
        apply_policy(parse_policy(_RULE.format("").replace("[x]", "{lines} {tokens}")), messages).messages[1].text
    )
    cut = apply_policy(
        parse_policy(
            "version: 1\nrules: [{name: r, select: {role: tool}, "
            'truncate: {head: 10 chars, tail: 5 chars, stub: "<{lines}>"}}]'
        ),
        messages,
    )

    assert replaced.split() == [str(len(text.splitlines())), str(-(-len(text) // 4))]
    middle = text[10:-5]
    claimed = int(cut.messages[1].text.split("<")[1].split(">")[0])
    assert claimed == len(middle.splitlines())


def test_6_a_stub_of_a_stub_does_not_count_anew() -> None:
    policy = parse_policy(
        "version: 1\nrules: [{name: r, select: {role: tool}, truncate: {head: 2 lines, tail: 1 line}},"
        ' {name: s, select: {role: tool, older_than: {turns: 2}}, replace: "[{lines} lines]"}]'
    )

    edited = apply_policy(policy, _agent(5, lines=30)).messages

    assert [message.text for message in edited if message.role == "tool"][:2] == ["[30 lines]", "[30 lines]"]


def test_7_what_the_agent_reads_again_is_kept_and_so_not_read_in_a_loop() -> None:
    """learn-claude-code#62, #27."""
    rules = 'rules: [{{name: r, select: {{role: tool, older_than: {{turns: 1}}}}, {0}replace: "[x]"}}]'
    messages = _agent(9, same_file=(0, 3, 6))

    kept = {
        guard: [edit.start for edit in apply_policy(parse_policy("version: 1\n" + rules.format(guard)), messages).edits]
        for guard in ("", "keep: {rereads: true}, ")
    }

    # The output had gone each time that it was asked for again: only the newest answer stays, however old it becomes.
    assert kept[""] == [3, 5, 7, 9, 11, 13, 15, 17]
    assert kept["keep: {rereads: true}, "] == [3, 5, 7, 9, 11, 13, 17]


def test_7_an_answer_to_a_call_whose_last_output_was_still_there_is_kept_no_longer_than_others() -> None:
    policy = parse_policy(
        "version: 1\nkeep: {rereads: true}\n"
        'rules: [{name: r, select: {role: tool, older_than: {turns: 1}}, replace: "[x]"}]'
    )

    edits = apply_policy(policy, _agent(5, same_file=(0, 1))).edits

    assert [edit.start for edit in edits] == [3, 5, 7, 9]


def test_7_a_stub_can_say_how_to_get_it_again() -> None:
    policy = parse_policy(_RULE.format("").replace("[x]", "[evicted: {tool} {args}, ref {ref}]"))

    stub = apply_policy(policy, _agent(1)).messages[3].text

    assert stub == '[evicted: read {"path": "0.0.py"}, ref 0.0]'


def test_8_keep_last_n_counts_results_and_not_messages() -> None:
    """agenc-core#463."""
    policy = parse_policy('version: 1\nkeep: {last: 4}\nrules: [{name: r, select: {role: tool}, replace: "[x]"}]')

    edited = apply_policy(policy, _agent(6, parallel=3)).messages

    whole = [message for message in edited if message.role == "tool" and message.text != "[x]"]
    assert len(whole) == 4


def test_9_a_policy_runs_inside_a_tool_loop() -> None:
    """agent-framework#7518: one message of the user, then nothing but tool calls."""
    messages = _agent(60)
    assert sum(message.role == "user" for message in messages) == 1

    assert {made.turn for made in apply_policy(load_policy("batched"), messages).made} == set(range(5, 61, 5))


def test_10_a_turn_counts_only_what_is_new() -> None:
    """deepagents#3877: 280 ms a call. How long it takes is measured by `evals.micro.policy`."""

    class Counter(EstimatedTokens):
        counted = 0

        def count_message(self, message: Any) -> int:
            self.counted += 1
            return super().count_message(message)

    counter = Counter()
    messages = _agent(100)
    run = PolicyRun(load_policy("keep_last_tool_outputs"), counter=counter)
    *_, last_but_one, last = request_points(messages)
    run.apply(messages[:last_but_one])
    counter.counted = 0

    run.apply(messages[:last])

    assert counter.counted <= 6


def test_11_edits_are_the_same_after_a_restart_from_a_checkpoint() -> None:
    """langchain#39265, agent-framework#8099."""
    policy = load_policy("token_budget")
    messages = _agent(120)
    run = PolicyRun(policy)
    for point in request_points(messages):
        applied = run.apply(messages[:point])

    restored = messages_from_openai(json.loads(json.dumps([message.to_openai() for message in messages])))

    assert PolicyRun(policy).apply(restored) == applied


def test_11_going_back_to_a_checkpoint_takes_back_what_was_edited_after_it() -> None:
    policy = load_policy("keep_last_tool_outputs")
    messages = _agent(10)
    run = PolicyRun(policy)
    early = run.apply(messages[:12])
    run.apply(messages)

    assert run.apply(messages[:12]) == early
    branch = [*messages[:12], Message.from_openai({"role": "user", "content": "another way"})]
    assert run.apply(branch) == apply_policy(policy, branch)


def test_11_the_callers_messages_are_never_edited() -> None:
    messages = [message.to_openai() for message in _agent(6)]
    before = json.dumps(messages)

    Conversation("keep_last_tool_outputs").prepare({"model": "m", "messages": messages})

    assert json.dumps(messages) == before


def test_12_defaults_do_what_their_documentation_says() -> None:
    """opencode#24108: each description's numbers are those that it acts by."""
    messages = _agent(40)
    keep_last = apply_policy(load_policy("keep_last_tool_outputs"), messages).messages
    assert [message.text.startswith("[evicted") for message in keep_last if message.role == "tool"][-3:] == [
        True,
        False,
        False,
    ]
    assert load_policy("anthropic_clear_tool_uses").when.tokens == 100_000  # type: ignore[union-attr]
    for entry in policy_library():
        assert _numbers(entry.description) <= _numbers_of(entry.name), entry.name


_WORDS = {"two": 2, "three": 3, "five": 5}


def _numbers(text: str) -> set[int]:
    words = text.replace(",", "").replace(".", " ").lower().split()
    return {int(word) for word in words if word.isdecimal()} | {_WORDS[word] for word in words if word in _WORDS}


def _numbers_of(name: str) -> set[int]:
    """Every number in a policy; of its place from the end also how many messages lie behind it."""
    numbers: set[int] = set()
    waiting: list[Any] = [load_policy(name).model_dump()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, int) and not isinstance(value, bool):
            numbers |= {value, -value - 1} if value < 0 else {value}
        elif hasattr(value, "number"):
            numbers.add(value.number)
    return numbers
