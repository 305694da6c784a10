from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from evals.replay.arms import ArmRun, run_arm
from evals.replay.errors import ReplayError
from evals.replay.runner import keep_last_policy
from evals.replay.trajectory import Trajectory, load_trajectory
from evals.replay.turn_rows import ARMS, Arm, TurnRow, summarize

from .fake_sglang import FakeSGLang

LONG = "line of output\n" * 20


def _trajectory(
    tmp_path: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> Trajectory:
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps({"source": "test", "messages": messages, "tools": tools or []}))
    return load_trajectory(file)


@pytest.fixture
def with_tools(tmp_path: Path) -> Trajectory:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for idx in range(5):
        call = {"id": f"c{idx}", "type": "function", "function": {"name": "cat", "arguments": f'{{"path":"f{idx}"}}'}}
        messages += [
            {"role": "assistant", "content": f"look {idx}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{idx}", "content": f"{idx}: {LONG}"},
        ]
    messages.append({"role": "assistant", "content": "done"})
    cat = {"type": "function", "function": {"name": "cat", "parameters": {"type": "object", "properties": {}}}}
    return _trajectory(tmp_path, messages, [cat])


@pytest.fixture
def without_tools(tmp_path: Path) -> Trajectory:
    messages = [{"role": "user", "content": f"the task: {LONG}"}]
    for idx in range(4):
        messages += [{"role": "assistant", "content": f"do {idx}"}, {"role": "user", "content": f"{idx}: {LONG}"}]
    return _trajectory(tmp_path, messages)


def _run(server: FakeSGLang, arm: Arm, trajectory: Trajectory, **options: Any) -> ArmRun:
    rows: list[TurnRow] = []
    run = run_arm(
        arm,
        trajectory,
        url="http://fake",
        model="fake",
        policy=keep_last_policy(2, trajectory),
        on_turn=rows.append,
        transport=server.transport,
        **options,
    )
    assert tuple(rows) == run.result.rows
    return run


@pytest.mark.parametrize("arm", ARMS)
def test_one_request_a_turn_of_one_token(with_tools: Trajectory, arm: Arm) -> None:
    server = FakeSGLang()
    run = _run(server, arm, with_tools)
    assert len(server.bodies) == with_tools.num_turns == 6
    assert [row.num_requests for row in run.result.rows] == [1] * 6
    assert {body["max_completion_tokens"] for body in server.bodies} == {1}
    assert {body["temperature"] for body in server.bodies} == {0}
    assert all(body["tools"][0]["function"]["name"] == "cat" for body in server.bodies)


def test_the_agent_goes_on_with_the_recorded_answer(with_tools: Trajectory) -> None:
    server = FakeSGLang()
    _run(server, "none", with_tools)
    last = server.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user"] + ["assistant", "tool"] * 5
    assert last[2]["content"] == "look 0"
    assert json.loads(last[2]["tool_calls"][0]["function"]["arguments"]) == {"path": "f0"}
    assert last[3]["content"] == f"0: {LONG}"
    assert "generated" not in json.dumps(last)


def test_arm_none_sends_everything_and_no_note(with_tools: Trajectory) -> None:
    server = FakeSGLang()
    _run(server, "none", with_tools)
    assert "evicted" not in json.dumps(server.bodies)
    assert all("custom_params" not in body for body in server.bodies)


def test_both_edited_arms_send_the_same_prompts(with_tools: Trajectory) -> None:
    server = FakeSGLang()
    reprefill, splice = _run(server, "reprefill", with_tools), _run(server, "splice", with_tools)
    assert reprefill.result.prompt_digests == splice.result.prompt_digests
    contents = [message["content"] for message in splice.bodies[-1]["messages"] if message["role"] == "tool"]
    assert contents[:3] == ["[evicted: cat, 20 lines]"] * 3
    assert contents[3:] == [f"{idx}: {LONG}" for idx in (3, 4)]


