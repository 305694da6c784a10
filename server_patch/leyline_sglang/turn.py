"""One turn in the tokenizer process: what it asks the scheduler, what that took, and how its request is served.

Decides nothing about edits: `follow_note.py` and `turn_splice.py` do.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from leyline_agent.core.protocol import Outcome, Purge, Reason, Status
from leyline_agent.errors import PlanError
from leyline_sglang.config import Config
from leyline_sglang.edit_log import MAX_EDITS
from leyline_sglang.gate import Gate
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply, CacheRequest, pack
from leyline_sglang.namespaces import own_salt
from leyline_sglang.prefill_cost import Cost, saved_by_moving
from leyline_sglang.sequences import Conversation, Edit, SequenceMemory

Ask = Callable[[CacheRequest], Awaitable[CacheReply]]
Prefill = Callable[["array[int]", str | None], Awaitable[int]]
"""Prefill ids in a namespace (a `cache_salt`); returns how many were not cached before.

Raises `PlanError` where the prefill was refused or aborted.
"""


def salt_of(config: Config, conversation: Conversation) -> str:
    """Return the `cache_salt` of a conversation's own namespace, which is also its tag in the scheduler."""
    return own_salt(
        config.secret,
        conversation_hash=conversation.hashed_id,
        caller_salt=conversation.scope[1],
        nonce=conversation.nonce,
    )


@dataclass(frozen=True, slots=True)
class Announced:
    """What the scheduler does as it admits the request: carry out edits, or only choose its namespace."""

    request: AdmissionRequest
    settle: Callable[[AdmissionReply], Awaitable[Served]]
    """Say how the request was served, once that is known."""

    @property
    def edits(self) -> bool:
        """Whether it keeps other turns of the conversation waiting."""
        return bool(self.request.steps)


@dataclass(frozen=True, slots=True)
class Served:
    """How a request goes on: what was done, and the namespace it is served from."""

    outcome: Outcome
    cache_salt: str | None
    tag: str
    """Under which the scheduler takes note of what the request puts into the cache."""
    nonce: str
    edits: tuple[Edit, ...] = ()
    in_own: bool = False
    announced: Announced | None = None
    """If not None, all else here holds only for a request that ends before it is admitted."""


