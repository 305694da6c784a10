"""Whole runs on a real server, with models that are scripts: rows, arms, resumption, budgets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from evals.mini_tasks import Observation
from evals.replay.trajectory import load_trajectory
from evals.serving import RunningServer
from evals.solve_rate.environment import EnvironmentFailedError
from evals.solve_rate.mini_task_suite import MiniTaskSuite
from evals.solve_rate.rows import EpisodeKey, Row, SolveRateError
from evals.solve_rate.runner import Stop

from .solve_rate_runs import Quiet, a_config, play, rows_of

pytestmark = pytest.mark.sglang

CARRY = {"type": "mini_tasks", "kinds": ["carry"], "lengths": ["short"]}
POLICY = "keep_last_tool_outputs"


@pytest.fixture(scope="module")
def solved(cpu_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the solver: three tasks in four arms, two episodes at a time."""
    folder = tmp_path_factory.mktemp("solved")
    assert play(a_config(jobs=2), folder, cpu_server.url).num_left == 0
    return folder


def _what_counts(rows: dict[EpisodeKey, Row]) -> dict[EpisodeKey, dict[str, Any]]:
    """Rows without what differs between two runs: times."""
    times = {"seconds", "turn_ms", "saved_ms", "started", "git"}
    return {key: row.model_dump(exclude=times) for key, row in rows.items()}


def test_the_solver_solves_every_task_in_every_arm(solved: Path) -> None:
    rows = rows_of(solved)
    assert len(rows) == 3 * 4
    assert {row.status for row in rows.values()} == {"solved"}
    assert {row.scripted for row in rows.values()} == {"solver"}
    assert {row.ended for row in rows.values()} == {"done"}
    assert all(row.turns == len(row.turn_ms) == row.completion_tokens > 3 for row in rows.values())


def test_executions_send_the_same_prompts_and_splice_caches_most_of_them(solved: Path) -> None:
    rows = rows_of(solved)
    cached = dict.fromkeys(("reprefill", "splice", "forget"), 0)
    for task in ("carry_short", "file_chain_short", "log_line_short"):
        by = {how: rows["mini_tasks", task, f"{POLICY}/{how}", 0, 0] for how in cached}
        assert len({row.prompt_tokens for row in by.values()}) == 1
        assert rows["mini_tasks", task, "none", 0, 0].prompt_tokens > by["splice"].prompt_tokens
        # The first output is edited in the fourth turn; then one a turn.
        assert by["splice"].splices == by["splice"].turns - 3
        assert by["splice"].moved_tokens > 0
        assert by["reprefill"].splices == by["forget"].splices == 0
        assert {how: row.fallbacks for how, row in by.items()} == {"reprefill": {}, "splice": {}, "forget": {}}
        for how, row in by.items():
            cached[how] += row.cached_tokens
    assert cached["splice"] > cached["reprefill"]


def test_a_transcript_lies_beside_each_row_and_can_be_replayed(solved: Path) -> None:
    for row in rows_of(solved).values():
        assert row.transcript is not None
        said = json.loads((solved / row.transcript).read_text())
        assert said["row"]["arm"] == row.arm
        assert len(said["turns"]) == row.turns
        trajectory = load_trajectory(solved / row.transcript)
        assert trajectory.num_turns == row.turns
        # The history is whole in every arm: a policy edits what is sent.
        assert not any("[evicted" in str(message["content"]) for message in said["messages"])


def test_a_run_says_what_it_ran_on(solved: Path, cpu_server: RunningServer) -> None:
    (noted,) = json.loads((solved / "run.json").read_text())
    assert noted["server"]["model"] == "leyline"
    assert noted["sandboxed"] is None
    assert yaml.safe_load((solved / "config.yaml").read_text())["model"]["scripted"] == "solver"


def test_a_finished_run_is_not_run_again(solved: Path, cpu_server: RunningServer) -> None:
    watcher = Quiet()
    finished = play(a_config(jobs=2), solved, cpu_server.url, watcher)
    assert (finished.num_left, finished.num_errors, watcher.rows) == (0, 0, [])
    assert len(watcher.before) == 12


