"""What holds for every conversation: invented ones, with all that clients get wrong, and recorded ones."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from leyline_agent.core.edits import Edit, apply_edits
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.policy import Policy, load_policy, parse_policy, policy_edits

# A busy machine can stop a test for seconds, which is not the engine's time.
_timeless = settings(deadline=None, max_examples=60)

_IDS = st.sampled_from(["a", "b", "c", "", None])
_TEXTS = st.sampled_from(["", "short", "one\ntwo\nthree\n" * 4, "[evicted: bash, 9 lines]", "x" * 90])


@st.composite
def _messages(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any order of roles, ids that repeat or are missing, calls without results and results without calls."""
    messages: list[dict[str, Any]] = []
    for role in draw(st.lists(st.sampled_from(["assistant", "tool", "tool", "user", "system"]), max_size=16)):
        message: dict[str, Any] = {"role": role, "content": draw(_TEXTS)}
        if role == "assistant":
            calls = [
                {"id": draw(_IDS), "type": "function", "function": {"name": name, "arguments": "{}"}}
                for name in draw(st.lists(st.sampled_from(["bash", "grep"]), max_size=3))
            ]
            if calls:
                message["tool_calls"] = calls
        elif role == "tool":
            message["tool_call_id"] = draw(_IDS)
        messages.append(message)
    return messages


