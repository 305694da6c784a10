"""Configs, arms, requests and scripts: what needs no server."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage
from rich.console import Console

from evals.solve_rate.arms import forgetting, make_arms
from evals.solve_rate.cli import _stopping, main
from evals.solve_rate.config import CONFIGS, load_config, parse_config
from evals.solve_rate.debug_gym_tasks import PAPER_TASKS, TASKS
from evals.solve_rate.environment import ScriptedCalls, TaskEntry
from evals.solve_rate.episode import chat_model, request_settings
from evals.solve_rate.mini_task_suite import MiniTaskSuite
from evals.solve_rate.readable_calls import NOT_JSON, ReadableCalls
from evals.solve_rate.rows import SolveRateError
from evals.solve_rate.runner import Stop, plan_run
from evals.solve_rate.scripted import CallScript, ErringScript, LateReader, ScriptedTransport
from leyline_agent.core.messages import messages_from_openai
from leyline_agent.core.protocol import Mode
from leyline_agent.policy import apply_policy, load_policy

from .solve_rate_runs import a_config

CALLS = ScriptedCalls(
    solution=(("look", {}), ("mend", {"line": 1}), ("submit", {})),
    give_up=(("submit", {"message": "no"}),),
    filler=("wait", {}),
)


def test_every_shipped_config_can_be_read() -> None:
    names = [file.stem for file in CONFIGS.glob("*.yaml")]
    assert {"debug_gym_quick", "debug_gym_full", "mini_tasks", "paper"} <= set(names)
    for name in names:
        assert load_config(name).name == name


def test_the_papers_setting_is_eight_tasks_twice() -> None:
    config = load_config("paper")
    assert len(PAPER_TASKS) == 8
    assert set(PAPER_TASKS) < set(TASKS)
    assert len(TASKS) == 10
    assert len(config.seeds) == 2
    assert config.model.scripted is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"suite": {"type": "mini_takss"}}, "suite: Input tag 'mini_takss'"),
        ({"seeds": []}, "seeds: "),
        ({"seeds": [1, 1]}, "seeds: one is given twice"),
        ({"jobs": 0}, "jobs: Input should be greater than or equal to 1, got 0"),
        ({"executons": ["none"]}, "executons: Extra inputs"),
        ({"agent": "debug_gym"}, "agent: debug_gym acts in the suite mini_nightmare, got mini_tasks"),
        ({"policies": ["batched", "batched"]}, "two are called alike"),
        ({"policies": [{"policy": "batched", "name": "a b"}]}, "'a b' is no name of an arm"),
        ({"model": {"scripted": "solver", "recorded": "x"}}, "scripted and recorded exclude each other"),
        ({"model": {"scripted": "cheating"}}, "cheating is for mini_nightmare"),
        ({"seeds": [10**6]}, "seeds: got 1000000, and mini_tasks have seeds 0 to 999999"),
        ({"suite": {"type": "mini_tasks", "kinds": []}}, "suite.mini_tasks.kinds: Tuple should have at least 1 item"),
        ({"suite": {"type": "mini_nightmare", "tasks": ["purr", "purr"]}}, "tasks: one is given twice, got ['purr', '"),
        ({"server": {"url": "localhost:30000"}}, "server.url: expected an address such as http://127.0.0.1:30000, got"),
    ],
)
def test_a_wrong_config_is_told_with_its_key(more: dict[str, Any], words: str) -> None:
    with pytest.raises(SolveRateError) as raised:
        a_config(**more)
    assert words in str(raised.value)


def test_an_unknown_policy_and_an_unknown_config_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SolveRateError, match="'no_such' cannot be used"):
        make_arms(a_config(policies=["no_such"]))
    assert main(["run", "no_such"]) == 2
    assert "debug_gym_quick" in capsys.readouterr().err.replace("\n", "")


def test_arms_are_none_and_each_policy_in_each_execution() -> None:
    config = a_config(policies=["batched", {"policy": "keep_last_tool_outputs", "turns": 5}])
    arms = make_arms(config)
    expected = [
        f"{policy}/{how}" for policy in ("batched", "keep_last_tool_outputs_5") for how in config.executions[1:]
    ]
    assert [arm.name for arm in arms] == ["none", *expected]
    assert arms[0].policy is None
    assert all(rule.mode is Mode.FORGET for arm in arms if arm.execution == "forget" for rule in arm.policy.rules)
    assert all(rule.mode is Mode.AMORTIZE for arm in arms[1:] if arm.execution != "forget" for rule in arm.policy.rules)


def test_a_forgetting_policy_fires_when_the_amortizing_one_does() -> None:
    # `batched` has its trigger at the top, which a rule that forgets does not heed by itself.
    policy = load_policy("batched")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for idx in range(12):
        call = {"id": f"c{idx}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{idx}", "content": f"{idx}: " + "a line of text\n" * 60})
        read = messages_from_openai(messages)
        amortized, forgotten = apply_policy(policy, read), apply_policy(forgetting(policy), read)
        assert amortized.messages == forgotten.messages
    assert amortized.messages != tuple(read)


def test_a_part_of_a_run_has_all_arms_of_the_same_episodes_and_all_tasks_before_the_next_seed() -> None:
    class Suite(MiniTaskSuite):
        entries = (TaskEntry("race", repeats=2), TaskEntry("far", repeats=2, skip="no network"))

        def __init__(self) -> None:
            pass

    plans = plan_run(a_config(seeds=[0, 1]), Suite(), make_arms(a_config()))
    episodes = [(plan.entry.name, plan.seed, plan.repeat) for plan in plans]
    # A task that is skipped is planned once: its row says why.
    expected = [(name, seed, repeat) for seed in (0, 1) for name, repeat in (("race", 0), ("race", 1), ("far", 0))]
    assert episodes == [episode for episode in expected for _ in range(4)]
    assert len({plan.arm.name for plan in plans[:4]}) == 4


def test_options_stand_for_what_the_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("version: 1\nname: c\nsuite: {type: mini_tasks}\nmodel: {scripted: solver}\n")
    assert main(["run", str(file), "--url", "http://127.0.0.1:9/v1", "--out", str(tmp_path / "out")]) == 2
    assert "no server answers at http://127.0.0.1:9 " in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def _tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content}


def _called(answer: dict[str, Any]) -> str:
    return answer["tool_calls"][0]["function"]["name"]


@pytest.mark.parametrize(("late", "end"), [("the secret", "mend"), ("[evicted]", "submit")], ids=["kept", "evicted"])
def test_the_late_reader_goes_on_only_with_what_it_saw_first(late: str, end: str) -> None:
    script = LateReader(CALLS)
    assert _called(script([{"role": "user", "content": "go"}])) == "look"
    assert [_called(script([_tool("the secret")])) for _ in range(4)] == ["wait"] * 4
    assert _called(script([_tool(late)])) == end


def _transport(script: Any, sent: list[dict[str, Any]]) -> httpx.Client:
    def server(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        choice = {"index": 0, "message": {"role": "assistant", "content": "?"}, "finish_reason": "length"}
        answer = {"id": "r", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}
        return httpx.Response(200, headers={"x-leyline": "outcome"}, json=answer)

    return httpx.Client(transport=ScriptedTransport(httpx.MockTransport(server), script))


def test_a_script_answers_in_the_place_of_one_token() -> None:
    sent: list[dict[str, Any]] = []
    http = _transport(CallScript(CALLS.solution), sent)
    body = {"messages": [{"role": "user", "content": "go"}], "max_completion_tokens": 900}
    response = http.post("http://server/v1/chat/completions", json=body)
    assert sent == [{"messages": body["messages"], "max_tokens": 1}]
    answer = response.json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 1}
    assert response.headers["x-leyline"] == "outcome"


def test_a_script_that_errs_is_a_server_that_fails() -> None:
    sent: list[dict[str, Any]] = []
    http = _transport(ErringScript(CALLS.solution), sent)
    codes = [http.post("http://server/v1/chat/completions", json={"messages": []}).status_code for _ in range(2)]
    assert codes == [200, 500]
    assert len(sent) == 2


def test_config_files_say_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n")
    with pytest.raises(SolveRateError, match="got list, expected a mapping"):
        load_config(file)
    file.write_bytes(b"name: \xff\n")
    with pytest.raises(SolveRateError, match=r"list\.yaml: cannot be read \(it is no UTF-8\)"):
        load_config(file)
    with pytest.raises(SolveRateError, match="version"):
        parse_config({"name": "x"}, where="x")


def test_a_servers_address_may_end_in_v1() -> None:
    assert a_config(server={"url": "http://127.0.0.1:9/v1/"}).server.url == "http://127.0.0.1:9"


def test_sampling_is_the_servers_own_unless_the_config_says_it() -> None:
    assert {"temperature", "top_p"}.isdisjoint(request_settings(a_config(), "salt", 3))
    said = request_settings(a_config(model={"temperature": 0, "top_p": 0.5}), "salt", 3)
    assert (said["temperature"], said["top_p"], said["seed"]) == (0, 0.5, 3)
    with httpx.Client() as http:
        chat = chat_model(a_config(), "http://127.0.0.1:9", "m", "salt", 3, http)
    assert {"temperature", "top_p"}.isdisjoint(chat._get_request_payload([HumanMessage("go")]))


@pytest.mark.parametrize(
    ("written", "read"),
    [('{"path": "a"}', {"path": "a"}), ("", {}), ('{"path": ', {NOT_JSON: '{"path": '}), ("[1]", {NOT_JSON: "[1]"})],
)
def test_arguments_that_are_no_object_become_one(written: str, read: dict[str, str]) -> None:
    def server(request: httpx.Request) -> httpx.Response:
        call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": written}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return httpx.Response(200, headers={"x-leyline": "outcome"}, json={"choices": [{"message": message}]})

    with httpx.Client(transport=ReadableCalls(httpx.MockTransport(server))) as http:
        response = http.post("http://server/v1/chat/completions", json={})
    assert json.loads(response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == read
    assert response.headers["x-leyline"] == "outcome"


def test_a_second_interrupt_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    stop, before = Stop(), signal.getsignal(signal.SIGINT)
    with _stopping(stop, Console(file=io.StringIO())):
        signal.raise_signal(signal.SIGINT)
        assert (stop.reason, codes) == ("interrupted", [])
        signal.raise_signal(signal.SIGTERM)
    assert codes == [130]
    assert signal.getsignal(signal.SIGINT) is before
