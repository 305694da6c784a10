"""State of the plugin in the tokenizer process: what it knows of the server, and how it talks to the scheduler.

`noted_request.py` serves requests with it, `conversations.py` answers our own routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from leyline_agent.core.protocol import Outcome, Reason, Status
from leyline_agent.errors import PlanError
from leyline_sglang import compat
from leyline_sglang.config import Config
from leyline_sglang.gate import Gate
from leyline_sglang.io_types import AdmissionReply, CacheReply, CacheRequest
from leyline_sglang.sequences import Conversation, SequenceMemory
from leyline_sglang.turn import Turn, salt_of

logger = logging.getLogger(__name__)

Generate = Callable[..., AsyncGenerator[Any, None]]


@dataclass(slots=True)
class Serving:
    """State of the plugin in the tokenizer process."""

    config: Config
    memory: SequenceMemory
    gate: Gate = field(default_factory=Gate)
    admissions: dict[str, asyncio.Future[AdmissionReply]] = field(default_factory=dict)
    """By request id: what the scheduler will say of what was announced."""
    aborted: dict[str, bool] = field(default_factory=dict)
    """Requests whose edits are being carried out, and whether somebody has aborted them meanwhile."""
    one_batch: dict[str, int] = field(default_factory=dict)
    """What a batch can hold at most; empty until `unsupported` was asked."""
    _unsupported: list[str] | None = None
    _not_in_one_step: list[str] = field(default_factory=lambda: ["the scheduler was not asked yet"])
    _tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    """Keeps what runs on its own from being collected."""

    # --- hooks ------------------------------------------------------------------------------------------------------

    def abort(self, original: Callable[..., Any], manager: Any, rid: str = "", abort_all: bool = False) -> Any:
        """Stand around `TokenizerManager.abort_request`, which knows nothing of a request between our own steps."""
        for editing in self.aborted:
            if abort_all or editing == rid:
                self.aborted[editing] = True
        return original(manager, rid=rid, abort_all=abort_all)

    async def reset(self, original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand around whatever empties or invalidates the cache: the memory of turns goes with it."""
        try:
            result = await original(manager, *args, **kwargs)
        except BaseException:
            self.memory.forget_all()
            raise
        # A flush is refused while requests run; then the rows are still there.
        if getattr(result, "success", True):
            self.memory.forget_all()
        return result

    # --- what the server can ----------------------------------------------------------------------------------------

    def not_in_one_step(self) -> list[str]:
        """Return why R is computed in a batch before its request; empty where both share one."""
        return self._not_in_one_step if self.config.one_step else ["LEYLINE_ONE_STEP is off on this server"]

    async def unsupported(self, manager: Any) -> list[str]:
        """Return why this server cannot splice at all; empty where it can. Asked of the scheduler once."""
        if self._unsupported is None:
            reply = await self.ask(manager, CacheRequest(capabilities=True))
            if reply.reason:
                return [reply.message]
            answer = json.loads(reply.message)
            self._unsupported, self._not_in_one_step = answer["unsupported"], answer["not_in_one_step"]
            self.one_batch = answer["one_batch"]
        return self._unsupported

    async def check_server(self, manager: Any) -> None:
        """Raise `PlanError` where this server does not splice; with the reason."""
        if not self.config.enabled:
            raise PlanError("LEYLINE_ENABLED is off on this server", reason=Reason.DISABLED)
        try:
            reasons = await self.unsupported(manager)
        except TimeoutError as error:
            raise PlanError(self.late(), reason=Reason.TIMEOUT) from error
        if reasons:
            raise PlanError("; ".join(reasons), reason=Reason.UNSUPPORTED_SERVER)

    # --- the scheduler ----------------------------------------------------------------------------------------------

    async def ask(self, manager: Any, request: CacheRequest) -> CacheReply:
        """Send a message to the scheduler and return its reply.

        Raises:
            TimeoutError: there was none in time.
        """
        # Shielded: cancelled here, a caller would leave its answer to the next caller of the communicator.
        answer = self.in_background(compat.ask_scheduler(manager, request))
        replies = await asyncio.wait_for(asyncio.shield(answer), self.config.timeout_s)
        reply: CacheReply = replies[0]
        return reply

    def late(self) -> str:
        """Return what a `TimeoutError` of `ask` means."""
        return f"the scheduler did not answer within {self.config.timeout_s} s"

    def admitted(self, reply: AdmissionReply) -> None:
        """Hand what the scheduler says of its own accord to the request that waits for it."""
        future = self.admissions.get(reply.request_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def in_background(self, work: Any) -> asyncio.Future[Any]:
        """Run on, whatever becomes of the caller."""
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def turn(
        self,
        generate: Generate,
        manager: Any,
        obj: Any,
        http_request: Any,
        conversation: Conversation,
        new_ids: array[int],
        turn_id: str | None = None,
        rid: str | None = None,
    ) -> Turn:
        """Return a turn whose prompt is `new_ids`; its R's are prefilled as parts of the request `obj`.

        Without a `turn_id` it is a splice that no request follows.
        """

        async def prefill(token_ids: array[int], cache_salt: str | None) -> int:
            meta_info = await compat.prefill(
                generate,
                manager,
                obj,
                http_request,
                token_ids=token_ids,
                cache_salt=cache_salt,
                tag=salt_of(self.config, conversation),
            )
            finish = meta_info.get("finish_reason") or {}
            if finish.get("type") == "abort" or (rid is not None and self.aborted.get(rid)):
                raise PlanError(f"the prefill of R was aborted: {finish.get('message')}", reason=Reason.ABORTED)
            return int(meta_info["prompt_tokens"]) - int(meta_info["cached_tokens"])

        return Turn(
            config=self.config,
            memory=self.memory,
            gate=self.gate,
            conversation=conversation,
            ask_scheduler=lambda request: self.ask(manager, request),
            prefill=prefill,
            new_ids=new_ids,
            vocab_size=compat.vocab_size(manager),
            turn_id=turn_id,
            last_position=None if turn_id is None else len(new_ids) - 1,
        )


def log_outcome(conversation: Conversation, outcome: Outcome, prompt_tokens: int) -> None:
    """Write the one line of a turn that did more than grow. No text, no ids of tokens, no conversation id."""
    if outcome.status is not Status.UNCHANGED:
        facts = outcome.model_dump(mode="json", exclude_defaults=True, exclude={"v", "directives"})
        facts["edit_ids"] = [directive.edit_id for directive in outcome.directives if directive.edit_id]
        logger.info(
            "leyline: %s",
            json.dumps(
                {"event": "splice", "conversation": conversation.hashed_id, "prompt_tokens": prompt_tokens, **facts}
            ),
        )