@st.composite
def _tidy_messages(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls that all have their results, under ids of their own."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "the task"}]
    for turn in range(draw(st.integers(0, 8))):
        names = draw(st.lists(st.sampled_from(["bash", "grep"]), max_size=3))
        calls = [
            {"id": f"{turn}.{idx}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            for idx, name in enumerate(names)
        ]
        messages.append({"role": "assistant", "content": draw(_TEXTS), **({"tool_calls": calls} if calls else {})})
        for call in draw(st.permutations(calls)):
            messages.append({"role": "tool", "content": draw(_TEXTS), "tool_call_id": call["id"]})
        if not calls or draw(st.booleans()):
            messages.append({"role": "user", "content": draw(_TEXTS)})
    return messages


@st.composite
def _rule(draw: st.DrawFn, name: str) -> dict[str, Any]:
    action = draw(st.sampled_from(["replace", "drop", "collapse"]))
    select: dict[str, Any] = {
        "role": "tool" if action == "collapse" else draw(st.sampled_from(["tool", "user", "assistant"]))
    }
    if draw(st.booleans()):
        select["older_than"] = {"turns": draw(st.integers(0, 4))}
    if select["role"] == "tool" and draw(st.booleans()):
        select["tool"] = draw(st.sampled_from(["bash", "g*", ["bash", "grep"]]))
    values = {"replace": "[evicted: {lines} lines]", "drop": True, "collapse": "[evicted: {turns} turns]"}
    return {"name": name, "select": select, action: values[action]}


@st.composite
def _policies(draw: st.DrawFn, max_rules: int = 3) -> Policy:
    rules = [draw(_rule(f"rule {idx}")) for idx in range(draw(st.integers(1, max_rules)))]
    keep = {"last": draw(st.integers(0, 3))} if draw(st.booleans()) else {}
    try:
        return Policy.model_validate({"version": 1, "rules": rules, "keep": keep})
    except ValidationError:
        # A rule behind one that drops all it selects is refused.
        reject()


def _assert_paired(messages: Sequence[Message]) -> None:
    called = [call.id for message in messages for call in message.tool_calls]
    answered = [message.tool_call_id for message in messages if message.role == "tool"]
    assert sorted(map(str, called)) == sorted(map(str, answered))


def _assert_kept(earlier: Sequence[Edit], later: Sequence[Edit]) -> None:
    assert [edit for edit in earlier if edit not in later] == []


@_timeless
@given(_policies(), _messages())
def test_edits_are_sorted_disjoint_deterministic_and_leave_the_messages_alone(
    policy: Policy, dicts: list[dict[str, Any]]
) -> None:
    messages = messages_from_openai(dicts)
    before = copy.deepcopy(messages)

    edits = policy_edits(policy, messages)

    apply_edits(messages, edits)
    assert all(edit.start < edit.end for edit in edits)
    assert all(list(edit.replacement) != messages[edit.start : edit.end] for edit in edits)
    assert messages == before
    assert policy_edits(policy, messages) == edits


@_timeless
@given(_policies(), _tidy_messages())
def test_no_call_is_parted_from_its_results(policy: Policy, dicts: list[dict[str, Any]]) -> None:
    messages = messages_from_openai(dicts)

    _assert_paired(apply_edits(messages, policy_edits(policy, messages)))


@_timeless
@given(_policies(), _messages())
def test_a_waiting_call_stays(policy: Policy, dicts: list[dict[str, Any]]) -> None:
    waiting = {"id": "new", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    messages = messages_from_openai([*dicts, {"role": "assistant", "content": "", "tool_calls": [waiting]}])

    edited = apply_edits(messages, policy_edits(policy, messages))

    assert [call.id for call in edited[-1].tool_calls] == ["new"]


@_timeless
@given(_policies(), _messages())
def test_the_last_results_and_the_task_stay(policy: Policy, dicts: list[dict[str, Any]]) -> None:
    messages = messages_from_openai(dicts)
    results = [idx for idx, message in enumerate(messages) if message.role == "tool"]
    kept = set(results[-(policy.keep.last or 0) :] if policy.keep.last else [])
    kept |= {next((idx for idx, message in enumerate(messages) if message.role == "user"), -1)}

    edits = policy_edits(policy, messages)

    assert not [edit for edit in edits if kept & set(range(edit.start, edit.end))]


_ONE_RULE = [
    pytest.param('replace: "[evicted: {tool}, {lines} lines]"', id="replace"),
    pytest.param("drop: true", id="drop"),
]


@pytest.mark.parametrize("action", _ONE_RULE)
@_timeless
@given(dicts=_tidy_messages(), turns=st.integers(0, 4))
def test_an_edit_once_made_stays_made(action: str, dicts: list[dict[str, Any]], turns: int) -> None:
    policy = parse_policy(
        f"version: 1\nrules: [{{name: r, select: {{role: tool, older_than: {{turns: {turns}}}}}, {action}}}]"
    )
    messages = messages_from_openai(dicts)
    # A request goes out when every call has its result, so those are the histories that a policy sees.
    ends = [idx for idx, message in enumerate(messages) if message.role == "assistant"] + [len(messages)]
    histories = [policy_edits(policy, messages[:end]) for end in ends]

    for earlier, later in itertools.pairwise(histories):
        _assert_kept(earlier, later)


@_timeless
@given(_policies(), _messages(), _messages())
def test_what_is_gone_stays_gone(policy: Policy, dicts: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    # What was edited at a request stays edited; and a request is what an answer follows.
    messages = messages_from_openai([*dicts, {"role": "assistant", "content": "an answer"}, *more])

    earlier = {
        idx
        for edit in policy_edits(policy, messages[: len(dicts)])
        for idx in range(edit.start, edit.end)
        if messages[edit.start] not in edit.replacement
    }
    later = {idx for edit in policy_edits(policy, messages) for idx in range(edit.start, edit.end)}
    assert earlier <= later


@_timeless
@given(_policies(max_rules=1), _tidy_messages())
def test_one_rule_finds_nothing_more_in_what_it_edited(policy: Policy, dicts: list[dict[str, Any]]) -> None:
    messages = messages_from_openai(dicts)

    edited = apply_edits(messages, policy_edits(policy, messages))

    assert policy_edits(policy, edited) == []


@pytest.mark.parametrize("turns", [0, 2, 8])
def test_the_shipped_policy_only_adds_edits_along_a_trajectory(trajectory: list[Message], turns: int) -> None:
    policy = load_policy("keep_last_tool_outputs").with_turns(turns)
    earlier: list[Edit] = []
    for end in range(len(trajectory) + 1):
        later = policy_edits(policy, trajectory[:end])
        _assert_kept(earlier, later)
        earlier = later

    edited = apply_edits(trajectory, earlier)
    assert policy_edits(policy, edited) == []
    assert len(edited) == len(trajectory)


def test_dropping_along_a_trajectory_parts_nothing_and_keeps_two_turns(trajectory: list[Message]) -> None:
    policy = parse_policy("version: 1\nrules: [{name: r, select: {role: tool, older_than: {turns: 2}}, drop: true}]")
    # One recording ends in a call that still waits.
    while trajectory and trajectory[-1].tool_calls:
        trajectory.pop()
    outputs = [message for message in trajectory if message.role == "tool"]

    edited = apply_edits(trajectory, policy_edits(policy, trajectory))

    _assert_paired(edited)
    assert [message for message in edited if message.role == "tool"] == outputs[-2:]


def test_collapsing_a_trajectory_leaves_one_stub_for_all_old_turns(trajectory: list[Message]) -> None:
    policy = parse_policy(
        "version: 1\nrules: [{name: r, select: {role: tool, older_than: {turns: 2}}, "
        'collapse: "[evicted: {turns} older tool turns]"}]'
    )
    num_turns = sum(bool(message.tool_calls) for message in trajectory)

    edits = policy_edits(policy, trajectory)

    expected = [f"[evicted: {num_turns - 2} older tool turns]"] if num_turns else []
    assert [message.text for edit in edits for message in edit.replacement] == expected
