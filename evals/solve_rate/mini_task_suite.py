"""The suite mini_tasks: generated tasks, in this process."""

from __future__ import annotations

from collections.abc import Sequence

from evals.mini_tasks import MiniTask, make_task, solve
from evals.mini_tasks.catalogue import Kind, Length
from evals.solve_rate.config import MiniTasks
from evals.solve_rate.environment import Environment, ScriptedCalls, TaskEntry
from evals.solve_rate.rows import SuiteName


class MiniTaskSuite:
    """The kinds and lengths that a config selects; each seed is another task of the kind."""

    name: SuiteName = "mini_tasks"
    sandboxed: bool | None = None

    def __init__(self, config: MiniTasks) -> None:
        self._split = config.split
        self._by_name: dict[str, tuple[Kind, Length]] = {
            f"{kind}_{length}": (kind, length) for kind in config.kinds for length in config.lengths
        }
        self.entries: Sequence[TaskEntry] = tuple(TaskEntry(name) for name in self._by_name)

    def make(self, task: str, seed: int) -> MiniTask:
        """Generate the task."""
        return make_task(*self._by_name[task], seed, split=self._split)

    def script(self, script: str, task: str, environment: Environment) -> ScriptedCalls:
        """Return the calls of scripted models."""
        assert isinstance(environment, MiniTask)
        solution = tuple(solve(environment))
        return ScriptedCalls(solution, give_up=(("submit", {"answer": "unknown"}),), filler=solution[0])