def test_a_run_that_is_killed_goes_on_to_the_same_result(
    solved: Path, cpu_server: RunningServer, tmp_path: Path
) -> None:
    config, folder = a_config(jobs=2), tmp_path / "run"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "evals.solve_rate.cli", "run", str(file), "--out", str(folder)]
    killed = subprocess.Popen(
        [*command, "--url", cpu_server.url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    rows_file = folder / "rows.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not rows_file.exists() or rows_file.read_bytes().count(b"\n") < 3:
            assert killed.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    left = rows_file.read_bytes()
    num_done = left.count(b"\n")
    assert 3 <= num_done < 12
    # A kill in the middle of a write leaves less than a line.
    rows_file.write_bytes(left + left[:40])
    watcher = Quiet()
    finished = play(config, folder, cpu_server.url, watcher)
    assert (finished.num_left, finished.num_errors) == (0, 0)
    assert len(watcher.rows) == 12 - num_done
    assert _what_counts(rows_of(folder)) == _what_counts(rows_of(solved))


@pytest.mark.parametrize(("script", "expected"), [("failing", "failed"), ("erring", "error")])
def test_failures_and_errors_are_told_apart(
    script: str, expected: str, cpu_server: RunningServer, tmp_path: Path
) -> None:
    config = a_config(suite=CARRY, executions=["none", "splice"], model={"scripted": script})
    finished = play(config, tmp_path, cpu_server.url)
    rows = rows_of(tmp_path).values()
    assert {row.status for row in rows} == {expected}
    assert finished.num_errors == (2 if expected == "error" else 0)
    for row in rows:
        assert (row.reason is not None and "the script has the model fail" in row.reason) == (expected == "error")
        assert row.score == 0


def test_errors_are_run_again_and_failures_are_not(cpu_server: RunningServer, tmp_path: Path) -> None:
    def config(**model: Any) -> Any:
        return a_config(suite=CARRY, executions=["none"], model=model, seeds=[0, 1])

    class BreaksOnce(MiniTaskSuite):
        def make(self, task: str, seed: int) -> Any:
            made = super().make(task, seed)
            if seed == 1 and not broken:
                broken.append(seed)

                def call(name: str, arguments: dict[str, Any]) -> Any:
                    raise EnvironmentFailedError("the world broke")

                made.call = call  # type: ignore[method-assign]
            return made

    broken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evals.solve_rate.runner.MiniTaskSuite", BreaksOnce)
        assert play(config(scripted="failing"), tmp_path, cpu_server.url).num_errors == 1
        error = rows_of(tmp_path)["mini_tasks", "carry_short", "none", 1, 0]
        assert error.reason == "EnvironmentFailedError: the world broke"
        watcher = Quiet()
        assert play(config(scripted="failing"), tmp_path, cpu_server.url, watcher).num_errors == 0
    assert [(row.seed, row.status) for row in watcher.rows] == [(1, "failed")]


def test_what_a_policy_evicts_can_be_missed(cpu_server: RunningServer, tmp_path: Path) -> None:
    config = a_config(
        suite={"type": "mini_tasks", "kinds": ["file_chain"], "lengths": ["short"]},
        model={"scripted": "late_reader"},
        jobs=2,
    )
    play(config, tmp_path, cpu_server.url)
    status = {row.execution: row.status for row in rows_of(tmp_path).values()}
    assert status == {"none": "solved", "reprefill": "failed", "splice": "failed", "forget": "failed"}


def test_a_recorded_run_is_given_again(solved: Path, cpu_server: RunningServer, tmp_path: Path) -> None:
    config = a_config(executions=["none", "splice"], model={"recorded": str(solved)}, suite=CARRY)
    play(config, tmp_path, cpu_server.url)
    before, again = _what_counts(rows_of(solved)), _what_counts(rows_of(tmp_path))
    assert len(again) == 2
    for key, row in again.items():
        assert row == before[key] | {"scripted": "recorded"}


def test_a_spent_budget_ends_a_run_and_a_larger_one_goes_on(cpu_server: RunningServer, tmp_path: Path) -> None:
    def config(**limits: Any) -> Any:
        return a_config(suite=CARRY, executions=["none"], seeds=[0, 1, 2], limits=limits)

    finished = play(config(total_tokens=1), tmp_path, cpu_server.url)
    assert finished.num_left == 2
    assert finished.stopped_by is not None
    assert finished.stopped_by.startswith("total_tokens: ")
    assert play(config(total_s=1e-9), tmp_path, cpu_server.url).num_left > 0
    assert play(config(total_tokens=100_000), tmp_path, cpu_server.url).num_left == 0
    assert len(rows_of(tmp_path)) == 3


def test_an_episode_ends_where_its_limits_are(cpu_server: RunningServer, tmp_path: Path) -> None:
    play(a_config(suite=CARRY, executions=["none"], limits={"max_turns": 2}), tmp_path, cpu_server.url)
    (row,) = rows_of(tmp_path).values()
    assert (row.status, row.ended, row.turns) == ("failed", "turns", 2)


def test_a_model_that_calls_nothing_is_reminded_and_then_fails(cpu_server: RunningServer, tmp_path: Path) -> None:
    # The random test model itself: it writes words, and no calls.
    config = a_config(suite=CARRY, executions=["none"], model={"max_tokens": 4})
    play(config, tmp_path, cpu_server.url)
    (row,) = rows_of(tmp_path).values()
    assert (row.status, row.ended, row.turns, row.scripted) == ("failed", "no_call", 4, None)
    assert row.completion_tokens == 16


def test_a_history_that_outgrows_the_model_fails_and_a_first_prompt_that_does_is_an_error(
    cpu_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Floods(MiniTaskSuite):
        def make(self, task: str, seed: int) -> Any:
            environment = super().make(task, seed)
            environment.call = lambda name, arguments: Observation("flood " * 80_000)  # type: ignore[method-assign]
            return environment

    config = a_config(suite=CARRY, executions=["none"], model={"max_tokens": 10_000_000})
    play(config, tmp_path / "first", cpu_server.url)
    (row,) = rows_of(tmp_path / "first").values()
    assert (row.status, row.ended, row.turns) == ("error", None, 0)
    assert row.reason is not None
    assert "context length" in row.reason
    monkeypatch.setattr("evals.solve_rate.runner.MiniTaskSuite", Floods)
    play(a_config(suite=CARRY, executions=["none"]), tmp_path / "later", cpu_server.url)
    (row,) = rows_of(tmp_path / "later").values()
    assert (row.status, row.ended, row.turns) == ("failed", "context", 1)


def _running(server: RunningServer) -> str:
    metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return next(line for line in metrics.splitlines() if line.startswith("sglang:num_running_reqs{"))


def test_the_clock_breaks_off_a_model_that_thinks_for_minutes(cpu_server: RunningServer, tmp_path: Path) -> None:
    model = {"max_tokens": 50_000, "extra_body": {"ignore_eos": True}}
    config = a_config(suite=CARRY, executions=["none"], model=model, limits={"total_s": 1})
    begun = time.monotonic()
    finished = play(config, tmp_path, cpu_server.url)
    assert finished.stopped_by == "total_s: 1 s are over"
    assert rows_of(tmp_path) == {}
    assert time.monotonic() - begun < 30
    # The server is told: it generates no more for a client that has left.
    while " 0.0" not in _running(cpu_server):
        assert time.monotonic() - begun < 60
        time.sleep(0.2)


def test_an_interrupted_episode_leaves_no_row_and_no_other_starts(
    cpu_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, made = Stop(), []

    class Interrupts(MiniTaskSuite):
        def make(self, task: str, seed: int) -> Any:
            environment = super().make(task, seed)
            made.append(environment)
            call = environment.call

            def interrupted(name: str, arguments: dict[str, Any]) -> Any:
                stop.set("interrupted")
                return call(name, arguments)

            environment.call = interrupted  # type: ignore[method-assign]
            return environment

    monkeypatch.setattr("evals.solve_rate.runner.MiniTaskSuite", Interrupts)
    finished = play(a_config(suite=CARRY), tmp_path, cpu_server.url, stop=stop)
    assert (finished.num_left, finished.stopped_by) == (4, "interrupted")
    assert rows_of(tmp_path) == {}
    assert len(made) == 1


def test_a_missing_key_is_told_before_anything_is_written(
    cpu_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    config = a_config(model={"scripted": "solver", "api_key_env": "NO_SUCH_KEY"})
    with pytest.raises(SolveRateError, match="the environment has no NO_SUCH_KEY"):
        play(config, tmp_path / "run", cpu_server.url)
    assert not (tmp_path / "run").exists()
