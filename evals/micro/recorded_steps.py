"""Steps of recorded agents, of which `conversations.py` makes long conversations: an answer and what the tools said."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_agent.errors import LeylineError
from leyline_agent.explain.conversation_file import read_conversation


class WorkloadError(LeylineError):
    """Trajectories from which the conversations that are asked for cannot be made."""


@dataclass(frozen=True, slots=True)
class Step:
    """An answer of the model and what came back."""

    messages: tuple[Mapping[str, Any], ...]
    opening: tuple[Mapping[str, Any], ...]
    """What its recording begins with, after the system prompt."""


@dataclass(frozen=True, slots=True)
class Recordings:
    """What conversations are made of."""

    system: tuple[Mapping[str, Any], ...]
    """Of the first recording that has a system prompt."""
    tools: tuple[Mapping[str, Any], ...]
    steps: tuple[Step, ...]


def read_recordings(paths: Sequence[Path]) -> Recordings:
    """Read trajectories: files, or folders of `*.json`. Those whose tools answer as `user` are left out.

    Raises:
        WorkloadError: there is nothing to make conversations of.
        ConversationFileError: a file holds no conversation.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    system: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    steps: list[Step] = []
    for file in files:
        recorded = read_conversation(file)
        messages = [_parsed(message.to_openai()) for message in recorded.messages]
        first = next((idx for idx, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        beginning = messages[:first]
        own_system = tuple(message for message in beginning if message["role"] == "system")
        if own_system and not system:
            system, tools = own_system, recorded.tools
        opening = tuple(message for message in beginning if message["role"] == "user")
        starts = [idx for idx, message in enumerate(messages) if message["role"] == "assistant"]
        for start, end in itertools.pairwise([*starts, len(messages)]):
            step = tuple(messages[start:end])
            if any(message["role"] == "tool" for message in step):
                steps.append(Step(step, opening))
    if not steps or not system:
        raise WorkloadError(
            f"--trajectories: {len(files)} files with {len(steps)} steps of an answer and a tool's output, and "
            f"{'a' if system else 'no'} system prompt; expected recordings of an agent that calls tools"
        )
    return Recordings(system, tools, tuple(steps))


def with_own_call_ids(step: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return a step whose calls have ids that no other has, however often it is repeated."""
    answer, *rest = (dict(message) for message in step)
    own_ids: dict[Any, str] = {}
    calls = []
    for idx, call in enumerate(answer.get("tool_calls") or ()):
        own_ids[call.get("id")] = f"call_{name}_{idx}"
        calls.append({**call, "id": f"call_{name}_{idx}"})
    if calls:
        answer["tool_calls"] = calls
    for message in rest:
        if message.get("tool_call_id") in own_ids:
            message["tool_call_id"] = own_ids[message["tool_call_id"]]
    return [answer, *rest]


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that a chat template takes: with text, and with an object for the arguments of each call."""
    message["content"] = message.get("content") or ""
    calls = message.get("tool_calls") or []
    for call in calls:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments, strict=False)
        if not isinstance(arguments, dict):
            arguments = {"arguments": arguments}
        call["function"]["arguments"] = arguments
    return message
