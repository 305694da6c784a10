"""The cases of `tests/golden/*.yaml`: a policy, messages before, messages after."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyline_agent.core.edits import apply_edits
from leyline_agent.core.messages import messages_from_openai
from leyline_agent.policy import Policy, policy_edits

_FOLDER = Path(__file__).resolve().parents[1] / "golden"
_CASES = [
    pytest.param(case, id=f"{file.stem}: {case['case']}")
    for file in sorted(_FOLDER.glob("*.yaml"))
    for case in yaml.safe_load(file.read_text(encoding="utf-8"))
]


def _written_out(short: dict[str, Any]) -> dict[str, Any]:
    if "raw" in short:
        return copy.deepcopy(short["raw"])
    role = next(role for role in ("user", "assistant", "tool") if role in short)
    message: dict[str, Any] = {"role": role, "content": short[role]}
    if "of" in short:
        message["tool_call_id"] = short["of"]
    if "calls" in short:
        message["tool_calls"] = [_call(*call.split(" ", 2)) for call in short["calls"]]
    return message


def _call(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id == "-" else {"id": call_id, **call}


@pytest.mark.parametrize("case", _CASES)
def test_a_policy_edits_as_written(case: dict[str, Any]) -> None:
    messages = messages_from_openai([_written_out(short) for short in case["before"]])

    edits = policy_edits(Policy.model_validate(case["policy"]), messages)

    edited = [message.to_openai() for message in apply_edits(messages, edits)]
    assert edited == [_written_out(short) for short in case["after"]]
    if "edits" in case:
        assert [[edit.start, edit.end, edit.mode.value, edit.rule] for edit in edits] == case["edits"]
