"""A world in one process: SGLang's real radix tree, allocator and pool, our real code on both sides, a small engine.

A scheduler and a tokenizer manager cannot be had without their processes, so two small objects stand in for them: what
our code asks of them is here, and nothing else. The tree, the allocator, the pools and the request objects are
SGLang's; `splice.handle`, the footprints and `Serving` are ours, as they run in a server. The engine here does what the
scheduler does with one request at a time: match, lock, allocate, compute the missing rows, insert, decode, release.

After every operation everything is compared with the plain model of `model.py`: which tokens are cached in which
slots, every row of the pool, slots that are free, held or evictable, and whose influence each row carries.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from leyline_sglang import compat, footprints, namespaces, splice, turn_splice
from leyline_sglang.config import Config
from leyline_sglang.io_types import CacheReply, CacheRequest
from leyline_sglang.noted_request import generate
from leyline_sglang.sequences import SequenceMemory
from leyline_sglang.serving import Serving
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from leyline_agent.core.protocol import NOTE_KEY
from tests.in_process.mirror import Mirror, is_own
from tests.in_process.model import Model, Namespace, Node
from tests.in_process.rows import (
    EMPTY_STATE,
    KV_LORA_RANK,
    MAX_POSITIONS,
    NUM_LAYERS,
    ROPE_DIM,
    VOCAB_SIZE,
    Row,
    attended,
    digest_of,
    make_rotary,
    read_digests,
    write_row_,
)

CORES = ("rust", "python")
_MAX_RUNNING = 8


UNBOUNDED = {"_MAX_SEQUENCES": 1 << 30, "_TOKENS_PER_SLOT": 1 << 30, "_TOKENS_PER_SLOT_OF_A_TAG": 1 << 30}
"""The footprints' bounds, put out of the way of pools as small as these."""


class NoRoomError(Exception):
    """The pool cannot take the request now; a scheduler would let it wait."""


class _Allocator(TokenToKVPoolAllocator):
    """The real allocator, which also says what was freed."""

    def __init__(self, size: int, pool: MLATokenToKVPool) -> None:
        self.freed: list[int] = []
        super().__init__(size, dtype=torch.float32, device="cpu", kvcache=pool, need_sort=False)

    def free(self, free_index: torch.Tensor) -> None:
        self.freed.extend(free_index.tolist())
        super().free(free_index)


