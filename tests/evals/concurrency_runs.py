"""Rows of `evals.micro.concurrency` with chosen times."""

from __future__ import annotations

from typing import Any

CELL = {"prompt_tokens": 1000, "concurrency": 2, "keep_turns": 2}


def run(arm: str, repeat: int, *ms: list[float], **more: Any) -> dict[str, Any]:
    """A run of as many conversations as there are lists, a turn for each value."""
    turns = [[0 for _ in talk] for talk in ms]
    row = {
        "op": "concurrency_run",
        **CELL,
        "model": "m",
        "seed": 0,
        "output_tokens": 10,
        "arm": arm,
        "repeat": repeat,
        "ms": list(ms),
        "first_token_ms": [[value / 2 for value in talk] for talk in ms],
        "prompt": [[100 for _ in talk] for talk in ms],
        "cached": [[80 for _ in talk] for talk in ms],
        "ideal": [[90 for _ in talk] for talk in ms],
        "edits": [[1 for _ in talk] for talk in ms],
        "prefill_tokens": 500,
        "prefill_batches": 4,
        "wall_s": 2.0,
        "client_cpu_s": 0.5,
    }
    if arm.startswith("splice"):
        row |= {"status": [["spliced" for _ in talk] for talk in turns], "moved_tokens": 7, "saved_ms": 1, "note_ms": 2}
    return row | more
