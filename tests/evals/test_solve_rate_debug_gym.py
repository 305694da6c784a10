"""The debug-gym suite: its sandbox, what an agent is shown, and scores that cannot be cheated."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals.debug_gym_env.sandbox import Sandbox, isolation_works
from evals.serving import RunningServer
from evals.solve_rate import debug_gym_scripts
from evals.solve_rate.config import MiniNightmare
from evals.solve_rate.debug_gym_agent import GymAgents
from evals.solve_rate.debug_gym_tasks import DebugGymEnvironment, DebugGymTasks, GymWorker, find_data
from evals.solve_rate.environment import EnvironmentFailedError
from evals.solve_rate.rows import SolveRateError

from .solve_rate_runs import a_config, needs_debug_gym, play, rows_of

ENVIRONMENT = {"PATH": os.environ["PATH"]}


def _suite(**more: Any) -> DebugGymTasks:
    return DebugGymTasks(MiniNightmare(type="mini_nightmare", **more))


@pytest.fixture(scope="module")
def suite() -> DebugGymTasks:
    needs_debug_gym()
    return _suite()


@pytest.fixture(scope="module")
def grader(suite: DebugGymTasks) -> Iterator[DebugGymEnvironment]:
    """A task of which two tests of three pass as it is; tests reset it, since a process takes seconds to start."""
    environment = suite.make("grader", 0)
    yield environment
    environment.close()


def _purr(suite: DebugGymTasks, *, tool_s: float) -> DebugGymEnvironment:
    return DebugGymEnvironment("purr", folder=suite.folder, is_isolated=suite.sandboxed, network=False, tool_s=tool_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    (tmp_path / "tmp").mkdir()
    return made


def _bash(folder: Path, script: str, *, is_isolated: bool, timeout_s: float = 20.0) -> tuple[int | None, str]:
    sandbox = Sandbox(folder, folder.parent / "tmp", is_isolated)
    return sandbox.run(["/bin/bash", "-c", script], env=ENVIRONMENT, timeout_s=timeout_s)


def _isolation() -> Any:
    return [False, pytest.param(True, marks=pytest.mark.skipif(not isolation_works(), reason="no working bubblewrap"))]


@pytest.mark.parametrize("is_isolated", _isolation(), ids=["folder", "bubblewrap"])
def test_a_command_ends_with_all_that_it_started(folder: Path, is_isolated: bool) -> None:
    begun = time.monotonic()
    script = "echo first; (sleep 60; echo late > late) & sleep 60; true"
    code, output = _bash(folder, script, is_isolated=is_isolated, timeout_s=1)
    assert (code, output) == (None, "first\n")
    # Not held up by what still has its output open.
    assert time.monotonic() - begun < 20
    # The kernel takes a moment to end a namespace.
    while script in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() - begun < 20
        time.sleep(0.05)


@pytest.mark.parametrize("is_isolated", _isolation(), ids=["folder", "bubblewrap"])
def test_endless_output_is_cut(folder: Path, is_isolated: bool) -> None:
    code, output = _bash(folder, "yes", is_isolated=is_isolated)
    assert code != 0
    assert 200_000 < len(output) < 201_000


@pytest.mark.skipif(not isolation_works(), reason="no working bubblewrap")
def test_a_sandbox_has_no_network_and_writes_nowhere_else(folder: Path) -> None:
    outside = [place / "leyline-outside" for place in (folder.parent, Path.home(), Path("/var/tmp"))]
    script = f"echo in > inside; cat inside; touch {shlex.join(map(str, outside))}; exec 3<>/dev/tcp/127.0.0.1/1"
    code, output = _bash(folder, script, is_isolated=True)
    written = [place for place in outside if place.exists()]
    for place in written:
        place.unlink()
    assert written == []
    assert code != 0
    assert output.startswith("in\n")
    # Least of all what solves the tasks.
    for hidden in (Path(debug_gym_scripts.__file__), Path(__file__)):
        assert _bash(folder, f"cat {hidden}", is_isolated=True)[0] != 0
    interfaces = _bash(folder, "cat /proc/net/dev", is_isolated=True)[1]
    assert "lo:" in interfaces
    assert len(interfaces.splitlines()) == 3


def test_data_that_are_not_there_are_told_with_where_they_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(SolveRateError, match=f"{tmp_path}: no mini_nightmare tasks"):
        find_data(tmp_path)


def test_unknown_tasks_are_told_with_the_known_ones() -> None:
    needs_debug_gym()
    with pytest.raises(SolveRateError, match=r"got 'confg', expected some of config, counter"):
        _suite(tasks=["confg"])


def test_the_network_task_is_skipped_with_its_reason_and_the_race_is_repeated(suite: DebugGymTasks) -> None:
    entries = {entry.name: entry for entry in suite.entries}
    assert len(entries) == 10
    assert {name for name, entry in entries.items() if entry.skip} == {"pandas_dataframe"}
    assert {name: entry.repeats for name, entry in entries.items() if entry.repeats > 1} == {"counter": 3}
    assert sum(entry.paper_subset for entry in entries.values()) == 8


def test_an_agent_is_shown_no_output_of_tests_and_submit_ends_it_whatever_they_say(grader: DebugGymEnvironment) -> None:
    task = grader.reset()
    shown = task.system + task.user
    assert "failed" not in shown
    assert "pytest" not in shown
    assert [tool["function"]["name"] for tool in task.tools] == ["bash", "view", "pdb", "edit", "eval", "submit"]
    assert not grader.call("eval", {}).done
    assert not grader.call("no_such_tool", {"a": 1}).done
    assert grader.call("submit", {}).done
    score = grader.score()
    assert (score.score, score.max_score, score.solved, score.tests_changed) == (2, 3, False, False)


# As many tests as the task has.
FAKE = "printf 'def test_a(): pass\\ndef test_b(): pass\\ndef test_c(): pass\\n' > test.py"
NO_ASSERT = "import unittest\\nunittest.TestCase.assertEqual = lambda *a, **k: None\\n"
CHEATS = [
    FAKE,
    "rm test.py",
    f"printf '{NO_ASSERT}' > conftest.py; {FAKE}",
    f"printf 'print(\"collected 3 items\\\\n3 passed\")\\nraise SystemExit\\n' > pytest.py; {FAKE}",
    f"printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; {FAKE}",
    f"printf '{NO_ASSERT}' > sitecustomize.py; {FAKE}",
    "rm test.py; mkdir test.py; touch test.py/inside.py",
]
NAMES = ("test_top_performers", "test_student_averages", "test_edge_cases")
CODE_CHEATS = {
    "assertions": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None",
    "runs": "import _pytest.unittest\n_pytest.unittest.TestCaseFunction.runtest = lambda self: None",
    "report": f"""import os, sys