class _Inline(ThreadPoolExecutor):
    """Runs what is handed to a thread at once: nothing here depends on threads, and starting one takes longer."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@contextmanager
def predictable_secrets(seed: int) -> Iterator[None]:
    """Have nonces and edit ids follow from `seed`, so that a run can be repeated."""
    generator = random.Random(seed)
    stand_in = SimpleNamespace(token_hex=lambda num_bytes: generator.randbytes(num_bytes).hex())
    with patch.object(namespaces, "secrets", stand_in), patch.object(turn_splice, "secrets", stand_in):
        yield


@dataclass(eq=False, slots=True)
class Running:
    """A request in the engine. It reads the rows of `view`, whoever owns their slots."""

    req: Req
    namespace: Namespace
    tag: str | None
    view: list[Row]
    held: list[Node]
    """Cached nodes that it has locked."""
    served: int
    """Tokens of the prompt that came from the cache."""
    outputs: array[int] = field(default_factory=lambda: array("i"))

    def slots(self, req_to_token: torch.Tensor) -> list[int]:
        """Return the slots of all its rows."""
        return req_to_token[self.req.kv.req_pool_idx, : self.req.kv.kv_allocated_len].tolist()


class World:
    """One server, as far as its cache goes. Use as a context manager."""

    def __init__(self, core: str, *, size: int = 96, config: Config | None = None, bounded: bool = False) -> None:
        """Make an empty one; `bounded` is for conversations with more sequences than the scheduler remembers."""
        self.bounded = bounded
        self.config = config or Config(secret="a secret of the tests", turns_per_conversation=4)
        pool = MLATokenToKVPool(
            size=size,
            page_size=1,
            dtype=torch.float32,
            kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=ROPE_DIM,
            layer_num=NUM_LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.buffers: list[torch.Tensor] = list(pool.kv_buffer)
        self.allocator = _Allocator(size, pool)
        self.req_to_token = ReqToTokenPool(
            size=_MAX_RUNNING, max_context_len=MAX_POSITIONS, device="cpu", enable_memory_saver=False
        )
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.scheduler = _scheduler(self)
        self.mirror = Mirror(size, self.slots_of, self.actor_of)
        self.running: list[Running] = []
        self.actors: dict[str, str] = {}
        """Who first used a namespace of its own."""
        self.actor = "nobody"
        """Who is being served now."""
        self.between: Callable[[str], None] | None = None
        """Called after each message to the scheduler ("ask") and prefill of R ("prefill"), where others come in."""
        self.served: list[tuple[Namespace, list[Row]]] = []
        """What each request so far was served with from the cache."""
        self.failure: BaseException | None = None
        """The first check that failed inside of the code under test, which may have caught it."""
        self.given_up = False
        """A check has failed: what still runs is not ended, for that would fail too and hide why."""
        self._numbers = itertools.count()

        self.manager = _manager(self)
        self.serving = Serving(self.config, _memory(self.config))
        # Asked once by each server and always the same; `test_the_world_may_be_spliced` asks.
        self.serving._unsupported = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Inline(max_workers=1))

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Run until it is done, and return its result."""

        async def run() -> Any:
            return await awaitable

        try:
            return self._loop.run_until_complete(run())
        finally:
            if self.failure is not None and not self.given_up:
                raise self.failure

    @property
    def model(self) -> Model:
        """What must be cached."""
        return self.mirror.model

    def actor_of(self, own_salt: str) -> str:
        """Return who was the first to use a namespace of its own: the rows there are for nobody else."""
        return self.actors.setdefault(own_salt, self.actor)

    def slots_of(self, namespace: Namespace, token_ids: Sequence[int]) -> list[int]:
        """Return the slots of the longest cached prefix. Splits nodes and marks them as used, as any match does."""
        key = RadixKey(array("q", token_ids), namespace[0], cache_salt=namespace[1])
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        slots: list[int] = self.tree.path_device_indices(found.last_device_node)[: found.device_prefix_len].tolist()
        return slots

    # --- the scheduler's half ---------------------------------------------------------------------------------------

    def ask(self, request: CacheRequest) -> CacheReply:
        """Send one message to the scheduler and compare what it does and says with the model."""
        if request.own_salt is not None:
            self.actor_of(request.own_salt)
        # A message first drops what is due of closed tags; here that is done before, to tell the two apart.
        self._drop_what_was_held(None)
        self.allocator.freed.clear()
        available = self.allocator.available_size()
        reply = splice.handle(self.scheduler, request)
        if not request.capabilities:
            if request.scrub:
                self._check_scrubbed(reply, all_of_it=not request.move)
            self.mirror.answered(request, reply, set(self.allocator.freed), available)
            self.check()
        return reply

    def _check_scrubbed(self, reply: CacheReply | None = None, *, all_of_it: bool = True) -> None:
        if all_of_it:
            free = [0, *self.free_slots()]
            for buffer in self.buffers:
                assert not buffer[free].any(), "a free slot is not zero after a scrub"
            assert reply is None or reply.scrubbed == len(free) - 1

    def free_slots(self) -> list[int]:
        """Return the allocator's free slots."""
        slots: list[int] = [*self.allocator.free_pages.tolist(), *self.allocator.release_pages.tolist()]
        return slots

    # --- the engine -------------------------------------------------------------------------------------------------

    def start(self, token_ids: Sequence[int], namespace: Namespace, tag: str | None = None) -> Running:
        """Prefill a request and cache its prompt, as the scheduler does with a new request.

        Raises:
            NoRoomError: the pool cannot take it; nothing has changed.
        """
        if len(self.running) == _MAX_RUNNING:
            raise NoRoomError
        ids = array("q", token_ids)
        req = Req(f"{next(self._numbers)}", "", ids, SamplingParams(), extra_key=namespace[0], cache_salt=namespace[1])
        req.init_next_round_input(self.tree)
        nodes = self.model.match(namespace, ids[:-1])
        assert req.prefix_len == len(nodes), f"{req.prefix_len} tokens are cached, the model says {len(nodes)}"
        prefix_slots = self.tree.prefix_device_indices(req)[: req.prefix_len]
        req.lock = self.tree.lock(req.last_node)
        _hold(nodes, 1)
        slots = self._allocate(len(ids) - len(nodes))
        if slots is None:
            self.tree.unlock(req.lock)
            _hold(nodes, -1)
            raise NoRoomError
        self.req_to_token.alloc([req])
        row_idx = req.kv.req_pool_idx
        self.req_to_token.write((row_idx, slice(0, len(nodes))), prefix_slots)
        self.req_to_token.write((row_idx, slice(len(nodes), len(ids))), slots)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = len(ids)
        self._check_served(namespace, nodes)
        running = Running(req, namespace, tag, [_row(node) for node in nodes], nodes, len(nodes))
        self.running.append(running)
        self.served.append((namespace, list(running.view)))
        self._compute(running, range(len(nodes), len(ids)), list(ids))
        self._checkpoint(running)
        self._drop_what_was_held(req)
        self.check()
        return running

    def decode(self, running: Running, token: int) -> None:
        """Take `token` as the next output and compute the row of the one before it.

        Raises:
            NoRoomError: there is no slot; nothing has changed.
        """
        req = running.req
        if req.output_ids:
            slots = self._allocate(1)
            if slots is None:
                raise NoRoomError
            at = req.kv.kv_allocated_len
            self.req_to_token.write((req.kv.req_pool_idx, slice(at, at + 1)), slots)
            req.kv.kv_allocated_len = req.kv.kv_committed_len = at + 1
            self._compute(running, range(at, at + 1), [*req.origin_input_ids, *req.output_ids])
        req.output_ids.append(token)
        running.outputs.append(token)
        self._drop_what_was_held(req)
        self.check()

    def finish(self, running: Running, *, aborted: bool = False) -> None:
        """End a request: what it has computed is cached, what it held is let go."""
        req = running.req
        req.finished_reason = FINISH_ABORT("gone") if aborted else FINISH_LENGTH(len(req.output_ids))
        req.refresh_fill_ids()
        self._checkpoint(running)
        # The rest of SGLang's `release_kv_cache`, which needs a server's published configuration.
        assert req.kv.cache_protected_len == req.kv.kv_allocated_len
        self.tree.unlock(req.lock)
        req.lock = None
        self.req_to_token.free(req)
        req.kv.mark_kv_released()
        _hold(running.held, -1)
        self.running.remove(running)
        self._drop_what_was_held(req)
        self.check()

    def evict(self, num_tokens: int) -> None:
        """Evict as much as a full pool would ask for."""
        self.allocator.freed.clear()
        evictable = self.model.num_evictable()
        self.tree.evict(EvictParams(num_tokens=num_tokens))
        gone = self.model.drop_slots(set(self.allocator.freed))
        assert min(num_tokens, evictable) <= len(gone)
        self.check()

    def flush(self) -> bool:
        """Empty the cache, unless requests run."""
        if self.running:
            return False

        async def flush(_manager: Any) -> Any:
            self.tree.reset()
            footprints.forget_footprints(self.tree)
            self.allocator.clear()
            self.req_to_token.clear()
            self.mirror.clear()
            return SimpleNamespace(success=True)

        self.wait(self.serving.reset(flush, self.manager))
        self.check()
        return True

    def _allocate(self, num_slots: int) -> torch.Tensor | None:
        available = self.allocator.available_size()
        if available + self.tree.evictable_size() < num_slots:
            return None
        self.allocator.freed.clear()
        self.allocator.evict_to_free_tokens(self.tree, num_slots)
        gone = self.model.drop_slots(set(self.allocator.freed))
        assert bool(gone) == (available < num_slots)
        slots: torch.Tensor = self.allocator.alloc(num_slots)
        return slots

    def _compute(self, running: Running, positions: range, token_ids: Sequence[int]) -> None:
        """Do a forward pass: read the rows that are attended to out of the pool, and write the new ones."""
        slots = self.req_to_token.req_to_token[running.req.kv.req_pool_idx, : positions.stop].to(torch.int64)
        state = EMPTY_STATE
        for digest in read_digests(self.buffers, slots[: positions.start]):
            state = attended(state, digest)
        influences = running.view[-1].influences if running.view else frozenset()
        for position in positions:
            token = token_ids[position]
            digest = digest_of(state, token, position)
            write_row_(self.buffers, int(slots[position]), token, position, digest)
            state = attended(state, digest)
        # The model's own view of it, from its rows instead of the pool's.
        state = EMPTY_STATE
        for row in running.view:
            state = attended(state, row.digest)
        for position in positions:
            row = Row(token_ids[position], position, digest_of(state, token_ids[position], position), influences)
            running.view.append(row)
            self.model.rows.put(int(slots[position]), row)
            state = attended(state, row.digest)

    def _checkpoint(self, running: Running) -> None:
        """Insert what was computed, and take note of it as the plugin's hook does."""
        req = running.req
        up_to = req.kv.kv_committed_len
        self.allocator.freed.clear()
        before = running.slots(self.req_to_token.req_to_token)
        if req.finished():
            self.tree.checkpoint(req, up_to=up_to)
        else:
            checkpoint_kv_cache(req, self.tree)
        freed = set(self.allocator.freed)
        token_ids = req.full_untruncated_fill_ids[:up_to]
        slots = running.slots(self.req_to_token.req_to_token)
        _hold(running.held, -1)
        node, held, duplicates = self.model.root(running.namespace), [], set()
        for position, token in enumerate(token_ids):
            child = node.children.get(token)
            if child is None:
                child = self.model.grow(node, running.view[position], slots[position])
            elif child.slot != before[position]:
                duplicates.add(before[position])
            assert child.slot == slots[position], "a request does not read the rows that are cached"
            running.view[position] = _row(child)
            node = child
            held.append(node)
        assert freed == duplicates
        running.held = held
        _hold(held, 1)
        if running.tag is not None:
            self.allocator.freed.clear()
            splice.record_insertion(self.tree, running.tag, *running.namespace, token_ids)
            self.mirror.record(running.tag, running.namespace, token_ids)
            # Footprints are bounded, and what is not remembered any more is dropped.
            gone = self.model.drop_slots(set(self.allocator.freed))
            assert self.bounded or not gone

    def _drop_what_was_held(self, req: Req | None) -> None:
        """Do what the plugin's hook does once the results of a batch, here of one request, are in.

        It takes a few tags a batch, so it is called as often as it may take for all.
        """
        self.allocator.freed.clear()
        batch = None if req is None else SimpleNamespace(reqs=[req])
        for _ in range(1 + len(self.mirror.closed) // footprints._TAGS_A_RETRY):
            splice.drop_what_was_held(self.scheduler, batch)
            batch = None
        freed = self.allocator.freed
        dropped, scrub = self.mirror.retry(set(freed), has_ended=req is not None and req.finished())
        assert len(freed) == dropped
        if scrub:
            self._check_scrubbed()

    async def generate(self, manager: Any, obj: Any, http_request: Any = None) -> AsyncIterator[Any]:
        """Stand in for `TokenizerManager.generate_request` below our hook. Yields one output token a chunk.

        The tokens come from `sampling_params["custom_params"]["outputs"]`, a string of their ids.
        """
        params = obj.sampling_params or {}
        custom = params.get("custom_params") or {}
        outputs = [int(token) for token in custom.get("outputs", "").split()] if params["max_new_tokens"] else []
        namespace = (obj.extra_key, obj.cache_salt)
        try:
            running = self.start(obj.input_ids, namespace, custom.get(NOTE_KEY))
        except NoRoomError:
            yield _chunk(obj, 0, [], {"type": "abort", "message": "no room"})
            return
        except BaseException as error:
            self.failure = self.failure or error
            raise
        ended = False
        try:
            for token in outputs[:-1]:
                self.decode(running, token)
                yield _chunk(obj, running.served, running.outputs, None)
            if outputs:
                self.decode(running, outputs[-1])
            self.finish(running)
            ended = True
        except NoRoomError:
            self.finish(running, aborted=True)
            ended = True
        except AssertionError as error:
            self.failure = self.failure or error
            raise
        finally:
            if not ended and self.failure is None and not self.given_up:
                self.finish(running, aborted=True)
        if self.between is not None and compat.is_internal(obj):
            self.between("prefill")
        yield _chunk(obj, running.served, running.outputs, {"type": "length"})

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_served(self, namespace: Namespace, nodes: list[Node]) -> None:
        """Check that nobody is served what is not theirs."""
        for node in nodes:
            strangers = {actor for actor, _ in node.influences} - {self.actor}
            assert not strangers, f"{self.actor} is served a row that an edit of {strangers} acts on: {node.row}"
            assert is_own(namespace) or node.is_clean, f"an amortized row in a shared namespace: {node.row}"

    def check(self) -> None:
        """Compare everything with the model."""
        model = self.model
        nodes = model.nodes()
        walk = self.tree.tree_core.walk_for_kv_canary(False, False)
        cached = sorted(
            zip(walk.slot_indices.tolist(), walk.positions.tolist(), walk.prev_slot_indices.tolist(), strict=True)
        )
        wanted = sorted(
            (node.slot, node.depth - 1, node.parent.slot if node.parent is not None else -1) for node in nodes
        )
        assert cached == wanted, f"cached: {cached}, expected: {wanted}"
        free = self.free_slots()
        private = {
            slot
            for running in self.running
            for slot in running.slots(self.req_to_token.req_to_token)[len(running.held) :]
        }
        taken = [*free, *private, *model.by_slot]
        assert sorted(taken) == list(range(1, self.allocator.size + 1)), "slots are lost, or in two hands"
        num_held = sum(1 for node in nodes if node.num_holds)
        assert self.tree.protected_size() == num_held
        assert self.tree.evictable_size() == len(nodes) - num_held
        # Whatever a running request reads is cached or its own.
        wrong = model.rows.wrong(self.buffers, [*model.by_slot, *private])
        assert not wrong, f"not the row that was expected: {[model.by_slot.get(slot, slot) for slot in wrong]}"
        for node in nodes:
            if not is_own(node.namespace):
                assert node.is_clean, f"an amortized row in a shared namespace: {node.row}"
            elif node.influences:
                salt = (node.namespace[1] or "").removesuffix("-parked")
                assert {actor for actor, _ in node.influences} == {self.actors[salt]}, f"{node.row} in {salt}"


def _scheduler(world: World) -> Any:
    """Stand in for the scheduler: what our half of the splice asks of it."""
    layer = SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=make_rotary()))
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer] * NUM_LAYERS))
    plain = {name: value for name, value, _ in compat._SETTINGS}
    return SimpleNamespace(
        tree_cache=world.tree,
        token_to_kv_pool_allocator=world.allocator,
        req_to_token_pool=world.req_to_token,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        server_args=SimpleNamespace(resolved_dict=lambda: plain),
    )


