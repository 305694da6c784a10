"""The note's way through a request, in the tokenizer process: the hook around `generate_request`.

A request without a note passes untouched. With one, its edits are carried out first, then the request itself is
served by the engine as ever, and what it made is remembered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from leyline_agent.core.plan import apply_directives, check_directives
from leyline_agent.core.protocol import (
    ConversationState,
    Directive,
    Mode,
    Note,
    Outcome,
    PastEdit,
    Purge,
    Reason,
    ReleaseReply,
    SpliceReply,
    SpliceRequest,
    Status,
    TurnState,
)
from leyline_agent.errors import PlanError
from leyline_sglang import compat
from leyline_sglang.config import Config
from leyline_sglang.gate import Gate
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply, CacheRequest, pack
from leyline_sglang.note import parse_note, tag_request, take_note
from leyline_sglang.request_checks import (
    check_namespace,
    check_no_own_salt,
    check_request,
    check_vocabulary,
    checked_ids,
    num_choices,
)
from leyline_sglang.sequences import Conversation, RememberedTurn, Scope, SequenceMemory, hash_id
from leyline_sglang.turn import Announced, Served, Turn, salt_of

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
_MAX_EXPLICIT_EDITS = 256
_MAX_MESSAGE = 1000
"""A message may quote what a client sent, but not all of it."""

Generate = Callable[..., AsyncGenerator[Any, None]]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request whose note was read. What stands behind the outcome is None where the note could not be followed."""

    outcome: Outcome
    served: Served | None = None
    memory: SequenceMemory | None = None
    conversation: Conversation | None = None
    turn_id: str | None = None
    prompt_ids: array[int] = field(default_factory=lambda: array("i"))

    def served_as(self, served: Served) -> _Prepared:
        return replace(self, outcome=served.outcome, served=served)

    def remember(self, outputs: tuple[array[int], ...]) -> None:
        """Take note of the turn, with what was generated so far."""
        if self.served and self.memory and self.conversation and self.turn_id:
            turn = RememberedTurn(self.prompt_ids, outputs, self.served.edits, self.served.in_own)
            self.memory.remember(self.conversation, self.turn_id, turn, nonce=self.served.nonce)

    def log(self) -> None:
        if self.conversation:
            _log(self.conversation, self.outcome, len(self.prompt_ids))


