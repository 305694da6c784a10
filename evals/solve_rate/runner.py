"""All episodes of a run: which are still to be done, several at a time, within a budget, each row on disk at once.

A run can be killed at any moment: what has a row is done, what has none, or an error's, is done again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from evals.micro.result_rows import about
from evals.replay.errors import ReplayError
from evals.replay.server_facts import ServerFacts, read_facts
from evals.solve_rate.arms import Arm, make_arms
from evals.solve_rate.config import Config, load_config
from evals.solve_rate.debug_gym_agent import GymAgents
from evals.solve_rate.debug_gym_tasks import DebugGymTasks
from evals.solve_rate.environment import Suite
from evals.solve_rate.episode import Plan, Run, api_key, run_episode
from evals.solve_rate.langgraph_agent import StoppedError
from evals.solve_rate.mini_task_suite import MiniTaskSuite
from evals.solve_rate.rows import ROWS_FILE, EpisodeKey, Row, RowsFile, SolveRateError, read_every_row, read_rows
from evals.solve_rate.transcripts import TRANSCRIPTS

CONFIG_FILE = "config.yaml"
ABOUT_FILE = "run.json"

_POLL_S = 0.5


class Watcher(Protocol):
    """Is told what happens; all calls come from one thread."""

    def begin(self, plans: Sequence[Plan], done: Sequence[Row], *, is_sandboxed: bool | None) -> None:
        """Take all episodes of the run, and the rows that there are."""

    def tick(self, running: Sequence[Plan], *, tokens: int, seconds: float) -> None:
        """Show what runs; called twice a second."""

    def row(self, row: Row) -> None:
        """Take the row of an episode that has ended."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How far an invocation came."""

    num_left: int
    """Episodes without a row."""
    num_errors: int
    stopped_by: str | None
    """What ended it before all episodes were done."""