def _manager(world: World) -> Any:
    """Stand in for the tokenizer manager, its communicator being a call to the scheduler's handler."""

    async def communicator(request: CacheRequest) -> list[CacheReply]:
        try:
            reply = world.ask(request)
        except BaseException as error:
            world.failure = world.failure or error
            raise
        if world.between is not None and not request.capabilities:
            world.between("ask")
        return [reply]

    async def generate_request(obj: Any, http_request: Any = None) -> AsyncIterator[Any]:
        async for chunk in generate(world.serving, world.generate, world.manager, obj, http_request):
            yield chunk

    return SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE, context_len=MAX_POSITIONS),
        rid_to_state={},
        generate_request=generate_request,
        **{f"{compat.COMMUNICATOR}_communicator": communicator},
    )


def _memory(config: Config) -> SequenceMemory:
    return SequenceMemory(
        turns_per_conversation=config.turns_per_conversation,
        conversation_memory_tokens=config.conversation_memory_tokens,
        memory_tokens=config.memory_tokens,
        scope_memory_tokens=config.scope_memory_tokens,
        max_conversations=config.max_conversations,
    )


def _chunk(obj: Any, cached: int, outputs: Sequence[int], finish: dict[str, Any] | None) -> dict[str, Any]:
    meta_info = {
        "id": obj.rid,
        "prompt_tokens": len(obj.input_ids),
        "cached_tokens": cached,
        "finish_reason": finish,
    }
    return {"meta_info": meta_info, "output_ids": list(outputs)}


def _hold(nodes: Sequence[Node], change: int) -> None:
    for node in nodes:
        node.num_holds += change


def _row(node: Node) -> Row:
    assert node.row is not None
    return node.row
