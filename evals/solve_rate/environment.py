"""What an agent acts in, and the suites that make such environments. Knows no model and no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evals.solve_rate.rows import SuiteName

Call = tuple[str, dict[str, Any]]
"""Name of a tool and its arguments."""


class Task(Protocol):
    """How an episode begins."""

    @property
    def system(self) -> str:
        """The system prompt."""

    @property
    def user(self) -> str:
        """The task as the first user message sets it."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools, in OpenAI's form."""


class Observation(Protocol):
    """What a call gives back."""

    @property
    def text(self) -> str:
        """The tool message."""

    @property
    def done(self) -> bool:
        """Whether the episode has ended with it."""


class Score(Protocol):
    """What an episode was worth."""

    @property
    def score(self) -> int:
        """Points."""

    @property
    def max_score(self) -> int:
        """Points that could be had."""

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved."""


class Environment(Protocol):
    """One episode's world."""

    def reset(self) -> Task:
        """Begin; call it once, first."""

    def call(self, name: str, arguments: dict[str, Any]) -> Observation:
        """Carry out a tool call; a call that makes no sense is answered, not raised."""

    def score(self) -> Score:
        """Judge the state as it is now by what the agent could not touch."""

    def close(self) -> None:
        """End whatever still runs and remove its files."""


class EnvironmentFailedError(Exception):
    """The world broke, through no fault of the agent's; the episode is an error."""


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """A task of a suite."""

    name: str
    paper_subset: bool = False
    repeats: int = 1
    """How many episodes for each seed."""
    skip: str | None = None
    """Why it cannot run here."""


class Suite(Protocol):
    """A set of tasks."""

    @property
    def name(self) -> SuiteName:
        """As rows name it."""

    @property
    def entries(self) -> Sequence[TaskEntry]:
        """Its tasks as the config selects them, those that must be skipped included."""

    @property
    def sandboxed(self) -> bool | None:
        """As `Row.sandboxed`."""

    def make(self, task: str, seed: int) -> Environment:
        """Return a fresh environment."""

    def script(self, script: str, task: str, environment: Environment) -> ScriptedCalls:
        """Return what the scripted models do in this task, after `reset`."""


@dataclass(frozen=True, slots=True)
class ScriptedCalls:
    """The calls that scripted models are made of."""

    solution: tuple[Call, ...]
    """Calls that solve the task, the one that ends the episode last."""
    give_up: tuple[Call, ...]
    """Calls that end the episode unsolved."""
    filler: Call
    """A call that changes nothing."""
    cheat: tuple[Call, ...] | None = None
    """Calls that make the task look solved; None where there is nothing to cheat with."""
