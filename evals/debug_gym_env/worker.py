"""One debug-gym episode in a process of its own, in the environment that `make debug-gym` creates.

Reads a JSON object a line from standard input and answers each with one on standard output; ends when the input does.
It is run by its path and imports nothing of this project but what stands beside it. The requests are the methods of
`_Worker`. An answer is `{"result": …}` or `{"error": …}`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import stand_ins  # noqa: F401 - before debug_gym
from sandbox import Sandbox
from scoring import num_passed, tests_of

import debug_gym.gym.terminals.shell_session as shell_session  # isort: skip
import debug_gym.gym.tools  # noqa: F401 - registers them  # isort: skip
import debug_gym.llms.openai as gym_openai  # isort: skip
from debug_gym.agents.froggy_agent import FroggyAgent  # isort: skip
from debug_gym.gym.envs.mini_nightmare import MiniNightmareEnv  # isort: skip
from debug_gym.gym.terminals.local import LocalTerminal  # isort: skip
from debug_gym.gym.tools.tool import ToolCall  # isort: skip
from debug_gym.gym.tools.toolbox import Toolbox  # isort: skip
from debug_gym.llms.base import LLMConfig, retry_on_exception  # isort: skip
from debug_gym.logger import DebugGymLogger  # isort: skip
from tenacity import stop_after_attempt  # isort: skip

TOOLS = ("bash", "view", "pdb", "edit", "eval", "submit")
"""All but `listdir` and `grep`, which install packages on the host."""
_SCORING_TOOLS = 2
"""Commands' time limits that one run of the tests may take."""
_PDB_STARTS = 3
"""How often a pdb that ends at once is started."""


