"""The suite mini_nightmare: debug-gym's tasks, each episode in a debug-gym process of its own.

debug-gym needs Python 3.12 and packages of its own, so it runs in `.venv-debug-gym` (`evals/debug_gym_env/worker.py`)
and is spoken to in lines of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.debug_gym_env.sandbox import isolation_works
from evals.solve_rate.config import MiniNightmare
from evals.solve_rate.debug_gym_scripts import scripted_calls
from evals.solve_rate.environment import EnvironmentFailedError, ScriptedCalls, TaskEntry
from evals.solve_rate.rows import SolveRateError, SuiteName

_ROOT = Path(__file__).parents[2]
_WORKER = _ROOT / "evals" / "debug_gym_env" / "worker.py"
GYM_PYTHON = Path(os.environ.get("LEYLINE_DEBUG_GYM_PYTHON", _ROOT / ".venv-debug-gym" / "bin" / "python"))
DATA_VARIABLE = "LEYLINE_MINI_NIGHTMARE"

NETWORK_TASK = "pandas_dataframe"
RACE_TASK = "counter"
TASKS = (
    "config",
    RACE_TASK,
    "grader",
    NETWORK_TASK,
    "patcher",
    "purr",
    "scientific_calculator",
    "shopping_cart",
    "sum_tree",
    "tomorrow_date",
)
# The paper counts eight and we know of no list of them; these are the ones whose score depends on neither chance nor a
# network.
PAPER_TASKS = tuple(task for task in TASKS if task not in (NETWORK_TASK, RACE_TASK))

_SCORING_RUNS = {RACE_TASK: 5}
"""All must pass: a wrong lock does now and then."""
_START_S = 120.0

SYSTEM = (
    "You are a debugging agent that fixes Python programs. Look at the code, find the root cause, edit the code, and "
    "run the tests with `eval`. You cannot change the tests. Call one tool at a time, and `submit` when you are done."
)


@dataclass(frozen=True, slots=True)
class GymTask:
    """How an episode begins: no output of tests is in it."""

    system: str
    user: str
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GymObservation:
    """What a tool said."""

    text: str
    done: bool


@dataclass(frozen=True, slots=True)
class GymScore:
    """What pristine tests say."""

    score: int
    max_score: int
    solved: bool
    tests_changed: bool
    """Whether the agent's workspace had other tests in the end."""
    said: dict[str, Any]
    """debug-gym's own last verdict, which an agent can forge."""


class DebugGymTasks:
    """The tasks that a config selects.

    Raises:
        SolveRateError: debug-gym's environment or the tasks' data are not there, or a task is unknown.
    """

    name: SuiteName = "mini_nightmare"

    def __init__(self, config: MiniNightmare) -> None:
        if not GYM_PYTHON.exists():
            raise SolveRateError(
                f"debug-gym's environment is missing: no {GYM_PYTHON}; `make debug-gym` creates it, with a Python 3.12"
            )
        self._config = config
        names = (
            {"all": TASKS, "paper": PAPER_TASKS}.get(config.tasks) if isinstance(config.tasks, str) else config.tasks
        )
        assert names is not None
        if unknown := [name for name in (*names, *config.repeats) if name not in TASKS]:
            raise SolveRateError(f"suite.tasks: got {unknown[0]!r}, expected some of {', '.join(TASKS)}")
        self.entries: Sequence[TaskEntry] = tuple(self._entry(name) for name in names)
        if config.sandbox == "require" and not isolation_works():
            raise SolveRateError(
                "suite.sandbox is `require`, and bubblewrap is not installed or may not make namespaces here; install "
                "bubblewrap, or say `auto` to run commands in a folder with a time limit alone"
            )
        self.sandboxed = config.sandbox != "off" and isolation_works()
        self.folder = find_data(config.folder)

    def make(self, task: str, seed: int) -> DebugGymEnvironment:
        """Return a debug-gym episode; the seed is the model's alone."""
        return DebugGymEnvironment(
            task,
            folder=self.folder,
            is_isolated=self.sandboxed,
            network=task == NETWORK_TASK,
            tool_s=self._config.tool_s,
        )

    def script(self, script: str, task: str, environment: Any) -> ScriptedCalls:
        """Return the calls of scripted models, which are written down for each task."""
        return scripted_calls(task)

    def _entry(self, name: str) -> TaskEntry:
        skip = None
        if name == NETWORK_TASK and not self._config.network:
            skip = "downloads a file when it runs; say `network: true` in the suite where there is a network"
        return TaskEntry(name, name in PAPER_TASKS, self._config.repeats.get(name, 1), skip)


