from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.errors import PolicyError
from leyline_agent.policy import Policy, apply_policy, load_policy, parse_policy
from leyline_agent.policy.detectors import stale_tool_calls

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "stale_calls.yaml"
STALE = "leyline_agent.policy.detectors:stale_tool_calls"
_RULE = 'version: 1\nrules: [{{name: r, select: {{role: tool, python: "{0}"}}, replace: "[x]"}}]'


def _history(*calls: tuple[str, str]) -> list[Message]:
    messages: list[dict[str, Any]] = []
    for idx, (name, arguments) in enumerate(calls):
        call = {"id": str(idx), "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": str(idx), "content": f"output {idx} " * 30})
    return messages_from_openai(messages)


def test_the_example_finds_outputs_about_files_that_were_written_or_read_again() -> None:
    messages = _history(
        ("view", '{"path": "src/a.py"}'),
        ("view", '{"path": "src/b.py"}'),
        ("edit", '{"path": "src/a.py"}'),
        ("bash", '{"command": "cat src/b.py"}'),
        ("bash", '{"command": "ls"}'),
    )

    edits = apply_policy(load_policy(EXAMPLE, allow_python=[STALE]), messages).edits

    assert stale_tool_calls(messages) == [1, 3]
    assert [edit.start for edit in edits] == [1, 3]


def test_nothing_runs_that_the_caller_has_not_allowed() -> None:
    with pytest.raises(PolicyError, match=r"nobody has allowed.*allow_python") as caught:
        load_policy(EXAMPLE)

    assert (caught.value.line, caught.value.key) == (9, "rules[0].select.python")


def test_another_allowed_name_is_not_enough_and_is_suggested() -> None:
    with pytest.raises(PolicyError, match=f"did you mean '{re.escape(STALE)}'"):
        parse_policy(_RULE.format(STALE[:-1]), allow_python=[STALE])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no.such.module:f", "cannot be imported: No module named 'no'; is it installed, or its folder in PYTHONPATH?"),
        ("json:no_such", "cannot be imported"),
        ("json:__name__", "a function"),
    ],
)
def test_an_allowed_name_that_is_no_function_is_refused(name: str, words: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(words)):
        parse_policy(_RULE.format(name), allow_python=[name])


def test_a_policy_made_without_the_loader_runs_nothing_either() -> None:
    policy = Policy.model_validate(
        {"version": 1, "rules": [{"name": "r", "select": {"role": "tool", "python": STALE}, "drop": True}]}
    )

    with pytest.raises(PolicyError, match="not allowed to run"):
        apply_policy(policy, _history(("view", "{}")))


def _policy_with(detector: Any) -> Policy:
    rules = [{"name": "r", "select": {"role": "tool", "python": "my:detector"}, "replace": "[x]"}]
    return Policy.model_validate({"version": 1, "rules": rules}).with_detectors({"my:detector": detector})


def test_what_a_detector_selected_once_stays_edited() -> None:
    def newest(messages: Sequence[Message]) -> list[int]:
        return [len(messages) - 1]

    messages = _history(("a", "{}"), ("b", "{}"), ("c", "{}"))

    assert [edit.start for edit in apply_policy(_policy_with(newest), messages).edits] == [1, 3, 5]


def test_a_detector_is_given_the_messages_as_they_were() -> None:
    seen: list[str] = []

    def everything(messages: Sequence[Message]) -> range:
        seen.extend(message.text[:3] for message in messages if message.role == "tool")
        return range(len(messages))

    apply_policy(_policy_with(everything), _history(("a", "{}"), ("b", "{}")))

    assert set(seen) == {"out"}


@pytest.mark.parametrize("wrong", [[99], [-1], ["a"], [True], [[0]], None])
def test_a_detector_that_returns_no_indices_is_reported(wrong: Any) -> None:
    with pytest.raises(PolicyError, match=r"my:detector returned .*expected indices of the 2 messages"):
        apply_policy(_policy_with(lambda messages: wrong), _history(("a", "{}")))
