"""The agent that acts: LangChain's `create_agent`, a LangGraph agent, with Leyline's middleware."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, AgentState, hook_config
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.runtime import Runtime
from langgraph.types import Command

from evals.solve_rate.config import Limits
from evals.solve_rate.environment import Environment, Task
from leyline_agent.core.protocol import Outcome
from leyline_agent.integrations.langchain import LeylineMiddleware
from leyline_agent.policy import Policy

Ended = Literal["done", "turns", "time", "context", "no_call"]

_MAX_REMINDERS = 3
"""Answers without a call, one after the other, that are answered with a reminder."""
_REMINDER = "There was no tool call in your answer. Call a tool; call `submit` if you are done."


class StoppedError(Exception):
    """The run is over: the episode is broken off and does not count."""


@dataclass
class EpisodeState:
    """What the agent has done so far; also where it failed."""

    messages: list[BaseMessage] = field(default_factory=list)
    ended: Ended | None = None


def run_agent(
    chat: ChatOpenAI,
    environment: Environment,
    task: Task,
    *,
    policy: Policy | None,
    limits: Limits,
    thread_id: str,
    is_stopped: Callable[[], bool],
    state: EpisodeState,
) -> None:
    """Act until the episode ends; `state` is kept up to date.

    Raises:
        StoppedError: `is_stopped` said so.
        openai.OpenAIError: the server gave no answer.
        EnvironmentFailedError: a tool broke.
    """
    guard = _Guard(environment, limits, is_stopped, state)
    middleware: list[AgentMiddleware[Any, Any, Any]] = [guard]
    if policy is not None:
        # Last, so that nothing changes the request after it. Fall-backs are counted from the answers.
        middleware.append(LeylineMiddleware(policy, on_fallback=_counted, gate="off"))
    agent = create_agent(chat, _schemas(task), system_prompt=task.system, middleware=middleware)
    config: Any = {
        "configurable": {"thread_id": thread_id},
        # Model, tools and three hooks a turn.
        "recursion_limit": 10 * limits.max_turns + 50,
        # Calls of one answer one after the other, as they stand.
        "max_concurrency": 1,
    }
    opening: Any = {"messages": [HumanMessage(task.user)]}
    for values in agent.stream(opening, config, stream_mode="values"):
        state.messages = list(values["messages"])


class _Guard(AgentMiddleware[Any, Any, Any]):
    """Carries out tool calls in the environment, and ends the episode where its limits are."""

    def __init__(
        self, environment: Environment, limits: Limits, is_stopped: Callable[[], bool], state: EpisodeState
    ) -> None:
        super().__init__()
        self._environment, self._limits, self._is_stopped, self._state = environment, limits, is_stopped, state
        self._deadline = time.monotonic() + limits.episode_s
        self._num_turns = self._num_reminders = 0

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        """End before the next model call, if anything says so."""
        if self._is_stopped():
            raise StoppedError
        if self._state.ended is None:
            if self._num_turns >= self._limits.max_turns:
                self._state.ended = "turns"
            elif time.monotonic() > self._deadline:
                self._state.ended = "time"
        if self._state.ended is not None:
            return {"jump_to": "end"}
        self._num_turns += 1
        return None

    @hook_config(can_jump_to=["model", "end"])
    def after_model(self, state: AgentState[Any], runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Remind a model that has called nothing, a few times."""
        answer = next(message for message in reversed(state["messages"]) if isinstance(message, AIMessage))
        if answer.tool_calls:
            self._num_reminders = 0
            return None
        self._num_reminders += 1
        if self._num_reminders > _MAX_REMINDERS:
            self._state.ended = "no_call"
            return {"jump_to": "end"}
        return {"jump_to": "model", "messages": [HumanMessage(_REMINDER)]}

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Have the environment answer, whatever was called."""
        call = request.tool_call
        if self._state.ended is not None:
            # A further call of the answer that has ended the episode.
            text = "The task has ended."
        else:
            observation = self._environment.call(call["name"], call["args"])
            text = observation.text
            if observation.done:
                self._state.ended = "done"
        return ToolMessage(text, tool_call_id=call["id"] or "", name=call["name"])


def _schemas(task: Task) -> list[StructuredTool]:
    """Return tools for their schemas alone: `_Guard.wrap_tool_call` stands before them."""

    def never() -> str:
        raise AssertionError("tool calls are the environment's")

    functions = [tool["function"] for tool in task.tools]
    return [
        StructuredTool(
            name=function["name"],
            description=function["description"],
            args_schema=function["parameters"],
            func=never,
        )
        for function in functions
    ]


def _counted(reason: str, outcome: Outcome | None) -> None:
    """Stand for the warning of a fall-back."""
