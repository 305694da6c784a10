"""Small generated tasks with tools, noisy outputs and an answer that nobody guesses."""

from evals.mini_tasks.catalogue import KINDS, LENGTHS, NUM_SEEDS, SPLITS, make_task, solve
from evals.mini_tasks.mini_task import MiniTask, Observation, Score, Task

__all__ = [
    "KINDS",
    "LENGTHS",
    "NUM_SEEDS",
    "SPLITS",
    "MiniTask",
    "Observation",
    "Score",
    "Task",
    "make_task",
    "solve",
]