class Stop:
    """Set once, by a signal or by the clock."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self) -> bool:
        """Tell whether it is set."""
        return self.reason is not None

    def set(self, reason: str) -> None:
        """Set it; the first reason stays."""
        self.reason = self.reason or reason


def make_suite(config: Config) -> Suite:
    """Return the suite of a config.

    Raises:
        SolveRateError: what it needs is not there.
    """
    return DebugGymTasks(config.suite) if config.suite.type == "mini_nightmare" else MiniTaskSuite(config.suite)


def plan_run(config: Config, suite: Suite, arms: Sequence[Arm]) -> list[Plan]:
    """Return the episodes, all arms of a task and seed one after the other, so that a part of a run is balanced."""
    return [
        Plan(entry, arm, seed, repeat)
        for seed in config.seeds
        for entry in suite.entries
        for repeat in range(entry.repeats if entry.skip is None else 1)
        for arm in arms
    ]


def run(config: Config, folder: Path, url: str, watcher: Watcher, stop: Stop, *, fresh: bool = False) -> Finished:
    """Do what is left of a run; with `fresh` all of it, and what the folder has of a run is removed.

    Raises:
        SolveRateError: the folder has another run, the server or the suite cannot be used, or a policy is wrong.
    """
    suite = make_suite(config)
    arms = make_arms(config)
    plans = plan_run(config, suite, arms)
    facts = _server_facts(config, url)
    # Before the folder is written to: a run that cannot begin leaves nothing, and removes nothing.
    recorded = _recorded(config)
    api_key(config)
    open_folder(config, folder, fresh=fresh)
    machine = about(None, "leyline-eval run")
    shared = Run(config, suite, folder, url, config.model.name or facts.model, stop, machine["git"], recorded)
    with RowsFile(folder) as file:
        if fresh:
            _clear(folder, file)
        every_row = list(read_every_row(folder))
        rows = {row.key: row for row in every_row}
        _note_invocation(shared, arms, facts, machine, is_begun=bool(rows))
        _write_whole(folder / CONFIG_FILE, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        known = {plan.key(suite) for plan in plans}
        before = [row for row in rows.values() if row.key in known]
        finished = {row.key for row in before if row.status != "error"}
        left = [plan for plan in plans if plan.key(suite) not in finished]
        watcher.begin(plans, before, is_sandboxed=suite.sandboxed)
        with _gym_agents(config, url, arms, stop) as gym_agents:
            tokens = sum(map(tokens_of, every_row))
            episodes = _Episodes(replace(shared, gym_agents=gym_agents), stop, watcher, file, tokens)
            episodes.play(left)
    errors = [row for row in read_rows(folder) if row.key in known and row.status == "error"]
    num_left = len(left) - episodes.num_done
    return Finished(num_left, len(errors), (stop.reason or episodes.spent) if num_left else None)


class _Episodes:
    """Several episodes at a time, until all are done or the budget is spent."""

    def __init__(self, run: Run, stop: Stop, watcher: Watcher, file: RowsFile, tokens: int) -> None:
        self._run, self._stop, self._watcher, self._file = run, stop, watcher, file
        self._limits = run.config.limits
        self._tokens = tokens
        self._begun = time.monotonic()
        self.num_done = 0
        self.spent: str | None = None
        """Why no episode starts any more, where tokens are the cause."""

    def play(self, plans: Sequence[Plan]) -> None:
        waiting = list(reversed(plans))
        running: dict[Future[Row], Plan] = {}
        with ThreadPoolExecutor(self._run.config.jobs, thread_name_prefix="episode") as threads:
            try:
                while running or (waiting and self._may_start()):
                    while waiting and len(running) < self._run.config.jobs and self._may_start():
                        plan = waiting.pop()
                        running[threads.submit(run_episode, plan, self._run)] = plan
                    ended, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                    for future in ended:
                        del running[future]
                        self._take(future)
                    seconds = time.monotonic() - self._begun
                    self._watcher.tick(list(running.values()), tokens=self._tokens, seconds=seconds)
                    if self._limits.total_s is not None and seconds > self._limits.total_s:
                        self._stop.set(f"total_s: {self._limits.total_s:g} s are over")
            except BaseException:
                # Else the threads would play on to the end of their episodes.
                self._stop.set("interrupted")
                raise

    def _may_start(self) -> bool:
        budget = self._limits.total_tokens
        if budget is not None and self._tokens >= budget:
            # The stop is not set: what runs may end.
            self.spent = f"total_tokens: {self._tokens:,} of {budget:,} are spent"
        return self.spent is None and not self._stop()

    def _take(self, future: Future[Row]) -> None:
        try:
            row = future.result()
        except StoppedError:
            return
        self._file.append(row)
        self.num_done += 1
        self._tokens += tokens_of(row)
        self._watcher.row(row)
        if row.status == "error" and not _answers(self._run):
            # Else all that is left would be errors within seconds.
            self._stop.set(f"the server at {self._run.url} answers no more")


def tokens_of(row: Row) -> int:
    """Return what a row counts for in the budget."""
    return row.prompt_tokens + row.completion_tokens


def open_folder(config: Config, folder: Path, *, fresh: bool = False) -> None:
    """Make the folder of a run, or see whether what is in there can be gone on with, or with `fresh` be removed.

    Raises:
        SolveRateError: it is another run's, or no run's, or cannot be made.
    """
    saved = folder / CONFIG_FILE
    if saved.is_file():
        earlier = load_config(saved)
        if not fresh and (different := list(_differences(earlier.identity(), config.identity()))):
            raise SolveRateError(
                f"{folder}: has a run of another config, so it cannot be gone on with; different are "
                f"{', '.join(different)}. Give another --out, or --fresh to remove it"
            )
    elif (folder / ROWS_FILE).exists() and (folder / ROWS_FILE).stat().st_size:
        raise SolveRateError(f"{folder}: has {ROWS_FILE} and no {CONFIG_FILE}; give another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SolveRateError(f"{folder}: no folder can be made there ({error.strerror}); give another --out") from error


def _clear(folder: Path, file: RowsFile) -> None:
    """Remove what a run has written, and nothing else."""
    file.clear()
    (folder / ABOUT_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / TRANSCRIPTS, ignore_errors=True)


def _differences(earlier: Any, now: Any, key: str = "") -> Iterator[str]:
    if isinstance(earlier, dict) and isinstance(now, dict):
        for name in sorted({*earlier, *now}):
            yield from _differences(earlier.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif earlier != now:
        yield f"{key} ({earlier!r} there, {now!r} here)"


def _note_invocation(
    run: Run, arms: Sequence[Arm], facts: ServerFacts, machine: dict[str, Any], *, is_begun: bool
) -> None:
    """Say on what the rows that follow are made; a resumed run has several such notes.

    Raises:
        SolveRateError: the run was begun with another model, or a policy has been changed since.
    """
    file = run.folder / ABOUT_FILE
    notes = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    policies = {arm.name: arm.policy.model_dump(mode="json", exclude_defaults=True) for arm in arms if arm.policy}
    what = {"model": run.model, "policies": policies}
    if is_begun and notes and (different := list(_differences(notes[0], {**notes[0], **what}))):
        raise SolveRateError(
            f"{run.folder}: was begun otherwise, so it cannot be gone on with; different are {', '.join(different)}. "
            "Give another --out, or --fresh to remove it"
        )
    server = {"model": facts.model, "model_path": facts.model_path, "version": facts.version}
    notes.append(
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **what,
            "sandboxed": run.suite.sandboxed,
            "jobs": run.config.jobs,
            "server": server,
            "machine": machine,
        }
    )
    _write_whole(file, json.dumps(notes, indent=2) + "\n")


def _write_whole(file: Path, text: str) -> None:
    unfinished = file.with_name(file.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def _server_facts(config: Config, url: str) -> ServerFacts:
    headers = {"authorization": f"Bearer {api_key(config)}"}
    with httpx.Client(base_url=url, timeout=60.0, headers=headers, trust_env=False) as client:
        try:
            return read_facts(client)
        except ReplayError as error:
            raise SolveRateError(str(error)) from error


def _answers(run: Run) -> bool:
    headers = {"authorization": f"Bearer {api_key(run.config)}"}
    try:
        return httpx.get(f"{run.url}/v1/models", headers=headers, timeout=60.0, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _recorded(config: Config) -> dict[EpisodeKey, Path]:
    """Return the transcripts of the run that is given again, if one is."""
    folder = config.model.recorded
    if folder is None:
        return {}
    rows: Iterable[Row] = read_rows(folder)
    return {row.key: folder / row.transcript for row in rows if row.transcript is not None}


@contextmanager
def _gym_agents(config: Config, url: str, arms: Sequence[Arm], stop: Stop) -> Iterator[GymAgents | None]:
    if config.agent != "debug_gym":
        yield None
        return
    with GymAgents(url, arms, api_key(config), stop) as agents:
        yield agents
