"""The transaction in the scheduler: close namespaces, move one kept run (`move.py`), look what is cached.

Runs between two batches and alike on every tensor-parallel rank: what it decides depends on the request, the radix
cache and the allocator only, which are the same on all of them.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from typing import Any

from leyline_kernels import dispatch

from leyline_agent.core.protocol import Purge, Reason
from leyline_sglang import compat
from leyline_sglang.cached_rows import CachedRows, copy_rows_
from leyline_sglang.compat import RadixPort
from leyline_sglang.footprints import Sequence, footprints_of
from leyline_sglang.io_types import CacheReply, CacheRequest
from leyline_sglang.move import Move
from leyline_sglang.namespaces import is_own_salt
from leyline_sglang.prefill_cost import METER

logger = logging.getLogger(__name__)


def handle(scheduler: Any, request: CacheRequest) -> CacheReply:
    """Answer one `CacheRequest`. A process boundary: nothing that goes wrong here may stop the scheduler."""
    started = time.perf_counter()
    try:
        drop_what_was_held(scheduler)
        if request.capabilities:
            unsupported = compat.unsupported(scheduler)
            not_in_one_step = [] if unsupported else compat.not_in_one_step(scheduler)
            one_batch = {} if unsupported else compat.one_batch(scheduler)
            said = {"unsupported": unsupported, "not_in_one_step": not_in_one_step, "one_batch": one_batch}
            return CacheReply(message=json.dumps(said))
        reply = _carry_out(CachedRows(scheduler, request))
    except Exception as error:
        logger.exception("leyline: a splice failed; the request is served without it")
        reply = CacheReply(reason=Reason.INTERNAL_ERROR.value, message=f"{type(error).__name__}: {error}")
    reply.prefill_cost = METER.cost
    reply.ms = (time.perf_counter() - started) * 1e3
    return reply


def warm_up(scheduler: Any) -> None:
    """Compile the kernels, so that no splice waits seconds for it. A process boundary, as `handle`."""
    try:
        if not compat.unsupported(scheduler):
            pool = compat.mla_pool(scheduler)
            dispatch.warm_up(pool.layers, is_neox_style=pool.is_neox_style)
    except Exception:
        logger.exception("leyline: the kernels could not be compiled; splices will be refused with an internal error")


def record_insertion(tree: Any, tag: str, extra_key: str | None, cache_salt: str | None, token_ids: array[int]) -> None:
    """Take note of what a request of a conversation has put into the cache. A process boundary, as `handle`."""
    if not is_own_salt(tag):
        # A raw note: it came by a tokenizer worker that has no plugin.
        return
    try:
        footprints_of(tree).record(RadixPort(tree), tag, Sequence(extra_key, cache_salt, array("q", token_ids)))
    except Exception:
        logger.exception("leyline: what a request has cached is not taken note of; a forget will not find it")


def drop_what_was_held(scheduler: Any, batch: Any = None) -> None:
    """Drop rows of closed namespaces whose requests have ended. A process boundary, as `handle`."""
    footprints = footprints_of(scheduler.tree_cache)
    if footprints.due:
        try:
            has_ended = batch is not None and compat.has_ended_request(batch)
            footprints.retry(scheduler, RadixPort(scheduler.tree_cache), has_ended=has_ended)
        except Exception:
            logger.exception("leyline: rows that are to be forgotten were not dropped; the next batch tries again")


def _carry_out(rows: CachedRows) -> CacheReply:
    """Do all that a message asks for and look what is cached."""
    request = rows.request
    reply = CacheReply()
    if request.close:
        purge = _close(rows)
        reply.dropped, reply.held = purge.dropped_tokens, purge.held_tokens
        reply.shared = purge.shared_tokens
    if request.scrub:
        reply.scrubbed = compat.scrub_free_slots(rows.scheduler)
    if request.drop_parked:
        rows.drop_parked()
    if request.move:
        Move(rows).run(reply)
    with rows.stages("look"):
        reply.base_shared, reply.base_own = _cached(rows, rows.base)
        reply.new_shared, reply.new_own = _cached(rows, rows.new)
    if request.count_own and request.own_salt is not None:
        reply.own_tokens = rows.footprints.own_slots(rows.radix, request.own_salt)
    reply.stages_ms = rows.stages.ms
    return reply


def _cached(rows: CachedRows, token_ids: array[int]) -> tuple[int, int]:
    """Return how many tokens are cached in the shared namespace and in the conversation's own."""
    if not token_ids:
        return 0, 0
    shared = len(rows.match(token_ids, rows.request.shared_salt))
    return shared, len(rows.match(token_ids, rows.request.own_salt)) if rows.request.own_salt else 0


def _close(rows: CachedRows) -> Purge:
    request = rows.request
    total = Purge()
    for tag in request.close:
        rows.footprints.close(
            tag, keep=rows.new, forget=request.forget, scrub=request.scrub, successor=request.own_salt
        )
        if request.keep_tokens and tag == request.close[-1]:
            head_ids = rows.new[: request.keep_tokens]
            total = _sum(total, rows.footprints.empty(rows.radix, tag, keep_own=head_ids), left=False)
            _hand_over(rows, tag, head_ids)
    for tag in sorted({*request.close, *rows.footprints.due_before(request.own_salt)}):
        total = _sum(total, rows.footprints.empty(rows.radix, tag))
    return total


def _hand_over(rows: CachedRows, tag: str, head_ids: array[int]) -> None:
    """Key what is cached of `head_ids` in a closed namespace by the new one; copy it where somebody holds it."""
    own_salt = rows.request.own_salt
    assert own_salt is not None
    path = rows.match(head_ids, tag)
    head_ids = head_ids[: len(path)]
    if not head_ids or len(rows.match(head_ids, own_salt)):
        return
    if rows.radix.takeable_from(path) == 0:
        slots = rows.radix.take(path, 0)
        rows.footprints.cut(tag, rows.sequence(head_ids, tag), 0)
    else:
        lock = rows.radix.lock(path)
        try:
            fresh = rows.radix.allocate(len(head_ids))
            if fresh is None:
                # No room for a copy: it is prefilled again, which is all that a lost cache costs.
                return
            try:
                copy_rows_(rows.pool(), path.slots, fresh, old_start=0, new_start=0)
            except BaseException:
                rows.radix.free(fresh)
                raise
            slots = fresh
        finally:
            rows.radix.unlock(lock)
    rows.insert(head_ids, own_salt, slots, matched=0)


def _sum(total: Purge, more: Purge, *, left: bool = True) -> Purge:
    """Add up; `left=False` counts only what was dropped, where the rest is counted again later."""
    return Purge(
        dropped_tokens=total.dropped_tokens + more.dropped_tokens,
        held_tokens=total.held_tokens + more.held_tokens * left,
        shared_tokens=total.shared_tokens + more.shared_tokens * left,
    )