report = next(word for word in sys.argv if word.startswith("--junitxml=")).partition("=")[2]
cases = "".join(f'<testcase name="{{name}}"/>' for name in {NAMES})
open(report, "w").write(f"<testsuite>{{cases}}</testsuite>")
os._exit(0)""",
}


def test_cheating_scores_nothing(grader: DebugGymEnvironment) -> None:
    grader.reset()
    for cheat in CHEATS:
        grader.call("bash", {"command": f"git checkout -q . && git clean -fdqx && {cheat}"})
        score = grader.score()
        got = (score.score, score.max_score, score.solved, score.tests_changed)
        assert (cheat, got) == (cheat, (0, 3, False, True))


def test_code_that_bends_the_tests_as_it_is_imported_scores_nothing(grader: DebugGymEnvironment) -> None:
    grader.reset()
    for name, code in CODE_CHEATS.items():
        before = "git checkout -q . && mv grader_code.py rest.py"
        grader.call("bash", {"command": f"{before} && cat - rest.py > grader_code.py <<'END'\n{code}\nEND"})
        score = grader.score()
        assert (name, score.score, score.solved, score.tests_changed) == (name, 0, False, False)


def test_code_that_never_ends_is_the_agents_mistake_and_no_error(suite: DebugGymTasks) -> None:
    environment = _purr(suite, tool_s=3)
    try:
        environment.reset()
        environment.call("edit", {"path": "purr_code.py", "start": 1, "end": 1, "new_code": "while True: pass"})
        observation = environment.call("eval", {})
        assert "timed out after 3 seconds" in observation.text
        assert not observation.done
        # Nor is a debugger that never says anything.
        begun = time.monotonic()
        assert "timeout after 3" in environment.call("pdb", {"command": "c", "entrypoint": "sleep 600"}).text
        assert time.monotonic() - begun < 30
        score = environment.score()
        assert (score.score, score.solved) == (0, False)
    finally:
        environment.close()


def test_where_no_command_can_run_an_episode_is_an_error(suite: DebugGymTasks) -> None:
    environment = _purr(suite, tool_s=0.01)
    try:
        with pytest.raises(EnvironmentFailedError, match="pytest does not run in the agent's folder"):
            environment.reset()
    finally:
        environment.close()


def test_a_fix_without_a_last_eval_counts(suite: DebugGymTasks, grader: DebugGymEnvironment) -> None:
    grader.reset()
    for name, arguments in suite.script("solver", "grader", grader).solution:
        if name == "edit":
            grader.call(name, arguments)
    # Wherever it is: no part of a module's name makes it a test.
    grader.call("bash", {"command": "mv grader_code.py latest.py; echo 'from latest import *' > grader_code.py"})
    score = grader.score()
    assert (score.score, score.solved) == (3, True)
    assert score.said["resolved"] is False


def test_a_fix_of_the_race_that_works_now_and_then_is_none(suite: DebugGymTasks) -> None:
    environment = suite.make("counter", 0)
    try:
        environment.reset()
        environment.call("edit", dict(suite.script("solver", "counter", environment).solution)["edit"])
        # Right the first time: one run alone would say that all is well.
        code = "import random, pathlib, tempfile\nseen = pathlib.Path(tempfile.gettempdir(), 'seen')\n"
        code += "if seen.exists():\n    raise ImportError\nseen.touch()"
        environment.call("edit", {"path": "counter_code.py", "start": 1, "end": 1, "new_code": code})
        assert "3 passed" in environment.call("eval", {}).text
        environment.call("bash", {"command": "rm ${TMPDIR}/seen"})
        assert not environment.score().solved
    finally:
        environment.close()


def test_a_process_has_no_secrets_and_its_death_is_an_error_that_leaves_nothing(
    suite: DebugGymTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-secret")
    environment = suite.make("grader", 0)
    try:
        environment.reset()
        assert "sk-a-secret" not in environment.call("bash", {"command": "env; cat /proc/$PPID/environ"}).text
        scratch = environment._worker._scratch
        assert scratch.is_dir()
        environment._worker._process.kill()
        with pytest.raises(EnvironmentFailedError, match="has ended"):
            environment.call("eval", {})
    finally:
        environment.close()
    assert not scratch.exists()


def test_a_process_whose_parent_was_killed_leaves_nothing(suite: DebugGymTasks) -> None:
    worker = GymWorker()
    assert worker._process.stdin is not None
    assert worker._process.stdout is not None
    # It finds nobody to answer.
    worker._process.stdout.close()
    worker._process.stdin.write('{"do": "nothing"}\n')
    worker._process.stdin.close()
    worker._process.wait(60)
    assert not worker._scratch.exists()


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("agent", "executions"),
    [("langgraph", ["none", "reprefill", "splice"]), ("debug_gym", ["splice"])],
    ids=["langgraph", "debug_gym"],
)
def test_both_agents_act_in_the_executions(
    agent: str, executions: list[str], cpu_server: RunningServer, tmp_path: Path
) -> None:
    needs_debug_gym()
    suite = {"type": "mini_nightmare", "tasks": ["purr", "pandas_dataframe"]}
    config = a_config(suite=suite, agent=agent, executions=executions, jobs=2)
    assert play(config, tmp_path, cpu_server.url).num_errors == 0
    rows = {row.execution: row for row in rows_of(tmp_path).values() if row.task == "purr"}
    assert {how: (row.status, row.turns) for how, row in rows.items()} == dict.fromkeys(executions, ("solved", 6))
    assert all(row.agent == agent and not row.fallbacks for row in rows.values())
    assert rows["splice"].splices == 3
    assert rows["splice"].moved_tokens > 0
    if agent == "langgraph":
        assert rows["splice"].cached_tokens > rows["reprefill"].cached_tokens
        assert rows["none"].prompt_tokens > rows["splice"].prompt_tokens
    skipped = [row for row in rows_of(tmp_path).values() if row.status == "skipped"]
    assert len(skipped) == len(executions)
    assert all(row.reason and "network: true" in row.reason for row in skipped)


def test_a_proxy_logs_as_before_once_the_agents_are_done() -> None:
    logger = logging.getLogger("leyline_agent.proxy")
    before = logger.level
    with GymAgents("http://127.0.0.1:9", [], "", lambda: False):
        assert logger.level == logging.ERROR
    assert logger.level == before


@pytest.mark.sglang
def test_a_model_that_overwrites_the_tests_scores_nothing(cpu_server: RunningServer, tmp_path: Path) -> None:
    needs_debug_gym()
    suite = {"type": "mini_nightmare", "tasks": ["grader"]}
    config = a_config(suite=suite, executions=["none"], agent="debug_gym", model={"scripted": "cheating"})
    play(config, tmp_path, cpu_server.url)
    (row,) = rows_of(tmp_path).values()
    assert (row.status, row.score, row.max_score) == ("failed", 0, 3)


@pytest.mark.sglang
def test_an_erring_server_is_an_error_of_debug_gyms_agent_too(cpu_server: RunningServer, tmp_path: Path) -> None:
    needs_debug_gym()
    suite = {"type": "mini_nightmare", "tasks": ["grader"]}
    config = a_config(suite=suite, executions=["reprefill"], agent="debug_gym", model={"scripted": "erring"})
    assert play(config, tmp_path, cpu_server.url).num_errors == 1
    (row,) = rows_of(tmp_path).values()
    assert row.status == "error"
    assert row.reason is not None
    assert "the script has the model fail" in row.reason
