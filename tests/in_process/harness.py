"""A world in one process: SGLang's real radix tree, allocator, pool and batches, our real code on both sides.

`engine.py` has the scheduler's process; here is the tokenizer's, with `Serving` and the hook around `generate_request`
as they run in a server. What cannot be had without its process is stood in for by `stand_ins.py`, and nothing else.

A turn's edits are carried out in two steps of the scheduler or, in a world of `one_step`, in the batch of the turn's
own request, as its attention backend would allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from leyline_sglang import compat, find_directives, one_step
from leyline_sglang.config import Config
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply, CacheRequest
from leyline_sglang.noted_request import generate
from leyline_sglang.sequences import SequenceMemory
from leyline_sglang.serving import Serving

from leyline_agent.core.protocol import NOTE_KEY
from tests.in_process.engine import Engine
from tests.in_process.model import Namespace
from tests.in_process.requests import NoRoomError, Running
from tests.in_process.rows import Row
from tests.in_process.stand_ins import Inline, Loop, make_manager

CORES = ("rust", "python")

UNBOUNDED = {"_MAX_SEQUENCES": 1 << 30, "_TOKENS_PER_SLOT": 1 << 30, "_TOKENS_PER_SLOT_OF_A_TAG": 1 << 30}
"""The footprints' bounds, put out of the way of pools as small as these."""

PATIENCE = 4
"""Batches with nothing in them after which a request is turned away. A scheduler would let it wait for others to end,
which here would have to be asked to."""


class SameIdError(ValueError):
    """What SGLang's tokenizer manager answers to a request whose id another one has that still runs."""


