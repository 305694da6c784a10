"""What holds for every policy that comes with the package, on recorded conversations and on invented ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.policy import Applied, PolicyRun, apply_policy, load_policy, policy_library, request_points
from leyline_agent.policy.schema import Policy

from ..recordings import recording
from .histories import history, loud_counter, unpaired

_NAMES = [entry.name for entry in policy_library()]
_DEMO = Path(__file__).resolve().parents[2] / "evals" / "replay" / "demo_trajectory.json"
_RECORDINGS = ["debug_gym_astropy", "debug_gym_pandas", "openhands_ponyc", "swe_marshmallow_fc", "swe_pydicom_text"]
_EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "stale_calls.yaml"
_DETECTOR = "leyline_agent.policy.detectors:stale_tool_calls"


def _policy(name: str) -> Policy:
    return load_policy(_EXAMPLE, allow_python=[_DETECTOR]) if name == "stale_calls" else load_policy(name)


@pytest.fixture(params=["demo", *_RECORDINGS])
def recorded(request: pytest.FixtureRequest) -> list[Message]:
    file = _DEMO if request.param == "demo" else recording(request.param)
    return messages_from_openai(json.loads(file.read_text(encoding="utf-8"))["messages"])


def test_there_are_at_least_twelve_and_the_first_two_keep_their_names() -> None:
    assert len(_NAMES) >= 12
    assert {"keep_last_tool_outputs", "none"} <= set(_NAMES)


@pytest.mark.parametrize("entry", policy_library(), ids=_NAMES)
def test_each_says_when_to_use_it_what_it_costs_and_what_it_risks(entry: Any) -> None:
    policy = load_policy(entry.name)

    assert all((entry.when, entry.cost, entry.risk))
    assert (policy.name, entry.description) == (entry.name, policy.description)
    # What `leyline policies` shows of it in a line.
    assert len(entry.description) <= 69


@pytest.mark.parametrize("name", [*_NAMES, "stale_calls"])
def test_each_prompt_goes_on_from_the_one_before_except_where_a_rule_newly_fires(
    name: str, recorded: list[Message]
) -> None:
    _assert_extends(_policy(name), recorded)


@pytest.mark.parametrize("name", _NAMES)
def test_none_parts_a_call_from_its_results_on_a_recording(name: str, recorded: list[Message]) -> None:
    applied = apply_policy(_policy(name), recorded, counter=loud_counter(2))

    assert unpaired(applied.messages) == unpaired(recorded)


@pytest.mark.parametrize("start", range(0, 60, 30))
def test_none_parts_a_call_from_its_results_on_invented_histories(start: int) -> None:
    _assert_paired(range(start, start + 30))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 10_000, 1000))
def test_none_parts_a_call_from_its_results_on_10_000_invented_histories(start: int) -> None:
    _assert_paired(range(start, start + 1000))


@pytest.mark.parametrize("name", [*_NAMES, "stale_calls"])
def test_each_goes_on_from_invented_histories_too(name: str) -> None:
    for seed in range(30):
        _assert_extends(_policy(name), messages_from_openai(history(seed)))


def test_every_policy_fires_somewhere() -> None:
    """Else the tests above say nothing about it."""
    silent = {name for name in _NAMES if not any(_apply(name, seed).made for seed in range(60))}

    # The masking of OpenHands begins at 101 messages; the demo's recording has so many.
    assert silent == {"none", "openhands_observation_masking"}


def _apply(name: str, seed: int) -> Applied:
    return apply_policy(_policy(name), messages_from_openai(history(seed)), counter=loud_counter())


def _assert_paired(seeds: range) -> None:
    policies = [_policy(name) for name in _NAMES]
    for seed in seeds:
        messages = messages_from_openai(history(seed))
        waiting, orphans = unpaired(messages)
        for policy in policies:
            edited = apply_policy(policy, messages, counter=loud_counter()).messages
            still_waiting, still_orphans = unpaired(edited)
            assert still_waiting - waiting == {}, (policy.name, seed)
            assert still_orphans - orphans == {}, (policy.name, seed)


def _assert_extends(policy: Policy, messages: list[Message]) -> None:
    counter = loud_counter(2)
    run = PolicyRun(policy, counter=counter)
    earlier: Applied | None = None
    num_earlier = 0
    for number, point in enumerate(request_points(messages)):
        applied = run.apply(messages[:point])
        if number % 9 == 8:
            assert applied == apply_policy(policy, messages[:point], counter=counter)
        if earlier is not None:
            touched = {idx for made in applied.new for idx in made.message_idxs}
            before, after = _standing(earlier.edits, num_earlier), _standing(applied.edits, point)
            assert [idx for idx in range(num_earlier) if before[idx] != after[idx] and idx not in touched] == []
            if not touched & set(range(num_earlier)):
                assert applied.messages[: len(earlier.messages)] == earlier.messages
            assert applied.made[: len(earlier.made)] == earlier.made
        earlier, num_earlier = applied, point


def _standing(edits: Sequence[Edit], num_messages: int) -> list[Edit | None]:
    """What stands in the place of each message: an edit, or the message itself."""
    standing: list[Edit | None] = [None] * num_messages
    for edit in edits:
        standing[edit.start : edit.end] = [edit] * (edit.end - edit.start)
    return standing
