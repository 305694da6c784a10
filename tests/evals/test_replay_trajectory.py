from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from evals.replay.errors import TrajectoryError
from evals.replay.record import DEMO_TRAJECTORY
from evals.replay.trajectory import load_trajectory


def _call(arguments: Any, call_id: str | None = "c1", name: str = "cat") -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _write(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "trajectory.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_turns_are_an_answer_and_what_came_back_before_the_next(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [_call('{"a": 1}', "c1"), _call("{}", "c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "done"},
    ]
    trajectory = load_trajectory(_write(tmp_path, {"source": "x", "messages": messages}))
    assert [type(message) for message in trajectory.opening] == [SystemMessage, HumanMessage]
    assert [len(turn.observations) for turn in trajectory.turns] == [2, 0]
    first = trajectory.turns[0]
    assert [(call["id"], call["args"]) for call in first.answer.tool_calls] == [("c1", {"a": 1}), ("c2", {})]
    assert [m.tool_call_id for m in first.observations if isinstance(m, ToolMessage)] == ["c1", "c2"]
    assert trajectory.observed_role == "tool"
    assert trajectory.normalized == ()


def test_a_bare_list_without_calls_is_observed_through_user_messages(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": ""},
    ]
    trajectory = load_trajectory(_write(tmp_path, messages))
    assert trajectory.observed_role == "user"
    assert trajectory.num_turns == 1
    assert trajectory.source == "trajectory.json"


def test_an_assistant_message_that_opens_belongs_to_the_opening(tmp_path: Path) -> None:
    messages = [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    trajectory = load_trajectory(_write(tmp_path, messages))
    assert [type(message) for message in trajectory.opening] == [AIMessage, HumanMessage]
    assert trajectory.num_turns == 1


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        pytest.param(
            [{"role": "assistant", "content": None, "tool_calls": [_call("{}", None)]}],
            "message 1, call 0: the id was missing and became 'call_1_0'",
            id="call without id",
        ),
        pytest.param(
            [
                {"role": "assistant", "content": "", "tool_calls": [_call("{}", "a"), _call("{}", "b")]},
                {"role": "tool", "tool_call_id": "a", "content": ""},
                {"role": "tool", "content": ""},
            ],
            "message 3: tool_call_id was missing and became 'b'",
            id="result without id takes the oldest open call",
        ),
        pytest.param(
            [{"role": "assistant", "content": "", "tool_calls": [_call('{"path": "x')]}],
            "message 1, call 0: the arguments were no JSON object and were wrapped into one",
            id="broken arguments",
        ),
        pytest.param(
            [{"role": "assistant", "content": "x"}, {"role": "user", "content": None}],
            "message 2: content null became an empty text",
            id="null content",
        ),
    ],
)
def test_what_langchain_or_the_server_refuse_is_normalized_and_said(
    tmp_path: Path, messages: list[dict[str, Any]], line: str
) -> None:
    trajectory = load_trajectory(_write(tmp_path, [{"role": "user", "content": "u"}, *messages]))
    assert trajectory.normalized == (line,)
    assert trajectory.num_turns == 1  # and the messages can be built


def test_broken_arguments_keep_their_text(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [_call('{"path": "x')]},
    ]
    answer = load_trajectory(_write(tmp_path, messages)).turns[0].answer
    assert answer.tool_calls[0]["args"] == {"arguments": '{"path": "x'}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", r"trajectory\.json:1:2: not JSON", id="no json"),
        pytest.param('{"steps": []}', r"an object with the keys \['steps'\]; expected", id="other keys"),
        pytest.param("3", "got int; expected", id="a number"),
        pytest.param([{"role": "narrator", "content": ""}], "message 0 has the role 'narrator'; expected", id="role"),
        pytest.param(["hello"], r"messages\[0\]: got str", id="message is text"),
        pytest.param([{"role": "user", "content": 3}], "message 0: content is int; expected", id="content"),
        pytest.param([{"role": "user", "content": "u"}], "nothing to replay", id="no answer"),
        pytest.param({"messages": [], "tools": {}, "x": 1}, "nothing to replay", id="empty"),
        pytest.param({"messages": [], "tools": "bash"}, "tools: got 'bash', expected a list", id="tools"),
        pytest.param(
            [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": ["bash"]}],
            "message 1, call 0 is no OpenAI tool call",
            id="call is text",
        ),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        load_trajectory(_write(tmp_path, content))


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match=r"none\.json: cannot read it: No such file or directory"):
        load_trajectory(tmp_path / "none.json")


def test_the_demo_trajectory_is_long_real_and_whole() -> None:
    trajectory = load_trajectory(DEMO_TRAJECTORY)
    assert trajectory.num_turns >= 50
    assert trajectory.normalized == ()
    answered = [m.tool_call_id for turn in trajectory.turns for m in turn.observations if isinstance(m, ToolMessage)]
    called = [call["id"] for turn in trajectory.turns for call in turn.answer.tool_calls]
    assert answered == called
    assert any(len(turn.answer.tool_calls) > 1 for turn in trajectory.turns)
    names = {tool["function"]["name"] for tool in trajectory.tools}
    assert {call["name"] for turn in trajectory.turns for call in turn.answer.tool_calls} == names
