"""What comes between the steps of a turn: evictions, other requests, answers that are lost, a cache that is emptied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.in_process.clients import Client
    from tests.in_process.machine import CacheMachine


class Between:
    """Has something happen after each step of the turn that is carried out inside of it."""

    def __init__(self, machine: CacheMachine, client: Client, what: Any) -> None:
        self._machine = machine
        self._what = what
        self._client = client
        self._num_steps = 0

    def __enter__(self) -> None:
        if self._what is not None:
            self._machine.world.between = self._step

    def __exit__(self, *_error: object) -> None:
        self._machine.world.between = None

    def _step(self, after: str) -> None:
        kind, argument = self._what
        machine, world = self._machine, self._machine.world
        self._num_steps += 1
        if kind == "evict":
            world.evict(argument)
        elif kind == "ask":
            machine.ask_plainly([*machine.system_prompts[0], *argument], self._client.cache_salt)
        elif kind == "reset":
            world.reset(argument)
        elif kind == "lose" and after == "ask" and self._num_steps > argument:
            raise TimeoutError