class _Worker:
    def __init__(self, scratch: Path) -> None:
        self._env: Any = None
        self._codebase = Path()
        self.scratch = scratch
        self._is_isolated = self._network = False
        self._tool_s = 30.0

    def download(self, folder: str) -> None:
        """Have debug-gym fetch the tasks into a folder, if they are not there."""
        MiniNightmareEnv.DATA_PATH = Path(folder)
        MiniNightmareEnv.load_dataset(build_image=False)

    def reset(self, folder: str, task: str, is_isolated: bool, network: bool, tool_s: float) -> dict[str, Any]:
        """Begin the episode: return instructions, and tools as debug-gym's own client describes them."""
        MiniNightmareEnv.DATA_PATH = Path(folder)
        self._is_isolated, self._network, self._tool_s = is_isolated, network, tool_s
        # Else a debugger that says nothing is waited for for five minutes, and one that ends is started thirty times.
        shell_session.DEFAULT_TIMEOUT = tool_s
        shell_session.ShellSession.start.retry.stop = stop_after_attempt(_PDB_STARTS)
        # By patching: a workspace asks for this very class, and gives any other one no folder of its own.
        LocalTerminal.run = functools.partialmethod(_run, self)
        LocalTerminal.new_shell_session = functools.partialmethod(_new_session, self)
        LocalTerminal.copy_content = lambda terminal, source, target=None: _copy_files(
            Path(source), Path(target or terminal.working_dir)
        )
        data = MiniNightmareEnv.load_dataset(problems=[task], build_image=False)[task]
        self._codebase = Path(data["codebase"])
        logger = DebugGymLogger("episode", level=logging.ERROR)
        self._env = MiniNightmareEnv(
            task_data=data, terminal=LocalTerminal(logger=logger), logger=logger, run_timeout=max(1, int(tool_s))
        )
        # debug-gym reads it from pytest's output, and fails where there is none: code that never ends is the agent's
        # mistake, and no error of ours.
        num_tests = len(tests_of(self._codebase / "test.py"))
        self._env.calculate_max_score = lambda output: num_tests
        for name in TOOLS:
            self._env.add_tool(Toolbox.get_tool(name))
        info = self._env.reset()
        # Where no command can run, an agent would fail through no fault of its own.
        if not re.search(r"\d (passed|failed|error)", output := self._env.last_eval.output):
            raise RuntimeError(f"pytest does not run in the agent's folder: {output[-300:]}")
        # What an agent that does not reset asks for; debug-gym 1.3.0 calls it `infos` elsewhere.
        self._env.info = info
        return {
            "instructions": info.instructions,
            "tools": _Client("any", LLMConfig(model="any", context_limit=1)).define_tools(info.tools),
            "said": {"score": info.score, "max_score": info.max_score},
        }

    def call(self, id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one tool call."""
        info = self._env.step(ToolCall(id=id, name=name, arguments=arguments))
        # debug-gym 1.3.0 goes on after `submit` unless all tests pass.
        return {"text": info.step_observation.observation, "done": bool(info.terminated or name == "submit")}

    def act(
        self,
        system: str,
        endpoint: str,
        api_key: str,
        model: str,
        headers: dict[str, str],
        settings: dict[str, Any],
        max_turns: int,
        episode_s: float,
    ) -> dict[str, Any]:
        """Have debug-gym's own agent act until the episode ends; return its messages and what ended it."""
        config = LLMConfig(
            model=model,
            context_limit=10_000,
            api_key=api_key,
            endpoint=endpoint,
            # Any tag: without one, refused requests are sent again a hundred times.
            tags=["openai"],
            generate_kwargs={**settings, "extra_headers": headers},
        )
        logger = DebugGymLogger("agent", level=logging.ERROR)
        # A template, in which the braces of Jinja would be read.
        agent_args = {"system_prompt": "{% raw %}" + system + "{% endraw %}", "max_steps": max_turns}
        agent = _Agent(agent_args=agent_args, llm=_Client(model, config, logger=logger), logger=logger)
        agent.deadline = time.monotonic() + episode_s
        error = None
        try:
            agent.run(self._env, reset_env=False)
        except Exception as failure:
            cause = getattr(failure, "last_attempt", None)
            error = str(cause.exception() if cause is not None else failure)
        messages = agent.build_prompt(self._env.infos)
        return {"messages": messages, "ended": agent.ended, "error": error}

    def score(self, runs: int) -> dict[str, Any]:
        """Run the pristine tests on what the agent made of the code, `runs` times or until one fails.

        What debug-gym itself says is not asked: the agent can overwrite the tests and print `5 passed`.
        """
        workspace = Path(self._env.workspace.working_dir)
        # What the agent has made unreadable must not keep it from its score.
        subprocess.run(["chmod", "-R", "u+rwX", str(workspace)], check=False)
        theirs, pristine = workspace / "test.py", self._codebase / "test.py"
        tests_changed = not theirs.is_file() or theirs.read_bytes() != pristine.read_bytes()
        max_score = score = len(tests_of(pristine))
        # Another /tmp than the agent's, which it may have filled with what Python or pytest look for at home.
        with tempfile.TemporaryDirectory(prefix="score-tmp-", dir=self.scratch) as temporary:
            for _ in range(runs):
                score = min(score, self._passed(workspace, Path(temporary)))
                if score < max_score:
                    break
        solved = score >= max_score
        said = self._env.infos
        return {
            # Some tests pass on the code as it was; whoever has changed them gets nothing for those.
            "score": 0 if tests_changed and not solved else score,
            "max_score": max_score,
            "solved": solved,
            "tests_changed": tests_changed,
            "said": {"score": said.score, "max_score": said.max_score, "resolved": bool(said.resolved)},
        }

    def _passed(self, workspace: Path, temporary: Path) -> int:
        """Return how many pristine tests pass, on a copy."""
        with tempfile.TemporaryDirectory(prefix="score-", dir=self.scratch) as name:
            folder = Path(name)
            _copy_files(self._codebase, folder)
            for file in workspace.rglob("*"):
                if file.is_file() and not file.is_symlink() and _is_solution(file.relative_to(workspace)):
                    target = folder / file.relative_to(workspace)
                    # A folder may have the name of a file of the task, which stays.
                    with suppress(FileExistsError, NotADirectoryError):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, target)
            sandbox = Sandbox(folder, temporary, self._is_isolated, self._network)
            passed: int = num_passed(sandbox, _environment(sandbox), timeout_s=_SCORING_TOOLS * self._tool_s)
            return passed

    def close(self) -> None:
        """End the episode."""
        if self._env is not None:
            self._env.close()

    def sandbox(self, folder: Path) -> Sandbox:
        temporary = self.scratch / "tmp"
        temporary.mkdir(exist_ok=True)
        return Sandbox(folder, temporary, self._is_isolated, self._network)

    @property
    def tool_s(self) -> float:
        return self._tool_s


