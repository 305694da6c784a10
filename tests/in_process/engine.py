"""The scheduler's queue and its batches, by SGLang's own code.

Batches are built by `Scheduler._get_new_batch_prefill_raw`, on a small object with what that asks of a scheduler: the
real queue policy, `PrefillAdder`, `ScheduleBatch.prepare_for_extend` and `alloc_for_extend`, and at the end of a
request the real `release_kv_cache`. The forward pass is ours (`rows.py`), and so is decoding, one request at a time.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from leyline_sglang import splice
from leyline_sglang.io_types import AdmissionReply
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch, release_req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from leyline_agent.core.protocol import NOTE_KEY
from tests.in_process.admission import Admissions
from tests.in_process.checked_cache import CheckedCache
from tests.in_process.model import Namespace, hold, row_of
from tests.in_process.requests import CALLER, NoRoomError, Running
from tests.in_process.rows import EMPTY_STATE, VOCAB_SIZE, Row, attended, digest_of, read_digests, write_row_
from tests.in_process.stand_ins import make_scheduler, published_configuration


class Engine(CheckedCache):
    """One scheduler, as far as its cache and its queue go."""

    def __init__(
        self,
        core: str,
        *,
        size: int,
        max_running: int,
        max_prefill_tokens: int,
        chunked_prefill_size: int | None,
        bounded: bool,
    ) -> None:
        super().__init__(core, size=size, max_running=max_running, bounded=bounded)
        self.waiting: list[Running] = []
        self.replies: list[AdmissionReply] = []
        """What the scheduler has said of its own accord and nobody has received yet."""
        self._numbers = itertools.count()
        self.admissions = Admissions(self)
        self.adder_class = self.admissions.adder_class
        self.scheduler = make_scheduler(
            self, max_prefill_tokens=max_prefill_tokens, chunked_prefill_size=chunked_prefill_size
        )
        self._installed = ExitStack()
        self._installed.enter_context(published_configuration())
        self._installed.enter_context(self.admissions.installed())

    def close(self) -> None:
        """Leave SGLang's code as it was."""
        self._installed.close()

    # --- the queue --------------------------------------------------------------------------------------------------

    def submit(
        self,
        token_ids: Sequence[int],
        namespace: Namespace,
        tag: str | None = None,
        *,
        rid: str | None = None,
        max_new_tokens: int = 0,
    ) -> Running:
        """Put a request into the queue."""
        params = SamplingParams(max_new_tokens=max_new_tokens, custom_params=None if tag is None else {NOTE_KEY: tag})
        params.normalize(None)
        ids = array("q", token_ids)
        req = Req(
            rid or f"{next(self._numbers)}",
            "",
            ids,
            params,
            extra_key=namespace[0],
            cache_salt=namespace[1],
            vocab_size=VOCAB_SIZE,
        )
        running = Running(req, tag, CALLER.get())
        self.waiting.append(running)
        return running

    def new_sibling(self, req: Req) -> Running:
        """Return what stands for a request that the plugin has made."""
        return Running(req, None, CALLER.get(), is_sibling=True)

    def start(
        self, token_ids: Sequence[int], namespace: Namespace, tag: str | None = None, *, rid: str | None = None
    ) -> Running:
        """Prefill a request before all that wait, and cache its prompt.

        Raises:
            NoRoomError: it cannot be taken; nothing has changed.
        """
        running = self.submit(token_ids, namespace, tag, rid=rid)
        while running in self.waiting:
            if not self.step(only=running):
                self.waiting.remove(running)
                raise NoRoomError
        while self.scheduler.chunked_req is running.req:
            self.step(only=running)
        return running

    @property
    def has_work(self) -> bool:
        """Whether a request waits, or has more of its prompt to be computed."""
        return bool(self.waiting) or self.scheduler.chunked_req is not None

    def step(self, only: Running | None = None) -> bool:
        """Build one prefill batch, compute it and take up its results; return whether there was anything to compute.

        Of the queue `only` is looked at, if given: the others have not come yet.
        """
        self.scheduler.waiting_queue = [running.req for running in self.waiting if only in (None, running)]
        decoding = [running.req for running in self.running if running.req is not self.scheduler.chunked_req]
        self.scheduler.running_batch = ScheduleBatch(reqs=decoding, batch_is_full=False)
        batch, _ = Scheduler._get_new_batch_prefill_raw(self.scheduler, None, self.scheduler.running_batch)
        if batch is not None:
            self._run(batch)
            self._drop_what_was_held(batch.reqs)
        self.check()
        return batch is not None

    def _run(self, batch: ScheduleBatch) -> None:
        """Do the forward pass of a batch and what the scheduler does with its results."""
        known = {id(running.req): running for running in (*self.waiting, *self.running, *self.admissions.siblings)}
        all_of_it = [known[id(req)] for req in batch.reqs]
        written = iter(batch.out_cache_loc.tolist())
        for running in all_of_it:
            positions = range(running.req.prefix_len, running.req.extend_end)
            slots = list(itertools.islice(written, len(positions)))
            self._compute(running, positions, running.req.full_untruncated_fill_ids, slots)
        self.admissions.siblings.clear()
        for running in all_of_it:
            if running in self.waiting:
                self.waiting.remove(running)
                self.running.append(running)
            if running.is_sibling:
                self._end_sibling(running)
            elif running.req is self.scheduler.chunked_req:
                running.req.inflight_middle_chunks -= 1
                self._publish(running)
            elif running.is_left or running.req.to_finish is not None:
                self._end(running, running.req.to_finish or FINISH_ABORT("gone"))
                running.answer(False)
            else:
                self._publish(running)
                running.answer(True)

    def _end_sibling(self, sibling: Running) -> None:
        """Let a sibling go, which must leave everything as it is."""
        sibling.req.finished_reason = FINISH_LENGTH(0)
        self.allocator.freed.clear()
        own = sibling.slots(self.req_to_token.req_to_token)[sibling.req.prefix_len :]
        release_kv_cache(sibling.req, self.tree, checkpoint=True)
        expected = set() if sibling.placed else set(own)
        assert set(self.allocator.freed) == expected, "a sibling frees what is cached, or keeps what is its own"
        hold(sibling.held, -1)

    # --- requests that run ------------------------------------------------------------------------------------------

    def decode(self, running: Running, token: int) -> None:
        """Take `token` as the next output and compute the row of the one before it.

        Raises:
            NoRoomError: there is no slot; nothing has changed.
        """
        req = running.req
        at = req.kv.kv_allocated_len
        # A request that was retracted has had the row of its last token prefilled.
        if at < len(req.origin_input_ids) + len(req.output_ids):
            slots = self._allocate(1)
            if slots is None:
                raise NoRoomError
            self.req_to_token.write((req.kv.req_pool_idx, slice(at, at + 1)), slots)
            req.kv.kv_allocated_len = req.kv.kv_committed_len = at + 1
            self._compute(running, range(at, at + 1), [*req.origin_input_ids, *req.output_ids], slots.tolist())
        req.output_ids.append(token)
        running.outputs.append(token)
        self._drop_what_was_held([req])
        self.check()

    def finish(self, running: Running, *, aborted: bool = False) -> None:
        """End a request: what it has computed is cached, what it held is let go."""
        self._end(running, FINISH_ABORT("gone") if aborted else FINISH_LENGTH(len(running.req.output_ids)))
        self._drop_what_was_held([running.req])
        self.check()

    def _end(self, running: Running, reason: Any) -> None:
        running.req.finished_reason = reason
        self._publish(running)
        hold(running.held, -1)
        self.running.remove(running)

    def retract(self, running: Running) -> None:
        """Do what SGLang does where the pool is full or generation pauses: the request waits again, without rows."""
        req = running.req
        self.allocator.freed.clear()
        own = running.slots(self.req_to_token.req_to_token)[len(running.held) :]
        release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=self.req_to_token,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            hisparse_coordinator=None,
        )
        assert sorted(self.allocator.freed) == sorted(own), "a retracted request frees what is cached, or keeps its own"
        hold(running.held, -1)
        running.held, running.view = [], []
        if self.scheduler.chunked_req is req:
            self.scheduler.chunked_req = None
        self.running.remove(running)
        self.waiting.append(running)
        # Closed tags are looked at where a request has ended or a lock is given back, as here.
        self._drop_what_was_held([SimpleNamespace(finished=lambda: True)])
        self.check()

    def leave(self, running: Running) -> None:
        """Do what the engine does for a caller who has left: end the request, or take it out of the queue."""
        if running in self.waiting:
            self.waiting.remove(running)
            self.check()
        elif running.req is self.scheduler.chunked_req:
            # It ends with its last chunk.
            running.is_left = True
        elif running in self.running:
            self.finish(running, aborted=True)

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

    def _compute(self, running: Running, positions: range, token_ids: Sequence[int], written: list[int]) -> None:
        """Do a forward pass: read the rows that are attended to out of the pool, and write the new ones."""
        slots = self.req_to_token.req_to_token[running.req.kv.req_pool_idx, : positions.stop].to(torch.int64)
        assert slots[positions.start :].tolist() == written, "rows are written where the request does not read them"
        state = EMPTY_STATE
        for digest in read_digests(self.buffers, slots[: positions.start]):
            state = attended(state, digest)
        influences = running.view[-1].influences if running.view else frozenset()
        for position in positions:
            token = token_ids[position]
            digest = digest_of(state, token, position)
            write_row_(self.buffers, written[position - positions.start], token, position, digest)
            state = attended(state, digest)
        # The model's own view of it, from its rows instead of the pool's.
        state = EMPTY_STATE
        for row in running.view:
            state = attended(state, row.digest)
        for position in positions:
            row = Row(token_ids[position], position, digest_of(state, token_ids[position], position), influences)
            running.view.append(row)
            if not running.placed:
                self.model.rows.put(written[position - positions.start], row)
            state = attended(state, row.digest)
        if running.placed:
            # What is expected there is the model's, who has grown it as R was placed.
            assert written == [node.slot for node in running.placed], "R is not written to where it was placed"
            assert running.view[positions.start :] == [node.row for node in running.placed]

    def _publish(self, running: Running) -> None:
        """Insert what was computed, and take note of it as the plugin's hook does; of an ended request, let it go."""
        req = running.req
        if req.finished():
            req.refresh_fill_ids()
        up_to, row_idx = req.kv.kv_committed_len, req.kv.req_pool_idx
        self.allocator.freed.clear()
        before = running.slots(self.req_to_token.req_to_token)
        if req.finished():
            release_kv_cache(req, self.tree, checkpoint=True)
        else:
            checkpoint_kv_cache(req, self.tree)
        freed = set(self.allocator.freed)
        token_ids = req.full_untruncated_fill_ids[:up_to]
        slots = self.req_to_token.req_to_token[row_idx, :up_to].tolist()
        hold(running.held, -1)
        node, held, duplicates = self.model.root(running.namespace), [], set()
        for position, token in enumerate(token_ids):
            child = node.children.get(token)
            if child is None:
                child = self.model.grow(node, running.view[position], slots[position])
            elif child.slot != before[position]:
                duplicates.add(before[position])
            assert child.slot == slots[position], "a request does not read the rows that are cached"
            running.view[position] = row_of(child)
            node = child
            held.append(node)
        assert freed == duplicates
        running.held = held
        hold(held, 1)
        if running.tag is not None:
            self.allocator.freed.clear()
            splice.record_insertion(self.tree, running.tag, *running.namespace, token_ids)
            self.mirror.record(running.tag, running.namespace, token_ids)
            # Footprints are bounded, and what is not remembered any more is dropped.
            gone = self.model.drop_slots(set(self.allocator.freed))
            assert self.bounded or not gone
