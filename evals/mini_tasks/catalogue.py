"""Which tasks there are, and which seeds are whose."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

from evals.mini_tasks.carry import Carry
from evals.mini_tasks.file_chain import FileChain
from evals.mini_tasks.log_line import LogLine
from evals.mini_tasks.mini_task import MiniTask, World

Kind = Literal["file_chain", "log_line", "carry"]
Length = Literal["short", "medium", "long"]
Split = Literal["train", "test"]

KINDS: tuple[Kind, ...] = ("file_chain", "log_line", "carry")
LENGTHS: tuple[Length, ...] = ("short", "medium", "long")
SPLITS: tuple[Split, ...] = ("train", "test")
NUM_SEEDS = 1_000_000
"""Of each split."""

_WORLDS: dict[Kind, Callable[[random.Random, Length], World]] = {
    "file_chain": FileChain,
    "log_line": LogLine,
    "carry": Carry,
}


def make_task(kind: Kind, length: Length, seed: int, *, split: Split = "test") -> MiniTask:
    """Generate a task; the same arguments give the same task, on any machine.

    Seed n of `train` is another one than seed n of `test`, and no seed is in both.

    Raises:
        ValueError: there is no such kind, length or split, or the seed is not in [0, NUM_SEEDS).
    """
    for name, value, known in (("kind", kind, KINDS), ("length", length, LENGTHS), ("split", split, SPLITS)):
        if value not in known:
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")
    if type(seed) is not int or not 0 <= seed < NUM_SEEDS:
        raise ValueError(f"seed: got {seed!r}, expected a whole number from 0 to {NUM_SEEDS - 1}")
    overall_seed = seed + NUM_SEEDS * SPLITS.index(split)
    # Seeded with text: `Random` hashes it with SHA-512, not with Python's own hash, which differs between processes.
    world = _WORLDS[kind](random.Random(f"{kind} {length} {overall_seed}"), length)
    return MiniTask(f"{kind}_{length}", overall_seed, world)


def solve(task: MiniTask) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that solve a task, from its first state on: the last one submits the answer."""
    return [*((name, dict(arguments)) for name, arguments in task.world.reads), ("submit", {"answer": task.answer})]
