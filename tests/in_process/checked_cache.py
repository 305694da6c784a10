"""SGLang's real radix tree, allocator and pools, and our half of the splice in the scheduler, checked as they are used.

After every operation everything is compared with the plain model of `model.py`: which tokens are cached in which
slots, every row of the pool, slots that are free, held or evictable, and whose influence each row carries.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from leyline_sglang import footprints, splice
from leyline_sglang.io_types import CacheReply, CacheRequest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.in_process.mirror import Mirror, is_own
from tests.in_process.model import Model, Namespace, Node
from tests.in_process.requests import CALLER, Caller, Running
from tests.in_process.rows import KV_LORA_RANK, MAX_POSITIONS, NUM_LAYERS, ROPE_DIM
from tests.in_process.stand_ins import Allocator


class CheckedCache:
    """The cache of one scheduler, and the requests that run on it."""

    scheduler: Any
    """What stands in for the scheduler whose cache it is."""

    def __init__(self, core: str, *, size: int, max_running: int, bounded: bool) -> None:
        self.bounded = bounded
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
        self.allocator = Allocator(size, pool)
        self.req_to_token = ReqToTokenPool(
            size=max_running, max_context_len=MAX_POSITIONS, device="cpu", enable_memory_saver=False
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
        self.mirror = Mirror(size, self.slots_of, self.actor_of, CALLER.get)
        self.running: list[Running] = []
        self.actors: dict[str, str] = {}
        """Who first used a namespace of its own."""
        self.failure: BaseException | None = None
        """The first check that failed inside of the code under test, which may have caught it."""
        self.has_failed = False
        """Whether something was made to fail since the last message."""

    @property
    def model(self) -> Model:
        """What must be cached."""
        return self.mirror.model

    @property
    def actor(self) -> str:
        """Who is being served now."""
        return CALLER.get().actor

    @actor.setter
    def actor(self, name: str) -> None:
        CALLER.set(Caller(name))

    @contextmanager
    def noted_failure(self) -> Iterator[None]:
        """Remember a check that fails where the code under test may catch it."""
        try:
            yield
        except AssertionError as error:
            self.failure = self.failure or error
            raise

    def raise_failure(self) -> None:
        """Raise what `noted_failure` has remembered."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def as_caller(self, caller: Caller) -> Iterator[None]:
        """Do something for a request on behalf of who has sent it."""
        token = CALLER.set(caller)
        try:
            yield
        finally:
            CALLER.reset(token)

    def actor_of(self, own_salt: str) -> str:
        """Return who was the first to use a namespace of its own: the rows there are for nobody else."""
        return self.actors.setdefault(own_salt, self.actor)

    def slots_of(self, namespace: Namespace, token_ids: Sequence[int]) -> list[int]:
        """Return the slots of the longest cached prefix. Splits nodes and marks them as used, as any match does."""
        key = RadixKey(array("q", token_ids), namespace[0], cache_salt=namespace[1])
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        slots: list[int] = self.tree.path_device_indices(found.last_device_node)[: found.device_prefix_len].tolist()
        return slots

    # --- messages ---------------------------------------------------------------------------------------------------

    def ask(self, request: CacheRequest) -> CacheReply:
        """Send one message to the scheduler and compare what it does and says with the model."""
        if request.own_salt is not None:
            self.actor_of(request.own_salt)
        # A message first drops what is due of closed tags; here that is done before, to tell the two apart.
        self._drop_what_was_held([])
        self.allocator.freed.clear()
        available = self.allocator.available_size()
        self.has_failed = False
        reply = splice.handle(self.scheduler, request)
        if not request.capabilities:
            if request.scrub:
                self._check_scrubbed(reply, all_of_it=not request.move)
            freed, fails = set(self.allocator.freed), self.has_failed
            self.mirror.answered(request, reply, freed, available, fails=fails)
            self.check()
        return reply

    def free_slots(self) -> list[int]:
        """Return the allocator's free slots."""
        slots: list[int] = [*self.allocator.free_pages.tolist(), *self.allocator.release_pages.tolist()]
        return slots

    def evict(self, num_tokens: int) -> None:
        """Evict as much as a full pool would ask for."""
        self.allocator.freed.clear()
        evictable = self.model.num_evictable()
        self.tree.evict(EvictParams(num_tokens=num_tokens))
        gone = self.model.drop_slots(set(self.allocator.freed))
        assert min(num_tokens, evictable) <= len(gone)
        self.check()

    def empty(self) -> None:
        """Empty the cache; no request may run or wait."""
        self.tree.reset()
        footprints.forget_footprints(self.tree)
        self.allocator.clear()
        self.req_to_token.clear()
        self.mirror.clear()

    def _drop_what_was_held(self, reqs: Sequence[Any]) -> None:
        """Do what the plugin's hook does once the results of a batch are in.

        It takes a few tags a batch, so it is called as often as it may take for all.
        """
        self.allocator.freed.clear()
        batch = SimpleNamespace(reqs=reqs) if reqs else None
        for _ in range(1 + len(self.mirror.closed) // footprints._TAGS_A_RETRY):
            splice.drop_what_was_held(self.scheduler, batch)
            batch = None
        freed = self.allocator.freed
        dropped, scrub = self.mirror.retry(set(freed), has_ended=any(req.finished() for req in reqs))
        assert len(freed) == dropped
        if scrub:
            self._check_scrubbed()

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_served(self, running: Running, nodes: list[Node]) -> None:
        """Check that nobody is served what is not theirs."""
        for node in nodes:
            strangers = {actor for actor, _ in node.influences} - {running.caller.actor}
            actor = running.caller.actor
            assert not strangers, f"{actor} is served a row that an edit of {strangers} acts on: {node.row}"
            assert is_own(node.namespace) or node.is_clean, f"an amortized row in a shared namespace: {node.row}"

    def _check_scrubbed(self, reply: CacheReply | None = None, *, all_of_it: bool = True) -> None:
        if all_of_it:
            free = [0, *self.free_slots()]
            for buffer in self.buffers:
                assert not buffer[free].any(), "a free slot is not zero after a scrub"
            assert reply is None or reply.scrubbed == len(free) - 1

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
        num_free_requests = self.req_to_token.size - len(self.running)
        assert self.req_to_token.available_size() == num_free_requests, "request slots are lost"
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