class World(Engine):
    """One server, as far as its cache goes. Use as a context manager."""

    def __init__(
        self,
        core: str,
        *,
        size: int = 96,
        max_running: int = 8,
        max_prefill_tokens: int = 1024,
        chunked_prefill_size: int | None = None,
        config: Config | None = None,
        bounded: bool = False,
        one_step: bool = False,
    ) -> None:
        """Make an empty one; `bounded` is for conversations with more sequences than the scheduler remembers."""
        super().__init__(
            core,
            size=size,
            max_running=max_running,
            max_prefill_tokens=max_prefill_tokens,
            chunked_prefill_size=chunked_prefill_size,
            bounded=bounded,
        )
        self.config = config or Config(secret="a secret of the tests", turns_per_conversation=4)
        self.between: Callable[[str], None] | None = None
        """Called after each message to the scheduler ("ask") and prefill of R ("prefill"), where others come in."""
        self._served: list[tuple[Any, tuple[Namespace, list[Row]]]] = []
        """What requests were served with from the cache, of which nobody has asked yet."""
        self.engine_hears = True
        """Whether the engine hears at once that the caller of a waiting request has left; else when it is admitted."""
        self.given_up = False
        """A check has failed: what still runs is not ended, for that would fail too and hide why."""

        self.manager = make_manager(self._tell_scheduler, self._communicate, self._generate_request)
        self.serving = Serving(self.config, _memory(self.config))
        # Asked once by each server and always the same; `test_the_world_may_be_spliced` asks.
        self.serving._unsupported = []
        self.serving.one_batch = compat.one_batch(self.scheduler)
        self.set_one_step(one_step)
        self._loop = Loop()
        self._loop.set_default_executor(Inline(max_workers=1))
        self._installed.enter_context(patch.object(find_directives, "_THREADS", Inline(max_workers=1)))

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the event loop, and leave SGLang's code as it was."""
        self.given_up = True
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        super().close()

    def set_one_step(self, one_step: bool) -> None:
        """Say whether R may be computed in the batch of its request from now on."""
        self.serving._not_in_one_step = [] if one_step else ["this world takes two steps"]

    # --- time -------------------------------------------------------------------------------------------------------

    def begin(self, awaitable: Awaitable[Any]) -> Any:
        """Let something run until it has to wait for the scheduler; return its task."""

        async def run() -> Any:
            return await awaitable

        async def start() -> Any:
            task = self._loop.create_task(run())
            await self._loop.idle()
            return task

        return self._run_loop(start())

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Let it run, the scheduler doing one batch after the other, until it is done; return its result."""
        return self.wait_for(self.begin(awaitable))

    def wait_for(self, task: Any) -> Any:
        """The same, of what has begun."""

        async def go_on() -> Any:
            num_empty = 0
            await self._loop.idle()
            while not task.done():
                if self.replies:
                    self.deliver()
                elif self.has_work:
                    num_empty = 0 if self.step() else num_empty + 1
                    if num_empty == PATIENCE:
                        self.waiting.pop(0).answer(False)
                        num_empty = 0
                else:
                    # An answer was lost.
                    self._loop.skipped_s += self.config.timeout_s
                    num_empty += 1
                    assert num_empty < PATIENCE, "nothing goes on any more"
                await self._loop.idle()
            return task.result()

        return self._run_loop(go_on())

    def batch(self, *, deliver: bool = True) -> bool:
        """Have the scheduler do one batch; what it says of its own accord arrives now, or later.

        Return whether there was anything that it could take.
        """

        async def go_on() -> bool:
            took_any = self.step()
            if deliver:
                self.deliver()
            await self._loop.idle()
            return took_any

        return bool(self._run_loop(go_on()))

    def deliver(self) -> None:
        """Have what the scheduler has said arrive."""
        replies, self.replies[:] = list(self.replies), []
        for reply in replies:
            handler = self.manager._result_dispatcher._mapping.get(AdmissionReply)
            assert handler is not None, "nobody takes up what the scheduler says"
            handler(reply)

    def _run_loop(self, awaitable: Any) -> Any:
        try:
            return self._loop.run_until_complete(awaitable)
        except BaseException as error:
            if isinstance(error, AssertionError):
                self.failure = self.failure or error
            raise
        finally:
            if self.failure is not None and not self.given_up:
                raise self.failure

    def flush(self, *, is_paused: bool = False) -> bool:
        """Empty the cache; refused where requests run or, unless generation is paused, wait."""

        async def flush(_manager: Any) -> Any:
            is_idle = not self.running and (is_paused or not self.has_work)
            if is_idle:
                self.empty()
            return SimpleNamespace(success=is_idle)

        result = self._run_loop(self.serving.reset(flush, self.manager))
        self.check()
        return bool(result.success)

    def reset(self, is_emptied: bool) -> None:
        """Do at once what an update of weights does; with `flush_cache: false`, or busy, it leaves the cache be."""
        if is_emptied and not self.running and not self.has_work:
            self.empty()
        self.serving.memory.forget_all()
        self.check()

    # --- what stands below our hooks --------------------------------------------------------------------------------

    async def _communicate(self, request: CacheRequest) -> list[CacheReply]:
        try:
            self._check_nothing_is_awaited({request.own_salt, *request.close})
            reply = self.ask(request)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        if self.between is not None and not request.capabilities:
            self.between("ask")
        return [reply]

    def _tell_scheduler(self, request: AdmissionRequest) -> None:
        if request.steps:
            with self.noted_failure():
                self._check_nothing_is_awaited({request.own_salt})
        one_step.announce(self.scheduler, request)

    def _check_nothing_is_awaited(self, tags: set[str | None]) -> None:
        """Check that a conversation does nothing while edits of its own are announced."""
        for announced in one_step._ANNOUNCED.get(self.scheduler, {}).values():
            assert not announced.steps or announced.own_salt not in tags, "a turn does not wait for the edits before it"

    async def _generate_request(self, obj: Any, http_request: Any = None) -> AsyncIterator[Any]:
        async for chunk in generate(self.serving, self.generate, self.manager, obj, http_request):
            yield chunk

    async def generate(self, manager: Any, obj: Any, http_request: Any = None) -> AsyncIterator[Any]:
        """Stand in for `TokenizerManager.generate_request` below our hook. Yields one output token a chunk.

        The tokens come from `sampling_params["custom_params"]["outputs"]`, a string of their ids. Of `n` choices each
        leaves out one token more of it; as in SGLang the prompt is prefilled alone before them. Here they follow on
        one another.
        """
        params = obj.sampling_params or {}
        custom = params.get("custom_params") or {}
        outputs = [int(token) for token in custom.get("outputs", "").split()] if params["max_new_tokens"] else []
        num_choices = params.get("n", 1)
        if obj.rid in manager.rid_to_state:
            raise SameIdError(f"Duplicate request ID detected: {obj.rid}")
        if num_choices > 1:
            async for chunk in self._serve(obj, custom.get(NOTE_KEY), []):
                if chunk["meta_info"]["finish_reason"]["type"] == "abort":
                    yield chunk
                    return
        for choice in range(num_choices):
            async for chunk in self._serve(obj, custom.get(NOTE_KEY), outputs[choice:], is_first=num_choices == 1):
                yield chunk

    async def _serve(
        self, obj: Any, tag: str | None, outputs: Sequence[int], *, is_first: bool = True
    ) -> AsyncIterator[Any]:
        """Serve one request of the scheduler's; what the first one has from the cache is kept for `take_served`."""
        running = self.submit(
            obj.input_ids, (obj.extra_key, obj.cache_salt), tag, rid=obj.rid, max_new_tokens=len(outputs)
        )
        running.admitted = self._loop.create_future()
        self.manager.rid_to_state[running.req.rid] = SimpleNamespace(dispatched=True)
        try:
            is_admitted = await running.admitted
            if is_admitted:
                if is_first and not compat.is_internal(obj):
                    self._served.append((obj, (running.namespace, running.served_rows)))
                async for chunk in self._decode(obj, running, outputs):
                    yield chunk
            else:
                yield _chunk(obj, running, {"type": "abort", "message": "no room, or given up"})
        except AssertionError as error:
            self.failure = self.failure or error
            raise
        finally:
            del self.manager.rid_to_state[running.req.rid]
            if self.failure is None and not self.given_up:
                self._leave(running)

    async def _decode(self, obj: Any, running: Running, outputs: Sequence[int]) -> AsyncIterator[Any]:
        finish = {"type": "length"}
        try:
            for token in outputs[:-1]:
                await self._is_running(running)
                self.decode(running, token)
                yield _chunk(obj, running, None)
            if outputs:
                await self._is_running(running)
                self.decode(running, outputs[-1])
            self.finish(running)
        except NoRoomError:
            if running in self.running:
                self.finish(running, aborted=True)
        if self.between is not None and compat.is_internal(obj):
            self.between("prefill")
        yield _chunk(obj, running, finish)

    async def _is_running(self, running: Running) -> None:
        """Wait until a request that was retracted runs again.

        Raises:
            NoRoomError: there was no room for it.
        """
        assert running.admitted is not None
        if not await running.admitted:
            raise NoRoomError

    def retract(self, running: Running) -> None:
        """Have a request wait again; what it has generated stays."""
        super().retract(running)
        if running.admitted is not None and running.admitted.done():
            running.admitted = self._loop.create_future()

    def _leave(self, running: Running) -> None:
        if running in self.waiting and not self.engine_hears:
            running.is_left = True
        else:
            self.leave(running)

    def take_served(self, obj: Any) -> tuple[Namespace, list[Row]] | None:
        """Return what a request was served with from the cache; None where it was not served."""
        found = [served for other, served in self._served if other is obj]
        self._served = [(other, served) for other, served in self._served if other is not obj]
        return found[0] if found else None

    def announced(self) -> Iterable[str]:
        """Return the ids of requests that something is announced for."""
        return list(one_step._ANNOUNCED.get(self.scheduler, {}))


def _memory(config: Config) -> SequenceMemory:
    return SequenceMemory(
        turns_per_conversation=config.turns_per_conversation,
        conversation_memory_tokens=config.conversation_memory_tokens,
        memory_tokens=config.memory_tokens,
        scope_memory_tokens=config.scope_memory_tokens,
        max_conversations=config.max_conversations,
    )


def _chunk(obj: Any, running: Running, finish: dict[str, Any] | None) -> dict[str, Any]:
    meta_info = {
        "id": running.req.rid,
        "prompt_tokens": len(obj.input_ids),
        "cached_tokens": running.served,
        "finish_reason": finish,
    }
    return {"meta_info": meta_info, "output_ids": running.outputs.tolist()}