@dataclass(slots=True)
class Turn:
    """One turn of a conversation. Hold `conversation.lock` while its edits are carried out.

    And until the scheduler says that they are done, where edits are only announced.
    """

    config: Config
    memory: SequenceMemory
    gate: Gate
    conversation: Conversation
    ask_scheduler: Ask
    prefill: Prefill
    new_ids: array[int]
    vocab_size: int
    turn_id: str | None = None
    last_position: int | None = None
    """Rows from here on are left to the request: a server computes at least the last token of a prompt."""
    request_id: str | None = None
    """Of the request, if its edits may be carried out as it is admitted."""
    one_batch: dict[str, int] = field(default_factory=dict)
    """What a batch can hold at most (`compat.one_batch`)."""
    prefilled: int = 0
    moved: int = 0
    """Tokens, so far."""
    _started: float = field(default_factory=time.perf_counter)
    _scheduler_ms: float = 0.0
    _purge: Purge | None = None
    _stages_ms: dict[str, float] = field(default_factory=dict)

    @property
    def own_salt(self) -> str:
        """The `cache_salt` of the conversation's own namespace."""
        return salt_of(self.config, self.conversation)

    def salt(self, own: bool) -> str | None:
        """Return the `cache_salt` of the conversation's own namespace, or of the caller's."""
        return self.own_salt if own else self.conversation.scope[1]

    @property
    def limit(self) -> int:
        """Prompt position from which on no rows are moved."""
        return len(self.new_ids) if self.last_position is None else self.last_position

    # --- what it asks, and what that took ---------------------------------------------------------------------------

    def request(self, base_ids: array[int], *, own: bool) -> CacheRequest:
        """Return a message about a base and the prompt, and about the conversation's own namespace if `own`."""
        extra_key, caller_salt = self.conversation.scope
        return CacheRequest(
            base=pack(base_ids),
            new=pack(self.new_ids),
            extra_key=extra_key,
            shared_salt=caller_salt,
            own_salt=self.own_salt if own else None,
        )

    async def ask(self, request: CacheRequest) -> CacheReply:
        """Ask the scheduler, and count what it took."""
        started = time.perf_counter()
        reply = await self.ask_scheduler(request)
        self._scheduler_ms += reply.ms
        self._learn(reply)
        self.count({"wait": (time.perf_counter() - started) * 1e3 - reply.ms, **reply.stages_ms})
        return reply

    async def look(self, base_ids: array[int] | None = None) -> CacheReply:
        """Return how much is cached of the base and of the new ids, in both namespaces."""
        return await self.ask(self.request(base_ids or array("i"), own=self.conversation.has_namespace))

    async def close_namespace(self, *, keep_tokens: int, forget: bool = False, scrub: bool = False) -> None:
        """Leave the conversation's namespace for a new one that holds the first `keep_tokens` of the prompt.

        Nobody can name the old one any more, and its rows are dropped. With `forget`, so are those that this
        conversation has in the shared namespace, right of where they differ from the prompt.
        """
        had_namespace = self.conversation.has_namespace
        self.conversation.closing.append(self.own_salt)
        self.memory.close_namespace(self.conversation)
        request = self.request(array("i"), own=True)
        request.close = tuple(self.conversation.closing)
        request.keep_tokens = keep_tokens if had_namespace else 0
        request.forget, request.scrub = forget, scrub
        closed = await self.ask(request)
        if closed.reason:
            # What could not be dropped now is with the next close; nobody is served from it meanwhile.
            raise PlanError(closed.message, reason=Reason(closed.reason))
        self.conversation.closing.clear()
        self.conversation.has_namespace = closed.new_own > 0
        if forget:
            self._purge = Purge(
                dropped_tokens=closed.dropped,
                held_tokens=closed.held,
                shared_tokens=closed.shared,
                scrubbed_tokens=closed.scrubbed,
            )

    def count(self, stages_ms: dict[str, float]) -> None:
        """Add to what each stage of the turn took."""
        for name, ms in stages_ms.items():
            self._stages_ms[name] = self._stages_ms.get(name, 0.0) + ms

    def elapsed_ms(self) -> float:
        """Return for how long the turn was worked on."""
        return (time.perf_counter() - self._started) * 1e3

    def take_account(self, reply: AdmissionReply, announced_ms: float) -> None:
        """Count what a turn that was announced after `announced_ms` took in the scheduler."""
        self._scheduler_ms += reply.ms
        self._learn(reply)
        # What passed since then is the request's own: it waited, and was computed.
        self._started = time.perf_counter() - (announced_ms + reply.ms) / 1e3
        self.count(reply.stages_ms)

    def _learn(self, reply: CacheReply) -> None:
        if reply.prefill_cost is not None:
            self.gate.prefill_cost = Cost(*reply.prefill_cost)

    # --- how its request is served ----------------------------------------------------------------------------------

    async def serve(
        self,
        status: Status,
        *,
        reason: Reason | None = None,
        message: str | None = None,
        edits: tuple[Edit, ...] = (),
        look: CacheReply | None = None,
        **facts: Any,
    ) -> Served:
        """Choose the namespace with the longer match, the conversation's on a tie, and state the outcome.

        `edits` are the turn's log; `look` is what is cached now, where the caller knows it; `facts` are more of the
        outcome's.
        """

        def state(look: CacheReply | None) -> Served:
            return self._state(status, look, edits=edits, reason=reason, message=message, **facts)

        if look is None and self.conversation.has_namespace:
            if self.request_id is not None:
                return self._announce_choice(state)
            look = await self.look()
        return state(look)

    def _announce_choice(self, state: Callable[[CacheReply | None], Served]) -> Served:
        """Leave the choice of the namespace to the scheduler: asked for it now, it answers after its next batch."""
        assert self.request_id is not None
        shared_salt = self.conversation.scope[1]
        request = AdmissionRequest(
            request_id=self.request_id,
            prompt_tokens=len(self.new_ids),
            shared_salt=shared_salt,
            own_salt=self.own_salt,
            has_namespace=True,
        )
        announced_ms = self.elapsed_ms()
        # Until the scheduler says otherwise, and if it never does.
        own = replace(state(None), cache_salt=self.own_salt, in_own=True)

        async def settle(reply: AdmissionReply) -> Served:
            self.take_account(reply, announced_ms)
            # Of the namespace that was announced: another turn may have left it meanwhile for a new one.
            in_own = bool(reply.reason) or reply.new_own >= reply.new_shared
            outcome = state(reply).outcome
            return replace(own, outcome=outcome, cache_salt=own.cache_salt if in_own else shared_salt, in_own=in_own)

        return replace(own, announced=Announced(request, settle))

    def _state(
        self,
        status: Status,
        look: CacheReply | None,
        *,
        edits: tuple[Edit, ...],
        kept_tokens: int = 0,
        **facts: Any,
    ) -> Served:
        """State what was done, and from where the request is served by what is cached (`look`)."""
        in_own = look is not None and self.conversation.has_namespace and look.new_own >= look.new_shared
        ms = self.elapsed_ms()
        saved_ms = saved_by_moving(
            self.gate.prefill_cost,
            prompt_tokens=len(self.new_ids),
            kept_tokens=kept_tokens,
            moved_tokens=self.moved,
            # In one step R is in the request's own batch.
            prefilled_tokens=self.prefilled if "prefill" in self._stages_ms else 0,
            ms=ms,
        )
        outcome = Outcome(
            status=status,
            turn=self.turn_id,
            kept_tokens=kept_tokens,
            moved_tokens=self.moved,
            prefilled_tokens=self.prefilled,
            saved_ms=saved_ms,
            purge=self._purge,
            ms=round(ms, 3),
            scheduler_ms=round(self._scheduler_ms, 3),
            stages_ms={name: round(ms, 3) for name, ms in self._stages_ms.items()},
            **facts,
        )
        return Served(outcome, self.salt(in_own), self.own_salt, self.conversation.nonce, edits[-MAX_EDITS:], in_own)
