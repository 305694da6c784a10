"""Requests of the engine, and who has sent them."""

from __future__ import annotations

import asyncio
from array import array
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from sglang.srt.managers.schedule_batch import Req

from tests.in_process.model import Namespace, Node
from tests.in_process.rows import Row


class NoRoomError(Exception):
    """The pool cannot take the request now; a scheduler would let it wait."""


@dataclass(eq=False, slots=True)
class Caller:
    """Who has sent a request. One for each: tasks that its caller starts know it by their context."""

    actor: str


CALLER: ContextVar[Caller] = ContextVar("CALLER", default=Caller("nobody"))  # noqa: B039 - replaced, never changed


@dataclass(eq=False, slots=True)
class Running:
    """A request in the engine. It reads the rows of `view`, whoever owns their slots."""

    req: Req
    tag: str | None
    caller: Caller
    admitted: asyncio.Future[bool] | None = None
    """Ends when its prompt is computed; False where there was no room for it. None where nobody waits for that."""
    is_left: bool = False
    """Its caller has gone, of which the engine hears once it is admitted."""
    is_sibling: bool = False
    placed: list[Node] = field(default_factory=list)
    """Of a sibling: the cached tokens whose rows it is to write."""
    view: list[Row] = field(default_factory=list)
    held: list[Node] = field(default_factory=list)
    """Cached nodes that it has locked."""
    served: int = 0
    """Tokens of the prompt that came from the cache."""
    served_rows: list[Row] = field(default_factory=list)
    outputs: array[int] = field(default_factory=lambda: array("i"))

    @property
    def namespace(self) -> Namespace:
        """Where it is served from, and where its rows go."""
        return self.req.extra_key, self.req.cache_salt

    def answer(self, is_admitted: bool) -> None:
        """Tell whoever waits for it whether its prompt was computed."""
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(is_admitted)

    def slots(self, req_to_token: torch.Tensor) -> list[int]:
        """Return the slots of all its rows."""
        return req_to_token[self.req.kv.req_pool_idx, : self.req.kv.kv_allocated_len].tolist()
