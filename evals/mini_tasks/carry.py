"""Carry a value found early to the end: the first room shows half of the answer once, the last room the other half.

Here an old output is needed, and cannot be had again. A policy that drops old outputs loses the task, unless the agent
has repeated the value in its own words. That is what this kind is for: it shows what a policy costs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from evals.mini_tasks.mini_task import World
from evals.mini_tasks.noise import make_code, make_names, make_notes
from evals.mini_tasks.tools import Parameter, Tool, show

_NUM_ROOMS = {"short": (3, 3), "medium": (8, 10), "long": (16, 20)}
_NUM_NOTES = {"short": (1, 2), "medium": (8, 10), "long": (16, 20)}


class Carry(World):
    """Rooms in a row; what the first one shows is shown once."""

    tools = (Tool("visit", "Visit a room and read what is written there.", {"room": Parameter("string", "its name")}),)

    def __init__(self, rng: random.Random, length: str) -> None:
        rooms = make_names(rng, rng.randint(*_NUM_ROOMS[length]))
        first, second = make_code(rng), make_code(rng)
        self.answer = f"{first}-{second}"
        self._first_room, self._first_line = rooms[0], f"first half: {first}"
        self._rooms: dict[str, list[str]] = {}
        for room, line in zip(rooms, [*(f"next: {room}" for room in rooms[1:]), f"second half: {second}"], strict=True):
            notes = make_notes(rng, rng.randint(*_NUM_NOTES[length]))
            notes.insert(rng.randrange(len(notes) + 1), line)
            self._rooms[room] = notes
        self._shown = False
        self.prompt = (
            f"Start in the room {rooms[0]}. It shows the first half of a code, once. In each room a line that begins "
            "with `next:` names the room to visit next; the last one shows the second half. Submit both halves with a "
            "hyphen between them."
        )
        self.reads = tuple(("visit", {"room": room}) for room in rooms)

    def reset(self) -> None:
        """Have the first room show its half again."""
        self._shown = False

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Visit a room."""
        room = arguments["room"].strip()
        if room not in self._rooms:
            return f"There is no room {show(arguments['room'])}. The `next:` lines name rooms as they are called."
        if room != self._first_room:
            return "\n".join(self._rooms[room])
        line = "The first half was shown on the first visit." if self._shown else self._first_line
        self._shown = True
        return "\n".join([line, *self._rooms[room]])
