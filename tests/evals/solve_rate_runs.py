"""Runs of the solve-rate harness, as its tests make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evals.solve_rate.config import Config, parse_config
from evals.solve_rate.debug_gym_tasks import GYM_PYTHON, find_data
from evals.solve_rate.episode import Plan
from evals.solve_rate.rows import EpisodeKey, Row, SolveRateError, read_rows
from evals.solve_rate.runner import Finished, Stop, run


class Quiet:
    """Remembers what a run tells."""

    def __init__(self) -> None:
        self.planned: list[Plan] = []
        self.before: list[Row] = []
        self.rows: list[Row] = []

    def begin(self, plans: Sequence[Plan], done: Sequence[Row], *, is_sandboxed: bool | None) -> None:
        self.planned, self.before = list(plans), list(done)

    def tick(self, running: Sequence[Plan], *, tokens: int, seconds: float) -> None:
        pass

    def row(self, row: Row) -> None:
        self.rows.append(row)


def a_config(**more: Any) -> Config:
    said = {"version": 1, "name": "test", "suite": {"type": "mini_tasks", "lengths": ["short"]}}
    return parse_config({**said, "model": {"scripted": "solver"}, **more}, where="the test")


def play(config: Config, folder: Path, url: str, watcher: Quiet | None = None, stop: Stop | None = None) -> Finished:
    return run(config, folder, url, watcher or Quiet(), stop or Stop())


def rows_of(folder: Path) -> dict[EpisodeKey, Row]:
    return {row.key: row for row in read_rows(folder)}


def needs_debug_gym() -> Path:
    """Return the tasks' folder; skip where debug-gym cannot run."""
    if not GYM_PYTHON.exists():
        pytest.skip("no .venv-debug-gym: `make debug-gym` creates it, with a Python 3.12")
    try:
        return find_data(None)
    except SolveRateError as error:
        pytest.skip(str(error))
