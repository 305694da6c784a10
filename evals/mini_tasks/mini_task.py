"""A task as an agent meets it: a prompt, tools that answer whatever they are called with, one answer to submit.

It knows nothing of what the tools find; a `World` does. It has no clock, file or process: all of it is in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evals.mini_tasks.tools import Parameter, Tool, show

_SYSTEM = "You solve a task with tools. Call one tool at a time, read what it says, and submit one answer at the end."
_SUBMIT = Tool("submit", "Submit the answer. It ends the task.", {"answer": Parameter("string", "the answer")})


@dataclass(frozen=True, slots=True)
class Task:
    """What the agent is given."""

    system: str
    user: str
    tools: list[dict[str, Any]]
    """As an OpenAI chat request has them."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a call returns."""

    text: str
    done: bool = False
    """No further call changes anything."""


@dataclass(frozen=True, slots=True)
class Score:
    """What the submitted answer is worth."""

    score: int
    max_score: int
    solved: bool


class World(ABC):
    """What a kind of task consists of."""

    tools: tuple[Tool, ...]
    """Without `submit`."""
    prompt: str
    answer: str
    reads: tuple[tuple[str, Mapping[str, Any]], ...]
    """The calls after which the answer is known."""

    def reset(self) -> None:  # noqa: B027 - a world in which calls change nothing has nothing to do here
        """Return to the first state."""

    @abstractmethod
    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Carry out a call of one of `tools`, whose arguments have the right names and types."""


class MiniTask:
    """A generated task, in its first state until a tool is called. One conversation at a time."""

    def __init__(self, name: str, seed: int, world: World) -> None:
        self.name = name
        """Kind and length, such as `carry_long`."""
        self.seed = seed
        """Among the seeds of all splits."""
        self.world = world
        self._tools = {tool.name: tool for tool in (*world.tools, _SUBMIT)}
        self._submitted: str | None = None

    @property
    def answer(self) -> str:
        """Return what has to be submitted."""
        return self.world.answer

    def reset(self) -> Task:
        """Forget every call, and return what the agent is given."""
        self.world.reset()
        self._submitted = None
        return Task(_SYSTEM, self.world.prompt, [tool.schema() for tool in self._tools.values()])

    def call(self, name: str, arguments: Any) -> Observation:
        """Carry out a call. Whatever it is called with, the answer is one that an agent can read."""
        if self._submitted is not None:
            return Observation("The task has ended: an answer was submitted.", done=True)
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            return Observation(f"There is no tool {show(name)}. The tools are: {', '.join(self._tools)}.")
        complaint = tool.complaint(arguments)
        if complaint is not None:
            return Observation(complaint)
        if tool is not _SUBMIT:
            return Observation(self.world.run(name, arguments))
        self._submitted = arguments["answer"]
        return Observation("The answer was submitted.", done=True)

    def score(self) -> Score:
        """Compare what was submitted with the answer; spaces around it and the case of letters do not matter."""
        solved = self._submitted is not None and self._submitted.strip().upper() == self.answer
        return Score(int(solved), 1, solved)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
