"""The transaction in the scheduler: match, lock, allocate, copy and rotate, insert, unlock.

Runs between two batches and alike on every tensor-parallel rank: what it decides depends on the request, the radix
cache and the allocator only, which are the same on all of them. A refusal leaves tree, locks, slots and rows as they
were. Rows are copied, never moved, so whoever else reads the base is not touched.
"""

from __future__ import annotations

import json
import logging
from array import array
from typing import Any

import torch
from leyline_kernels.layout import MlaLayout
from leyline_kernels.reference import copy_rotate_
from leyline_kernels.rope_tables import delta_table, move_table

from leyline_agent.core.protocol import Reason
from leyline_sglang import compat
from leyline_sglang.compat import MlaPool, Path, RadixPort
from leyline_sglang.io_types import CacheReply, CacheRequest, unpack

logger = logging.getLogger(__name__)


class _Refused(Exception):
    def __init__(self, reason: Reason, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def handle(scheduler: Any, request: CacheRequest) -> CacheReply:
    """Answer one `CacheRequest`. A process boundary: nothing that goes wrong here may stop the scheduler."""
    try:
        if request.capabilities:
            return CacheReply(message=json.dumps(compat.unsupported(scheduler)))
        return _Transaction(scheduler, request).run()
    except Exception as error:
        logger.exception("leyline: a splice failed; the request is served without it")
        return CacheReply(reason=Reason.INTERNAL_ERROR.value, message=f"{type(error).__name__}: {error}")


class _Transaction:
    def __init__(self, scheduler: Any, request: CacheRequest) -> None:
        self._scheduler = scheduler
        self._request = request
        self._radix = RadixPort(scheduler)
        self._base = unpack(request.base)
        self._new = unpack(request.new)

    def run(self) -> CacheReply:
        reply = CacheReply()
        if self._request.move:
            try:
                reply.copied, reply.moved = self._move()
            except _Refused as refused:
                reply.reason, reply.message = refused.reason.value, str(refused)
        reply.base_shared, reply.base_own = self._cached(self._base)
        reply.new_shared, reply.new_own = self._cached(self._new)
        return reply

    def _cached(self, token_ids: array[int]) -> tuple[int, int]:
        if not token_ids:
            return 0, 0
        shared = len(self._match(token_ids, self._request.shared_salt))
        return shared, len(self._match(token_ids, self._request.own_salt)) if self._request.own_salt else 0

    def _match(self, token_ids: array[int], salt: str | None) -> Path:
        return self._radix.match(token_ids, self._request.extra_key, salt)

    def _move(self) -> tuple[int, int]:
        """Copy head and kept run into the conversation's namespace; return the rows copied of each."""
        request = self._request
        assert request.own_salt is not None
        # A match splits nodes but leaves slots where they are, so the lists stay right until something is evicted.
        base = self._match(self._base[: request.src_end], request.base_salt)
        head = self._match(self._new[: request.dst_start], request.head_salt) if request.dst_start else None
        num_kept = min(len(base), request.src_end) - request.src_start
        if num_kept <= 0:
            raise _Refused(
                Reason.EVICTED, f"{len(base)} tokens of the base are cached, the kept run starts at {request.src_start}"
            )
        if request.dst_start and (head is None or len(head) < request.dst_start):
            cached = 0 if head is None else len(head)
            raise _Refused(
                Reason.EVICTED, f"{cached} of the {request.dst_start} tokens left of the kept run are cached"
            )
        target_ids = self._new[: request.dst_start + num_kept]
        target = self._match(target_ids, request.own_salt)
        matched = len(target)
        num_new = len(target_ids) - matched
        if num_new <= 0:
            return 0, 0

        locks = [self._radix.lock(path) for path in (base, head, target) if path is not None and len(path)]
        try:
            slots = self._radix.allocate(num_new)
            if slots is None:
                raise _Refused(
                    Reason.POOL_FULL,
                    f"{num_new} slots are needed, {self._radix.counts()['available']} are free and the rest is held",
                )
            try:
                copied = self._copy(base, head, slots.to(torch.int64), matched)
            except BaseException:
                self._radix.free(slots)
                raise
            self._radix.insert(
                target_ids,
                torch.cat([target.slots, slots.to(torch.int64)]),
                matched=matched,
                extra_key=request.extra_key,
                cache_salt=request.own_salt,
            )
        finally:
            for lock in locks:
                self._radix.unlock(lock)
        return copied, num_new - copied

    def _copy(self, base: Path, head: Path | None, slots: torch.Tensor, matched: int) -> int:
        """Fill `slots`, the rows from `matched` on; return how many of them belong to the head."""
        request = self._request
        pool = compat.mla_pool(self._scheduler)
        compat.wait_for_forward(self._scheduler)
        num_head = max(0, request.dst_start - matched)
        if num_head:
            assert head is not None
            _copy_rows_(pool, head.slots[matched : request.dst_start], slots[:num_head], old_start=0, new_start=0)
        num_there = max(0, matched - request.dst_start)
        old_start, new_start = request.src_start + num_there, request.dst_start + num_there
        kept = base.slots[old_start : old_start + len(slots) - num_head]
        _copy_rows_(pool, kept, slots[num_head:], old_start=old_start, new_start=new_start)
        return num_head


def _copy_rows_(pool: MlaPool, src: torch.Tensor, dst: torch.Tensor, *, old_start: int, new_start: int) -> None:
    """Copy a run of rows of every layer from `src` to `dst` slots and turn them to their new positions, in place."""
    layout = MlaLayout(pool.kv_lora_rank, pool.qk_rope_head_dim)
    if old_start == new_start:
        cos, sin = delta_table(pool.inv_freq, 0)
    else:
        old_positions = torch.arange(old_start, old_start + len(src), device=src.device)
        cos, sin = move_table(pool.inv_freq, old_positions, new_start - old_start)
    for buffer in pool.buffers:
        copy_rotate_(buffer, src, dst, layout=layout, cos=cos, sin=sin, is_neox_style=pool.is_neox_style)
