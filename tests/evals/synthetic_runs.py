"""Rows that nobody measured, for the tests of the report. Their run is called synthetic, so that each title says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.solve_rate.rows import Row, RowsFile

RUN = "synthetic rows, not measured"
KEEP = "keep_last_tool_outputs"
_TOKENS = {
    "none": (60_000, 52_000),
    "reprefill": (31_000, 15_000),
    "splice": (31_000, 24_000),
    "forget": (31_000, 9_000),
}


def row(arm: str, task: str, seed: int, status: str, **given: Any) -> Row:
    """Return an episode; tokens and times depend on the arm's execution and on the seed."""
    policy, _, execution = arm.partition("/")
    prompt, cached = _TOKENS[execution or "none"]
    times = tuple(100.0 + 10 * seed + turn for turn in range(12))
    ended = {"solved": "done", "failed": "turns"}.get(status)
    fields = {
        "run": RUN,
        "suite": "mini_nightmare",
        "task": task,
        "arm": arm,
        "policy": policy,
        "execution": execution or "none",
        "seed": seed,
        "status": status,
        "reason": None if ended else f"the server was {'gone' if status == 'error' else 'not there'}",
        "ended": ended,
        "score": 5 if status == "solved" else 1,
        "max_score": 5,
        "turns": 12 if ended else 0,
        "prompt_tokens": prompt + seed if ended else 0,
        "cached_tokens": cached if ended else 0,
        "completion_tokens": 900 if ended else 0,
        "turn_ms": times if ended else (),
        "splices": 4 if ended and execution == "splice" else 0,
        "fallbacks": {"evicted": 1} if ended and execution == "splice" and seed == 0 else {},
        "model": "a made-up model",
        "agent": "langgraph",
        "started": f"2026-01-01T00:{seed:02}:00Z",
    }
    return Row.model_validate({**fields, **given})


def paired_rows(base: str, other: str, outcomes: Sequence[Sequence[str]], **given: Any) -> list[Row]:
    """Return the episodes of two arms. `outcomes` has a list for each task, with a pair for each seed: `++` both.

    `+-` is the base alone, `-+` the other alone, `--` neither; `x` in the place of a sign is an error.
    """
    statuses = {"+": "solved", "-": "failed", "x": "error", "s": "skipped"}
    return [
        row(arm, f"task-{task:02}", seed, statuses[pair[idx]], **given)
        for task, of_task in enumerate(outcomes, 1)
        for seed, pair in enumerate(of_task)
        for idx, arm in enumerate((base, other))
    ]


def write_run(folder: Path, rows: Sequence[Row]) -> Path:
    """Write a run folder as the runner does."""
    folder.mkdir(parents=True, exist_ok=True)
    with RowsFile(folder) as file:
        for each in rows:
            file.append(each)
    return folder


def three_arms() -> list[Row]:
    """Return eight tasks with five seeds in three arms, with a few errors and skipped episodes."""
    base = [["--", "-+", "++", "--", "+-"], ["--"] * 5, ["++", "++", "-+", "++", "++"], ["-+", "--", "--", "-+", "--"]]
    outcomes = [*base, *[["--", "+-", "--", "-+", "--"]] * 2, ["-x", "x-", "++", "-+", "++"], ["ss"] * 5]
    rows = paired_rows("none", f"{KEEP}/reprefill", outcomes)
    return rows + [each for each in paired_rows("none", f"{KEEP}/splice", outcomes[::-1]) if each.arm != "none"]