class DebugGymEnvironment:
    """One episode in one process. Used by one thread at a time; `close` may come from another."""

    def __init__(self, task: str, *, folder: Path, is_isolated: bool, network: bool, tool_s: float) -> None:
        self._task = task
        self._settings = {"folder": str(folder), "is_isolated": is_isolated, "network": network, "tool_s": tool_s}
        self._tool_s = tool_s
        self._num_calls = 0
        self._worker = GymWorker()

    def reset(self) -> GymTask:
        """Begin the episode."""
        begun = self._worker.ask("reset", timeout_s=_START_S + 3 * self._tool_s, task=self._task, **self._settings)
        return GymTask(SYSTEM, begun["instructions"], begun["tools"])

    def call(self, name: str, arguments: dict[str, Any]) -> GymObservation:
        """Carry out a tool call in debug-gym."""
        self._num_calls += 1
        # A pdb command asks pdb several things, each with the time limit.
        said = self._worker.ask(
            "call", timeout_s=60 + 10 * self._tool_s, id=f"call_{self._num_calls}", name=name, arguments=arguments
        )
        return GymObservation(said["text"], said["done"])

    def act(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Have debug-gym's own agent act."""
        acted: dict[str, Any] = self._worker.ask("act", timeout_s=timeout_s, **request)
        return acted

    def score(self) -> GymScore:
        """Run the pristine tests."""
        runs = _SCORING_RUNS.get(self._task, 1)
        return GymScore(**self._worker.ask("score", timeout_s=60 + 3 * self._tool_s * runs, runs=runs))

    def close(self) -> None:
        """End the process and remove its files."""
        self._worker.close()


class GymWorker:
    """A worker process; it and what it has started are gone after `close`."""

    def __init__(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="leyline-gym-"))
        self._log = self._scratch / "worker.log"
        # Nothing of this process's own environment: commands of the agent see it, and keys are in there.
        environment = {
            "PATH": os.pathsep.join([str(GYM_PYTHON.parent), os.environ.get("PATH", os.defpath)]),
            "HOME": str(self._scratch),
            "TMPDIR": str(self._scratch),
            "LC_ALL": "C.UTF-8",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "NO_PROXY": "127.0.0.1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(GYM_PYTHON), str(_WORKER), str(self._scratch)],
                cwd=self._scratch,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def ask(self, do: str, *, timeout_s: float, **request: Any) -> Any:
        """Return a request's result.

        Raises:
            EnvironmentFailedError: there was none in time, or the worker has ended or failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Its death ends the reading.
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError) as error:
            raise EnvironmentFailedError(f"debug-gym's process has ended before {do!r}: {self._tail()}") from error
        finally:
            timer.cancel()
        if not line:
            raise EnvironmentFailedError(
                f"debug-gym's process gave no answer to {do!r} within {timeout_s:.0f} s, or has ended: {self._tail()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise EnvironmentFailedError(f"debug-gym failed in {do!r}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Let the worker clean up, then end it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return " / ".join(lines[-5:]) or "it said nothing"


def find_data(folder: Path | None) -> Path:
    """Return where the tasks' files are; where they are not, have debug-gym download them.

    Raises:
        SolveRateError: they are not where they were said to be, or cannot be downloaded.
    """
    said = folder or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if said is not None:
        if not _has_tasks(said):
            raise SolveRateError(
                f"{said}: no mini_nightmare tasks, expected folders such as {said / TASKS[0]} with a test.py in each"
            )
        return said.resolve()
    cache = Path(os.environ.get("LEYLINE_CACHE", Path.home() / ".cache" / "leyline"))
    for known in (_ROOT.parent / "shared" / "data" / "mini_nightmare", cache / "mini_nightmare"):
        if _has_tasks(known):
            return known.resolve()
    worker = GymWorker()
    try:
        worker.ask("download", timeout_s=300, folder=str(cache / "mini_nightmare"))
    except EnvironmentFailedError as error:
        raise SolveRateError(
            f"the mini_nightmare tasks are not here and debug-gym cannot download them ({error}); get them elsewhere "
            f"and say where they are in `suite.folder` or {DATA_VARIABLE}"
        ) from error
    finally:
        worker.close()
    return cache / "mini_nightmare"


def _has_tasks(folder: Path) -> bool:
    return all((folder / task / "test.py").is_file() for task in TASKS)