class _Client(gym_openai.OpenAILLM):  # type: ignore[misc]
    """debug-gym's client, which counts tokens without downloading an encoding."""

    def tokenize(self, messages: list[dict[str, Any]]) -> list[list[str]]:
        return [["token"] * (len(str(message.get("content"))) // 4 + 1) for message in messages]


# Else a server that has died is asked for an hour.
gym_openai.retry_on_exception = functools.partial(retry_on_exception, max_attempts=3, max_wait=2)


class _Agent(FroggyAgent):  # type: ignore[misc]
    """debug-gym's agent, which `submit` and the time limit end too."""

    name = "timed_froggy_agent"
    deadline = float("inf")
    ended = "turns"

    def should_stop(self, step: int, info: Any) -> tuple[bool, str | None]:
        # The steps are counted from 1, and the next one's number is asked for.
        stops: list[tuple[str, bool]] = [
            ("done", bool(info.terminated or info.action_tool_call.name == "submit")),
            ("turns", step > self.args.max_steps),
            ("time", time.monotonic() > self.deadline),
        ]
        self.ended = next((reason for reason, holds in stops if holds), "turns")
        return any(holds for _, holds in stops), self.ended


def _run(
    terminal: Any,
    worker: _Worker,
    entrypoint: str | list[str],
    timeout: int | None = None,
    raises: bool = False,
    strip_output: bool = True,
) -> tuple[bool, str]:
    """Stand for `LocalTerminal.run`, which cannot end what a command has started."""
    sandbox = worker.sandbox(Path(terminal.working_dir))
    seconds = worker.tool_s if timeout is None else min(timeout, worker.tool_s)
    words = terminal.prepare_command(entrypoint)
    code, output = sandbox.run(words, env=_environment(sandbox), timeout_s=seconds)
    if code is None:
        partial = f"\nPartial output:\n{output.strip()}" if output.strip() else ""
        return False, f"Command timed out after {seconds:g} seconds{partial}"
    if raises and code != 0:
        raise ValueError(f"Failed to run command: {entrypoint}: {output}")
    return code == 0, output.strip("\r\n") if strip_output else output


def _new_session(terminal: Any, worker: _Worker) -> Any:
    """Stand for `LocalTerminal.new_shell_session`, for pdb."""
    sandbox = worker.sandbox(Path(terminal.working_dir))
    session = shell_session.ShellSession(
        shell_command=shlex.join([*sandbox.prefix(), *shlex.split(terminal.default_shell_command)]),
        working_dir=terminal.working_dir,
        env_vars=_environment(sandbox),
        logger=terminal.logger,
    )
    terminal.sessions.append(session)
    return session


def _environment(sandbox: Sandbox) -> dict[str, str]:
    """Return the environment of commands: this process's own, which has no secrets."""
    temporary = "/tmp" if sandbox.is_isolated else str(sandbox.temporary)
    return {**os.environ, "HOME": temporary, "TMPDIR": temporary, "PYTHONDONTWRITEBYTECODE": "1"}


def _copy_files(source: Path, target: Path) -> None:
    """Copy a task's files, which lie in one folder, without their permissions: the source may be read-only."""
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, target / file.name)


def _is_solution(file: Path) -> bool:
    """Tell whether a file is the agent's to change: code that is no test; what tests read is no code."""
    is_hidden = any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    return file.suffix == ".py" and file.name not in ("test.py", "conftest.py") and not is_hidden


def main() -> None:
    """Answer requests until the input ends."""
    # What debug-gym and its libraries print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Named, not looked up: where TMPDIR is missing, that would be everybody's /tmp, which is removed below.
    worker = _Worker(Path(sys.argv[1]))
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"result": getattr(worker, request.pop("do"))(**request)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        # Whoever asked may have been killed.
        worker.close()
        shutil.rmtree(worker.scratch, ignore_errors=True)


main()
