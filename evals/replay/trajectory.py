"""Load a recorded trajectory and hand it out as LangChain messages, one model call after the other.

The file is one that `leyline_agent.explain` reads. Real recordings are taken as they are: repeated outputs, empty
contents, several calls with one id. LangChain's message classes and SGLang's chat route do not accept everything that
clients once sent, so this is changed, and listed in `Trajectory.normalized`:

- a call without an id gets one, and a tool message without `tool_call_id` gets that of the oldest unanswered call;
- `content: null` becomes `""` (LangChain sends null again for a message with calls);
- call arguments that are no JSON object are wrapped: `{"arguments": …}` (SGLang answers 400 to anything else).

Keys that LangChain has no field for (`refusal`, `reasoning_content`, …) are not sent. Arguments keep their values, but
LangChain writes the JSON text anew, the same in every turn and every arm.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage

from evals.replay.errors import TrajectoryError
from leyline_agent.explain import ConversationFileError, read_conversation

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One recorded model call: what the model answered and what came back before the next call."""

    answer: AIMessage
    observations: tuple[AnyMessage, ...]


@dataclass(frozen=True)
class Trajectory:
    """A recorded conversation. Its parts are built anew on each access of `opening` and `turns`' first use."""

    source: str
    messages: tuple[Mapping[str, Any], ...]
    """OpenAI chat dicts after normalization."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas to send with each request; empty where the recording has none."""
    normalized: tuple[str, ...] = ()
    """What had to be changed, a line each."""

    @property
    def num_turns(self) -> int:
        """Return how many model calls a replay makes: one for each assistant message that something precedes."""
        return len(self.turns)

    @property
    def observed_role(self) -> str:
        """Return the role in which the environment answers: "tool", or "user" in a recording without tool calls."""
        return "tool" if any(message["role"] == "tool" for message in self.messages) else "user"

    @cached_property
    def opening(self) -> tuple[AnyMessage, ...]:
        """The messages before the first model call."""
        return tuple(_to_langchain(message) for message in self.messages[: self._first_answer])

    @cached_property
    def turns(self) -> tuple[RecordedTurn, ...]:
        """The model calls in order."""
        turns: list[RecordedTurn] = []
        for message in map(_to_langchain, self.messages[self._first_answer :]):
            if isinstance(message, AIMessage):
                turns.append(RecordedTurn(message, ()))
            else:
                turns[-1] = RecordedTurn(turns[-1].answer, (*turns[-1].observations, message))
        return tuple(turns)

    @property
    def _first_answer(self) -> int:
        # An assistant message that opens the conversation has no prompt, so it belongs to the opening.
        roles = [message["role"] for message in self.messages]
        return next((idx for idx, role in enumerate(roles) if idx > 0 and role == "assistant"), len(roles))


def load_trajectory(file: Path | str) -> Trajectory:
    """Read a trajectory.

    Raises:
        TrajectoryError: the file cannot be read, is no JSON, or is no conversation with an assistant in it.
    """
    try:
        recorded = read_conversation(file)
    except ConversationFileError as error:
        raise TrajectoryError(str(error)) from error
    messages, normalized = _normalize([message.to_openai() for message in recorded.messages], where=str(file))
    trajectory = Trajectory(recorded.source, messages, recorded.tools, normalized)
    if not trajectory.num_turns:
        raise TrajectoryError(
            f"{file}: {len(messages)} messages, none of them an answer of the assistant; there is nothing to replay"
        )
    return trajectory


def _normalize(
    messages: Sequence[dict[str, Any]], *, where: str
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    normalized: list[str] = []
    result: list[Mapping[str, Any]] = []
    unanswered: deque[str] = deque()
    for idx, message in enumerate(messages):
        place = f"message {idx}"
        if message["role"] not in ROLES:
            raise TrajectoryError(
                f"{where}: {place} has the role {message['role']!r}; expected one of {', '.join(ROLES)}"
            )
        copy = dict(message)
        if copy.get("content") is None:
            copy["content"] = ""
            if not copy.get("tool_calls"):
                normalized.append(f"{place}: content null became an empty text")
        if not isinstance(copy["content"], str | list):
            raise TrajectoryError(
                f"{where}: {place}: content is {type(copy['content']).__name__}; expected text, a list of parts or null"
            )
        if copy["role"] == "assistant":
            calls = [
                _normalize_call(call, f"{place}, call {n}", f"call_{idx}_{n}", normalized, where)
                for n, call in enumerate(copy.get("tool_calls") or ())
            ]
            copy["tool_calls"] = calls
            unanswered.extend(call["id"] for call in calls)
        if copy["role"] == "tool":
            call_id = copy.get("tool_call_id")
            if not call_id:
                call_id = unanswered[0] if unanswered else f"call_{idx}"
                copy["tool_call_id"] = call_id
                normalized.append(f"{place}: tool_call_id was missing and became {call_id!r}")
            if call_id in unanswered:
                unanswered.remove(call_id)
        result.append(copy)
    return tuple(result), tuple(normalized)


def _normalize_call(call: Any, place: str, made_up_id: str, normalized: list[str], where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TrajectoryError(f'{where}: {place} is no OpenAI tool call; expected {{"function": {{"name": …}}}}')
    call_id = call.get("id")
    if not call_id:
        call_id = made_up_id
        normalized.append(f"{place}: the id was missing and became {call_id!r}")
    arguments = function.get("arguments")
    parsed: Any = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments, strict=False)
        except json.JSONDecodeError:
            parsed = arguments
    if not isinstance(parsed, dict):
        normalized.append(f"{place}: the arguments were no JSON object and were wrapped into one")
        parsed = {"arguments": parsed}
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": parsed}}


def _to_langchain(message: Mapping[str, Any]) -> AnyMessage:
    content, name = message["content"], message.get("name")
    match message["role"]:
        case "system":
            return SystemMessage(content, name=name)
        case "developer":
            return SystemMessage(content, name=name, additional_kwargs={"__openai_role__": "developer"})
        case "user":
            return HumanMessage(content, name=name)
        case "tool":
            return ToolMessage(content, tool_call_id=message["tool_call_id"], name=name)
        case _:
            calls = [
                {"name": call["function"]["name"], "args": call["function"]["arguments"], "id": call["id"]}
                for call in message.get("tool_calls") or ()
            ]
            return AIMessage(content, name=name, tool_calls=calls)