@dataclass(slots=True)
class Serving:
    """State of the plugin in the tokenizer process."""

    config: Config
    memory: SequenceMemory
    gate: Gate = field(default_factory=Gate)
    _unsupported: list[str] | None = None
    _not_in_one_step: list[str] = field(default_factory=lambda: ["the scheduler was not asked yet"])
    _one_batch: dict[str, int] = field(default_factory=dict)
    _admissions: dict[str, asyncio.Future[AdmissionReply]] = field(default_factory=dict)
    """By request id: what the scheduler will say of what was announced."""
    _aborted: dict[str, bool] = field(default_factory=dict)
    """Requests whose edits are being carried out, and whether somebody has aborted them meanwhile."""
    _tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    """Keeps what runs on its own from being collected."""

    # --- hooks ------------------------------------------------------------------------------------------------------

    async def generate(
        self, original: Generate, manager: Any, obj: Any, http_request: Any = None
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
        async with AsyncExitStack() as held:
            prepared = await self._prepare(original, manager, obj, http_request, text, held)
            async with aclosing(self._stream(original, manager, obj, http_request, prepared, held)) as stream:
                async for output in stream:
                    yield output

    async def _stream(
        self, original: Generate, manager: Any, obj: Any, http_request: Any, prepared: _Prepared, held: AsyncExitStack
    ) -> AsyncGenerator[Any, None]:
        """Serve the request itself; `held` keeps the conversation while edits are only announced."""
        _show(http_request, prepared)
        # Else they were checked as the note was followed.
        if prepared.served is None:
            check_vocabulary(obj.input_ids, compat.vocab_size(manager))
        deltas = bool(obj.stream) and compat.streams_deltas(manager)
        outputs: dict[str, array[int]] = {}
        announced = prepared.served.announced if prepared.served else None
        settling = self._announce(manager, prepared, announced, held) if announced else None
        try:
            # Closed with us, so that a caller who leaves is noticed at once.
            async with aclosing(original(manager, obj, http_request)) as stream:
                async for output in stream:
                    if settling is not None and announced is not None:
                        prepared = await self._settled(manager, prepared, announced, settling, output)
                        settling = None
                        _show(http_request, prepared)
                    for choice in output if isinstance(output, list) else [output]:
                        meta_info, output_ids = choice["meta_info"], array("i", choice.get("output_ids") or [])
                        seen = outputs.get(meta_info["id"])
                        outputs[meta_info["id"]] = seen + output_ids if deltas and seen else output_ids
                        if meta_info.get("finish_reason"):
                            meta_info[META_KEY] = prepared.outcome.model_dump(mode="json")
                            # Now, not when the stream is closed: the next turn may come before that.
                            prepared.remember(tuple(outputs.values()))
                    yield output
        finally:
            # In whatever way the request ended; a cancelled one lands here.
            if settling is not None and announced is not None:
                prepared = self._withdraw(manager, prepared, announced, settling)
            if outputs or settling is not None:
                prepared.remember(tuple(outputs.values()))

    def _announce(
        self, manager: Any, prepared: _Prepared, announced: Announced, held: AsyncExitStack
    ) -> asyncio.Task[_Prepared]:
        """Tell the scheduler; the task ends when it has done what was announced, and lets the next turn begin."""
        future = self._admissions[announced.request.request_id]

        async def settle() -> _Prepared:
            settled = prepared.served_as(await announced.settle(await future))
            settled.log()
            settled.remember(())
            await held.aclose()
            return settled

        compat.handle_in_tokenizer(manager, AdmissionReply, self._admitted)
        compat.tell_scheduler(manager, announced.request)
        return asyncio.create_task(settle())

    def _admitted(self, reply: AdmissionReply) -> None:
        future = self._admissions.get(reply.request_id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _settled(
        self,
        manager: Any,
        prepared: _Prepared,
        announced: Announced,
        settling: asyncio.Task[_Prepared],
        output: Any,
    ) -> _Prepared:
        """Return how the request was served, which the scheduler has said before its first output."""
        if (output["meta_info"].get("finish_reason") or {}).get("type") != "abort":
            # By another socket, so it may come a little later.
            await asyncio.wait([settling], timeout=self.config.timeout_s)
        return self._withdraw(manager, prepared, announced, settling)

    def _withdraw(
        self, manager: Any, prepared: _Prepared, announced: Announced, settling: asyncio.Task[_Prepared]
    ) -> _Prepared:
        """Wait no longer for what the scheduler says; what it has not done yet it is not to do."""
        request_id = announced.request.request_id
        self._admissions.pop(request_id, None)
        if not settling.done():
            settling.cancel()
            compat.tell_scheduler(manager, AdmissionRequest(request_id=request_id, cancel=True))
        elif settling.exception() is None:
            return settling.result()
        else:
            logger.error("leyline: what became of announced edits is not known", exc_info=settling.exception())
        prepared.log()
        prepared.remember(())
        return prepared

    def abort(self, original: Callable[..., Any], manager: Any, rid: str = "", abort_all: bool = False) -> Any:
        """Stand around `TokenizerManager.abort_request`, which knows nothing of a request between our own steps."""
        for editing in self._aborted:
            if abort_all or editing == rid:
                self._aborted[editing] = True
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

    # --- routes -----------------------------------------------------------------------------------------------------

    def not_in_one_step(self) -> list[str]:
        """Return why R is computed in a batch before its request; empty where both share one."""
        return self._not_in_one_step if self.config.one_step else ["LEYLINE_ONE_STEP is off on this server"]

    async def unsupported(self, manager: Any) -> list[str]:
        """Return why this server cannot splice at all; empty where it can. Asked of the scheduler once."""
        if self._unsupported is None:
            reply = await self._ask(manager, CacheRequest(capabilities=True))
            if reply.reason:
                return [reply.message]
            answer = json.loads(reply.message)
            self._unsupported, self._not_in_one_step = answer["unsupported"], answer["not_in_one_step"]
            self._one_batch = answer["one_batch"]
        return self._unsupported

    async def splice(self, manager: Any, http_request: Any, body: SpliceRequest) -> SpliceReply:
        """Carry out explicit directives on ids that the caller knows to be cached.

        Raises:
            PlanError: nothing could be done; with the reason.
        """
        await self._check_server(manager)
        check_namespace(body.extra_key, body.cache_salt)
        vocab_size = compat.vocab_size(manager)
        base_ids = checked_ids(body.base_ids, vocab_size)
        new_ids = await asyncio.to_thread(_edited, base_ids, body.directives, vocab_size)
        if len(new_ids) >= compat.context_tokens(manager):
            raise PlanError(
                f"the edited sequence has {len(new_ids)} tokens, the model's context {compat.context_tokens(manager)}",
                reason=Reason.BAD_DIRECTIVES,
            )
        conversation = self.memory.open((body.extra_key, body.cache_salt or None), body.conversation)
        like = compat.new_request(body.extra_key, body.cache_salt)
        generate = compat.plain_generate(manager)
        turn = self._turn(generate, manager, like, http_request, conversation, new_ids)
        async with conversation.lock:
            before = await turn.look(base_ids)
            in_own = conversation.has_namespace and before.base_own >= before.base_shared
            forgets = any(directive.mode is Mode.FORGET for directive in body.directives)
            cached, last_end = max(before.base_own, before.base_shared), body.directives[-1].end
            if not forgets and cached <= body.directives[0].end:
                # Here a prefill would be for nothing: no request follows that goes on from it.
                raise PlanError(
                    f"{cached} of the base's {len(base_ids)} tokens are cached; the edits end at {last_end}",
                    reason=Reason.EVICTED,
                )
            served = await turn.splice(base_ids, list(body.directives), base_in_own=in_own, scrub=body.scrub)
            conversation.explicit_edits = (*conversation.explicit_edits, *served.edits)[-_MAX_EXPLICIT_EDITS:]
            look = await turn.look()
        _log(conversation, served.outcome, len(new_ids))
        if served.outcome.status is Status.REFUSED:
            assert served.outcome.reason is not None
            raise PlanError(served.outcome.message or "refused", reason=served.outcome.reason)
        return SpliceReply(outcome=served.outcome, token_ids=tuple(new_ids[: max(look.new_own, look.new_shared)]))

    async def release(self, manager: Any, found: list[Conversation], *, scrub: bool) -> ReleaseReply:
        """Free what conversations have in namespaces of their own, and forget their turns.

        Raises:
            PlanError: the scheduler could not do it; with the reason.
        """
        await self._check_server(manager)
        total = Purge()
        for conversation in found:
            async with conversation.lock:
                tags = (*conversation.closing, salt_of(self.config, conversation))
                self.memory.close_namespace(conversation)
                conversation.closing = list(tags)
                request = CacheRequest(
                    extra_key=conversation.scope[0],
                    own_salt=salt_of(self.config, conversation),
                    close=tags,
                    scrub=scrub,
                )
                reply = await self._ask(manager, request)
                if reply.reason:
                    raise PlanError(reply.message, reason=Reason(reply.reason))
                conversation.closing.clear()
            total = Purge(
                dropped_tokens=total.dropped_tokens + reply.dropped,
                held_tokens=total.held_tokens + reply.held,
                scrubbed_tokens=reply.scrubbed,
            )
        facts = {"event": "release", "conversation": found[0].hashed_id, **total.model_dump()}
        logger.info("leyline: %s", json.dumps(facts))
        return ReleaseReply(conversation_hash=found[0].hashed_id, purge=total)

    async def state(self, manager: Any, found: list[Conversation]) -> ConversationState:
        """Return what is cached of conversations of one id, and their edits."""
        await self._check_server(manager)
        turns: list[TurnState] = []
        explicit: list[PastEdit] = []
        own_tokens = 0
        for conversation in found:
            extra_key, caller_salt = conversation.scope
            own = salt_of(self.config, conversation)
            for turn_id, turn in list(conversation.turns.items()):
                longest = max(turn.sequences(), key=len)
                look = await self._ask(
                    manager,
                    CacheRequest(base=pack(longest), extra_key=extra_key, shared_salt=caller_salt, own_salt=own),
                )
                turns.append(
                    TurnState(
                        turn=turn_id,
                        prompt_tokens=len(turn.prompt_ids),
                        output_tokens=len(longest) - len(turn.prompt_ids),
                        cached_tokens=look.base_own if turn.in_own else look.base_shared,
                        own_namespace=turn.in_own,
                        edits=tuple(PastEdit(**asdict(edit)) for edit in turn.edits),
                    )
                )
            explicit.extend(PastEdit(**asdict(edit)) for edit in conversation.explicit_edits)
            counted = await self._ask(manager, CacheRequest(extra_key=extra_key, own_salt=own, count_own=True))
            own_tokens += counted.own_tokens
        return ConversationState(
            conversation_hash=found[0].hashed_id,
            own_tokens=own_tokens,
            turns=tuple(turns),
            explicit_edits=tuple(explicit),
        )

    def find(self, conversation_id: str, scope: Scope) -> list[Conversation]:
        """Return the conversation of this id in the caller's namespace.

        Raises:
            PlanError: there is none; with the reason.
        """
        check_namespace(*scope)
        found = self.memory.find(scope, conversation_id)
        return _live([] if found is None else [found], "for this extra_key and cache_salt")

    def find_hashed(self, hashed_id: str) -> list[Conversation]:
        """Return the conversations of this hashed id, one for each caller's namespace. Raises as `find`."""
        return _live(self.memory.find_hashed(hashed_id), "by that hash")

    # --- one noted request ------------------------------------------------------------------------------------------

    async def _prepare(
        self, generate: Generate, manager: Any, obj: Any, http_request: Any, text: Any, held: AsyncExitStack
    ) -> _Prepared:
        """Carry out the note and point the request at the namespace to be served from.

        Where the edits are only announced, `held` keeps the conversation's lock.
        """
        turn_id = None
        try:
            # A long one would stop every stream meanwhile.
            note = (
                parse_note(text, max_bytes=self.config.max_note_bytes)
                if isinstance(text, str) and len(text) <= _SHORT_NOTE
                else await asyncio.to_thread(parse_note, text, max_bytes=self.config.max_note_bytes)
            )
            turn_id = note.turn
            await self._check_server(manager)
            check_namespace(obj.extra_key, obj.cache_salt)
            if isinstance(obj.extra_key, list) or isinstance(obj.cache_salt, list):
                raise PlanError("this request cannot be spliced: it has lists of cache keys", reason=_UNSUPPORTED)
            scope = (obj.extra_key, obj.cache_salt or None)
            known = self.memory.find(scope, note.conversation)
            if known is not None:
                # Also where nothing can be spliced: what such a request caches is to be forgotten with the rest.
                tag_request(obj, salt_of(self.config, known))
            check_request(obj)
            prompt_ids = checked_ids(obj.input_ids, compat.vocab_size(manager))
            if len(obj.input_ids) >= compat.context_tokens(manager):
                raise PlanError("the prompt is longer than the model's context", reason=_UNSUPPORTED)
            if isinstance(obj.rid, str) and compat.is_running(manager, obj.rid):
                raise PlanError("another request runs under this rid", reason=_UNSUPPORTED)
        except PlanError as error:
            return _Prepared(_refused(error, turn_id))
        conversation = self.memory.open(scope, note.conversation)
        served = await self._carry_out(generate, manager, obj, http_request, note, conversation, prompt_ids, held)
        if known is None and served.outcome.purge is not None:
            served = replace(served, outcome=served.outcome.model_copy(update={"message": _NEVER_SEEN}))
        obj.cache_salt = served.cache_salt
        tag_request(obj, served.tag)
        prepared = _Prepared(served.outcome, served, self.memory, conversation, note.turn, prompt_ids)
        if served.announced is None:
            prepared.log()
        if served.announced is None or not served.announced.edits:
            prepared.remember(())
        return prepared

    async def _carry_out(
        self,
        generate: Generate,
        manager: Any,
        obj: Any,
        http_request: Any,
        note: Note,
        conversation: Conversation,
        prompt_ids: array[int],
        held: AsyncExitStack,
    ) -> Served:
        if obj.rid is None and not num_choices(obj) > 1:
            obj.rid = uuid.uuid4().hex
        rid = obj.rid if isinstance(obj.rid, str) else uuid.uuid4().hex
        # What aborts the request of a caller who leaves asks for it, and the engine sets it only later.
        obj.is_single = True
        turn = self._turn(generate, manager, obj, http_request, conversation, prompt_ids, note.turn, rid)
        if not self.not_in_one_step() and obj.rid == rid and num_choices(obj) == 1 and rid not in self._admissions:
            turn.request_id, turn.one_batch = rid, self._one_batch
            self._admissions[rid] = asyncio.get_running_loop().create_future()
        self._aborted[rid] = False
        served = None
        try:
            await held.enter_async_context(conversation.lock)
            served = await turn.carry_out(note)
            return served
        except TimeoutError:
            return self._plain(conversation, _refused(PlanError(self._late(), reason=Reason.TIMEOUT), note.turn))
        except PlanError as error:
            return self._plain(conversation, _refused(error, note.turn))
        except Exception as error:
            # A boundary: whatever we did wrong, the request is answered. A caller who has left is the engine's affair.
            if http_request is not None and await http_request.is_disconnected():
                raise
            logger.exception("leyline: conversation %s is served without its edits", hash_id(note.conversation))
            problem = PlanError(f"{type(error).__name__}: {error}", reason=Reason.INTERNAL_ERROR)
            return self._plain(conversation, _refused(problem, note.turn))
        finally:
            if served is None or served.announced is None or not served.announced.edits:
                await held.aclose()
            if (served is None or served.announced is None) and turn.request_id is not None:
                self._admissions.pop(rid, None)
            if self._aborted.pop(rid, False):
                self._in_background(_abort_when_dispatched(manager, rid))

    def _plain(self, conversation: Conversation, outcome: Outcome) -> Served:
        """Serve the request as any other one, from the caller's own namespace."""
        tag = salt_of(self.config, conversation)
        return Served(outcome, conversation.scope[1], tag, conversation.nonce)

    def _turn(
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
            if finish.get("type") == "abort" or (rid is not None and self._aborted.get(rid)):
                raise PlanError(f"the prefill of R was aborted: {finish.get('message')}", reason=Reason.ABORTED)
            return int(meta_info["prompt_tokens"]) - int(meta_info["cached_tokens"])

        return Turn(
            config=self.config,
            memory=self.memory,
            gate=self.gate,
            conversation=conversation,
            ask=lambda request: self._ask(manager, request),
            prefill=prefill,
            new_ids=new_ids,
            vocab_size=compat.vocab_size(manager),
            turn_id=turn_id,
            last_position=None if turn_id is None else len(new_ids) - 1,
        )

    async def _check_server(self, manager: Any) -> None:
        if not self.config.enabled:
            raise PlanError("LEYLINE_ENABLED is off on this server", reason=Reason.DISABLED)
        try:
            reasons = await self.unsupported(manager)
        except TimeoutError as error:
            raise PlanError(self._late(), reason=Reason.TIMEOUT) from error
        if reasons:
            raise PlanError("; ".join(reasons), reason=Reason.UNSUPPORTED_SERVER)

    def _late(self) -> str:
        return f"the scheduler did not answer within {self.config.timeout_s} s"

    async def _ask(self, manager: Any, request: CacheRequest) -> CacheReply:
        # Shielded: cancelled here, a caller would leave its answer to the next caller of the communicator.
        answer = self._in_background(compat.ask_scheduler(manager, request))
        replies = await asyncio.wait_for(asyncio.shield(answer), self.config.timeout_s)
        reply: CacheReply = replies[0]
        return reply

    def _in_background(self, work: Any) -> asyncio.Future[Any]:
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _abort_when_dispatched(manager: Any, rid: str) -> None:
    """Abort a request that was aborted before the engine knew it: as soon as the scheduler has it."""
    while not compat.is_dispatched(manager, rid):
        await asyncio.sleep(0.005)
        if not compat.is_running(manager, rid):
            return
    manager.abort_request(rid=rid)


def _edited(base_ids: array[int], directives: tuple[Directive, ...], vocab_size: int) -> array[int]:
    check_directives(directives, base_tokens=len(base_ids), vocab_size=vocab_size)
    return array("i", apply_directives(base_ids, directives))


def _live(found: list[Conversation], how: str) -> list[Conversation]:
    live = [known for known in found if known.has_namespace or known.turns or known.closing]
    if not live:
        raise PlanError(
            f"no such conversation is remembered here, {how}: it never came, was released, pushed out or flushed, or "
            "the server has restarted",
            reason=Reason.UNKNOWN_CONVERSATION,
        )
    return live


def _show(http_request: Any, prepared: _Prepared) -> None:
    """Put the outcome where the response header is made from; the first chunk is made before the headers go out."""
    if http_request is not None:
        http_request.scope[SCOPE_KEY] = prepared.outcome


def _refused(error: PlanError, turn_id: str | None) -> Outcome:
    return Outcome(status=Status.REFUSED, reason=Reason(error.reason), message=str(error)[:_MAX_MESSAGE], turn=turn_id)


def _log(conversation: Conversation, outcome: Outcome, prompt_tokens: int) -> None:
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