def test_the_reprefill_arm_is_a_plain_client(with_tools: Trajectory, caplog: pytest.LogCaptureFixture) -> None:
    server = FakeSGLang()
    with caplog.at_level(logging.WARNING, logger="leyline_agent"):
        run = _run(server, "reprefill", with_tools)
    assert all("custom_params" not in body for body in server.bodies)
    assert not any(name.startswith(("x-smg", "x-leyline")) for headers in server.headers for name in headers)
    assert {row.status for row in run.result.rows} == {None}
    assert caplog.records == []


def test_the_splice_arm_amortizes_every_turn(with_tools: Trajectory) -> None:
    server = FakeSGLang()
    run = _run(server, "splice", with_tools)
    notes = [json.loads(body["custom_params"]["leyline"]) for body in server.bodies]
    # The recorded answer takes the generated one's place before the integration sees it: nothing is unexplained.
    assert {note.get("mode", "amortize") for note in notes} == {"amortize"}
    assert [note.get("base") for note in notes] == [None, *(note["turn"] for note in notes[:-1])]
    assert [row.status for row in run.result.rows] == ["unchanged"] + ["spliced"] * 5


def test_observations_of_users_are_edited_where_there_are_no_tools(without_tools: Trajectory) -> None:
    server = FakeSGLang()
    _run(server, "splice", without_tools)
    users = [message["content"] for message in server.bodies[-1]["messages"] if message["role"] == "user"]
    assert users == [f"the task: {LONG}", "[evicted: 20 lines]", f"1: {LONG}", f"2: {LONG}"]
    assert "tools" not in server.bodies[-1]


def test_each_arm_starts_with_an_empty_cache(with_tools: Trajectory) -> None:
    server = FakeSGLang()
    for _ in range(2):
        assert _run(server, "none", with_tools).result.rows[0].reported_cached_tokens == 0
    assert server.paths.count("/flush_cache") == 2


def test_arm_none_stops_at_the_limit_and_says_so(with_tools: Trajectory) -> None:
    limit = 150
    result = _run(FakeSGLang(), "none", with_tools, max_prompt_tokens=limit).result
    assert result.rows[-1].prompt_tokens > limit >= result.rows[-2].prompt_tokens
    assert (
        result.stopped_at
        == f"turn {len(result.rows)}: the prompt has {result.rows[-1].prompt_tokens} tokens, more than 150"
    )
    assert summarize(result)["stopped_at"] == result.stopped_at


def test_edited_arms_go_to_the_end(with_tools: Trajectory) -> None:
    result = _run(FakeSGLang(), "splice", with_tools, max_prompt_tokens=20).result
    assert len(result.rows) == with_tools.num_turns
    assert result.stopped_at is None


def test_the_servers_counters_are_those_of_the_arm_alone(with_tools: Trajectory) -> None:
    server = FakeSGLang()
    _run(server, "none", with_tools)
    check = summarize(_run(server, "reprefill", with_tools).result)["crosscheck"]
    assert check["agrees"] is True
    assert check["server"]["http_chat_requests"] == check["client"]["requests"] == 6
    assert check["server"]["cached_tokens"] == check["client"]["cached_tokens"] > 0


def test_a_server_without_metrics_is_no_obstacle(with_tools: Trajectory) -> None:
    assert summarize(_run(FakeSGLang(metrics=False), "none", with_tools).result)["crosscheck"]["agrees"] is None


def test_an_unpatched_server_counts_as_fallbacks(with_tools: Trajectory) -> None:
    totals = summarize(_run(FakeSGLang(plugin=False), "splice", with_tools).result)
    assert totals["splices"] == 0
    assert totals["fallbacks_by_reason"] == {"no_outcome": 6}


def test_the_integration_hears_of_the_outcome(with_tools: Trajectory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="leyline_agent"):
        _run(FakeSGLang(), "splice", with_tools)
        assert caplog.records == []
        _run(FakeSGLang(plugin=False), "splice", with_tools)
    assert ["without an outcome" in record.message for record in caplog.records] == [True]


def test_a_refused_request_names_arm_and_turn(with_tools: Trajectory) -> None:
    with pytest.raises(ReplayError, match=r"arm 'none', turn 3: the server answered 400: .*too long"):
        _run(FakeSGLang(refuse_from_turn=3), "none", with_tools)
