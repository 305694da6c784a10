"""The note's way through a request, in the tokenizer process: the hook around `generate_request`.

A request without a note passes untouched. With one, its edits are carried out first, or announced to the scheduler,
which does them as it admits the request; then the request itself is served by the engine as ever, and what it made is
remembered.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from leyline_agent.core.protocol import Note, Outcome, Reason, Status
from leyline_agent.errors import PlanError
from leyline_sglang import compat
from leyline_sglang.follow_note import follow_note
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest
from leyline_sglang.metrics import Metrics
from leyline_sglang.note import parse_note, tag_request, take_note
from leyline_sglang.request_checks import (
    check_namespace,
    check_no_own_salt,
    check_request,
    check_vocabulary,
    checked_ids,
    num_choices,
)
from leyline_sglang.sequences import Conversation, RememberedTurn, Scope, hash_id
from leyline_sglang.serving import Generate, Serving, log_outcome
from leyline_sglang.turn import Announced, Served, salt_of

logger = logging.getLogger(__name__)

SCOPE_KEY = "leyline.outcome"
"""Where the outcome waits in the ASGI scope for the response header."""
META_KEY = "leyline"
"""Key of the outcome in `meta_info`, and from there in `metadata` of a chat response."""

_UNSUPPORTED = Reason.UNSUPPORTED_REQUEST
_NEVER_SEEN = (
    "this server does not know the conversation: what it has cached of it, if anything, before it was flushed, "
    "restarted or pushed out of memory, is only dropped as it ages"
)
_SHORT_NOTE = 8192
"""Characters of a note that is read on the event loop: in 0.1 ms, where a thread would take its turn after 5."""
_MAX_MESSAGE = 1000
"""A message may quote what a client sent, but not all of it."""


async def generate(
    serving: Serving, original: Generate, manager: Any, obj: Any, http_request: Any = None
) -> AsyncIterator[Any]:
    """Stand around `TokenizerManager.generate_request`."""
    text = None
    if not compat.is_internal(obj):
        check_no_own_salt(getattr(obj, "cache_salt", None))
        text = take_note(obj) if compat.is_generate(obj) else None
    if text is None:
        async with aclosing(original(manager, obj, http_request)) as stream:
            async for output in stream:
                yield output
        return
    request = _NotedRequest(serving, original, manager, obj, http_request)
    try:
        await request.follow(text)
        async with aclosing(request.stream()) as stream:
            async for output in stream:
                yield output
    finally:
        request.let_next_turn_begin()


@dataclass(slots=True)
class _NotedRequest:
    """A request with a note, from the note to what is remembered of it."""

    serving: Serving
    original: Generate
    manager: Any
    obj: Any
    http_request: Any
    outcome: Outcome = field(init=False)
    served: Served | None = None
    """None where the note could not be followed."""
    conversation: Conversation | None = None
    turn_id: str | None = None
    prompt_ids: array[int] = field(default_factory=lambda: array("i"))
    _rid: str = ""
    _locked: bool = False
    """Whether this request holds the conversation's lock."""
    _settling: asyncio.Task[None] | None = None
    """Ends when the scheduler has said what became of what was announced; None where nothing is awaited."""

    # --- the note ---------------------------------------------------------------------------------------------------

    async def follow(self, text: Any) -> None:
        """Carry out the note and point the request at the namespace to be served from.

        Where the edits are only announced, the conversation stays locked.
        """
        obj, manager, serving = self.obj, self.manager, self.serving
        try:
            # A long one would stop every stream meanwhile.
            note = (
                parse_note(text, max_bytes=serving.config.max_note_bytes)
                if isinstance(text, str) and len(text) <= _SHORT_NOTE
                else await asyncio.to_thread(parse_note, text, max_bytes=serving.config.max_note_bytes)
            )
            self.turn_id = note.turn
            await serving.check_server(manager)
            check_namespace(obj.extra_key, obj.cache_salt)
            if isinstance(obj.extra_key, list) or isinstance(obj.cache_salt, list):
                raise PlanError("this request cannot be spliced: it has lists of cache keys", reason=_UNSUPPORTED)
            scope: Scope = (obj.extra_key, obj.cache_salt or None)
            known = serving.memory.find(scope, note.conversation)
            if known is not None:
                # Also where nothing can be spliced: what such a request caches is to be forgotten with the rest.
                tag_request(obj, salt_of(serving.config, known))
            check_request(obj)
            self.prompt_ids = checked_ids(obj.input_ids, compat.vocab_size(manager))
            if len(obj.input_ids) >= compat.context_tokens(manager):
                raise PlanError("the prompt is longer than the model's context", reason=_UNSUPPORTED)
            if isinstance(obj.rid, str) and compat.is_running(manager, obj.rid):
                raise PlanError("another request runs under this rid", reason=_UNSUPPORTED)
        except PlanError as error:
            self.outcome = self._refused(error)
            self._tell()
            return
        self.conversation = serving.memory.open(scope, note.conversation)
        served = await self._carry_out(note, self.conversation)
        if known is None and served.outcome.purge is not None:
            served = replace(served, outcome=served.outcome.model_copy(update={"message": _NEVER_SEEN}))
        obj.cache_salt = served.cache_salt
        tag_request(obj, served.tag)
        self._served_as(served)
        if served.announced is None:
            self._tell()
        if served.announced is None or not served.announced.edits:
            self._remember(())

    async def _carry_out(self, note: Note, conversation: Conversation) -> Served:
        obj, serving = self.obj, self.serving
        if obj.rid is None and not num_choices(obj) > 1:
            obj.rid = uuid.uuid4().hex
        rid = self._rid = obj.rid if isinstance(obj.rid, str) else uuid.uuid4().hex
        # What aborts the request of a caller who leaves asks for it, and the engine sets it only later.
        obj.is_single = True
        turn = serving.turn(
            self.original, self.manager, obj, self.http_request, conversation, self.prompt_ids, note.turn, rid
        )
        if not serving.not_in_one_step() and obj.rid == rid and num_choices(obj) == 1 and rid not in serving.admissions:
            turn.request_id, turn.one_batch = rid, serving.one_batch
            serving.admissions[rid] = asyncio.get_running_loop().create_future()
        serving.aborted[rid] = False
        served = None
        try:
            self._locked = await conversation.lock.acquire()
            served = await follow_note(turn, note)
            return served
        except TimeoutError:
            return self._plain(conversation, PlanError(serving.late(), reason=Reason.TIMEOUT))
        except PlanError as error:
            return self._plain(conversation, error)
        except Exception as error:
            # A boundary: whatever we did wrong, the request is answered. A caller who has left is the engine's affair.
            if self.http_request is not None and await self.http_request.is_disconnected():
                raise
            logger.exception("leyline: conversation %s is served without its edits", hash_id(note.conversation))
            problem = PlanError(f"{type(error).__name__}: {error}", reason=Reason.INTERNAL_ERROR)
            return self._plain(conversation, problem)
        finally:
            if served is None or served.announced is None or not served.announced.edits:
                self.let_next_turn_begin()
            if (served is None or served.announced is None) and turn.request_id is not None:
                serving.admissions.pop(rid, None)
            if serving.aborted.pop(rid, False):
                serving.in_background(_abort_when_dispatched(self.manager, rid))

    def _plain(self, conversation: Conversation, error: PlanError) -> Served:
        """Serve the request as any other one, from the caller's own namespace."""
        tag = salt_of(self.serving.config, conversation)
        return Served(self._refused(error), conversation.scope[1], tag, conversation.nonce)

    def _refused(self, error: PlanError) -> Outcome:
        message = str(error)[:_MAX_MESSAGE]
        return Outcome(status=Status.REFUSED, reason=Reason(error.reason), message=message, turn=self.turn_id)

    def let_next_turn_begin(self) -> None:
        """Unlock the conversation, if this request still holds it."""
        if self._locked and self.conversation is not None:
            self._locked = False
            self.conversation.lock.release()

    # --- the request itself -----------------------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[Any, None]:
        """Serve the request itself, and remember what it made."""
        manager, obj = self.manager, self.obj
        self._show()
        # Else they were checked as the note was followed.
        if self.served is None:
            check_vocabulary(obj.input_ids, compat.vocab_size(manager))
        deltas = bool(obj.stream) and compat.streams_deltas(manager)
        outputs: dict[str, array[int]] = {}
        if self.served is not None and self.served.announced is not None:
            self._settling = self._announce(self.served.announced)
        try:
            # Closed with us, so that a caller who leaves is noticed at once.
            async with aclosing(self.original(manager, obj, self.http_request)) as stream:
                async for output in stream:
                    if self._settling is not None:
                        await self._settle(self._settling, output)
                        self._show()
                    for choice in output if isinstance(output, list) else [output]:
                        meta_info, output_ids = choice["meta_info"], array("i", choice.get("output_ids") or [])
                        seen = outputs.get(meta_info["id"])
                        outputs[meta_info["id"]] = seen + output_ids if deltas and seen else output_ids
                        if meta_info.get("finish_reason"):
                            meta_info[META_KEY] = self.outcome.model_dump(mode="json")
                            # Now, not when the stream is closed: the next turn may come before that.
                            self._remember(tuple(outputs.values()))
                    yield output
        finally:
            # In whatever way the request ended; a cancelled one lands here.
            unsettled = self._settling is not None
            if self._settling is not None:
                self._withdraw(self._settling)
            if outputs or unsettled:
                self._remember(tuple(outputs.values()))

    def _announce(self, announced: Announced) -> asyncio.Task[None]:
        """Tell the scheduler; the task ends when it has done what was announced, and lets the next turn begin."""
        future = self.serving.admissions[self._rid]

        async def settle() -> None:
            self._served_as(await announced.settle(await future))
            self._tell()
            self._remember(())
            self.let_next_turn_begin()

        compat.handle_in_tokenizer(self.manager, AdmissionReply, self.serving.admitted)
        compat.tell_scheduler(self.manager, announced.request)
        return asyncio.create_task(settle())

    async def _settle(self, settling: asyncio.Task[None], output: Any) -> None:
        """Take up how the request was served, which the scheduler has said before its first output."""
        if (output["meta_info"].get("finish_reason") or {}).get("type") != "abort":
            # By another socket, so it may come a little later.
            await asyncio.wait([settling], timeout=self.serving.config.timeout_s)
        self._withdraw(settling)

    def _withdraw(self, settling: asyncio.Task[None]) -> None:
        """Wait no longer for what the scheduler says; what it has not done yet it is not to do."""
        self._settling = None
        self.serving.admissions.pop(self._rid, None)
        if not settling.done():
            settling.cancel()
            compat.tell_scheduler(self.manager, AdmissionRequest(request_id=self._rid, cancel=True))
        elif settling.exception() is None:
            return
        else:
            logger.error("leyline: what became of announced edits is not known", exc_info=settling.exception())
        self._tell()
        self._remember(())

    # --- what is told and remembered of it --------------------------------------------------------------------------

    def _served_as(self, served: Served) -> None:
        self.served, self.outcome = served, served.outcome

    def _show(self) -> None:
        """Put the outcome where the response header is made from; the first chunk is made before the headers go out."""
        if self.http_request is not None:
            self.http_request.scope[SCOPE_KEY] = self.outcome

    def _remember(self, outputs: tuple[array[int], ...]) -> None:
        """Take note of the turn, with what was generated so far."""
        if self.served and self.conversation and self.turn_id:
            turn = RememberedTurn(self.prompt_ids, outputs, self.served.edits, self.served.in_own)
            self.serving.memory.remember(self.conversation, self.turn_id, turn, nonce=self.served.nonce)

    def _tell(self) -> None:
        """Log and count what became of the note; once a request."""
        try:
            if compat.has_metrics(self.manager):
                Metrics().count(self.outcome)
        except Exception:
            # The counts lie in files; the request has nothing to do with a full disk.
            logger.exception("leyline: a turn is not counted")
        if self.conversation is not None:
            log_outcome(self.conversation, self.outcome, len(self.prompt_ids))


async def _abort_when_dispatched(manager: Any, rid: str) -> None:
    """Abort a request that was aborted before the engine knew it: as soon as the scheduler has it."""
    while not compat.is_dispatched(manager, rid):
        await asyncio.sleep(0.005)
        if not compat.is_running(manager, rid):
            return
    manager.abort_request(rid=rid)
