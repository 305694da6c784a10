"""The transaction in the scheduler: close namespaces, move one kept run, look what is cached.

Runs between two batches and alike on every tensor-parallel rank: what it decides depends on the request, the radix
cache and the allocator only, which are the same on all of them. A refusal leaves tree, locks, slots and rows as they
were: it is decided before anything is taken or allocated.

Rows of the conversation's own namespace that nobody else holds or goes on from are moved where they are: taken out of
the tree, turned, and keyed anew. All others are copied, so whoever reads them is not touched.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from typing import Any, Protocol

import torch
from leyline_kernels import dispatch
from leyline_kernels.dispatch import copy_rotate_all_, rotate_all_, run_table

from leyline_agent.core.protocol import Purge, Reason
from leyline_agent.core.token_ids import common_prefix
from leyline_sglang import compat
from leyline_sglang.compat import MlaPool, Path, RadixPort
from leyline_sglang.footprints import Sequence, footprints_of
from leyline_sglang.io_types import CacheReply, CacheRequest, unpack
from leyline_sglang.namespaces import is_own_salt, parked_salt
from leyline_sglang.prefill_cost import METER

logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """One move is refused; tree, locks, slots and rows are as before it."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class Stages:
    """Host milliseconds by stage; on a GPU what is launched runs on meanwhile."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []

    # By hand: a splice enters some ten, and a generator's context takes as long as what some of them time.
    def __call__(self, name: str) -> Stages:
        """Time what stands inside of `with stages(name)`."""
        self._open.append((name, time.perf_counter()))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_details: object) -> None:
        name, started = self._open.pop()
        self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - started) * 1e3


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
        reply = Transaction(scheduler, request).run()
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


class Fill(Protocol):
    """Computes rows that are keyed before they are there, in the very batch of the request that reads them."""

    def check_room(self, num_tokens: int) -> None:
        """Raise `RefusedError` if so many tokens cannot be computed in this batch."""

    def admit(self, token_ids: array[int], prefix: Path) -> None:
        """Have the batch compute what is missing of `token_ids` right of `prefix`; raises as `check_room`."""

    def place(self, slots: torch.Tensor, path: Path) -> None:
        """Say into which slots, and hold the path that names them until they are written."""


class Transaction:
    """What one message asks for."""

    def __init__(
        self,
        scheduler: Any,
        request: CacheRequest,
        fill: Fill | None = None,
        *,
        base: array[int] | None = None,
        new: array[int] | None = None,
    ) -> None:
        """Read the message; `base` and `new` are what it has packed, where the caller has them unpacked."""
        self._scheduler = scheduler
        self._request = request
        self._fill = fill
        self._stages = Stages()
        self._radix = RadixPort(scheduler.tree_cache)
        self._footprints = footprints_of(scheduler.tree_cache)
        self._base = unpack(request.base) if base is None else base
        self._new = unpack(request.new) if new is None else new

    def run(self) -> CacheReply:
        """Do it all and look what is cached."""
        request = self._request
        reply = CacheReply()
        if request.close:
            purge = self._close()
            reply.dropped, reply.held = purge.dropped_tokens, purge.held_tokens
            reply.shared = purge.shared_tokens
        if request.scrub:
            reply.scrubbed = compat.scrub_free_slots(self._scheduler)
        if request.drop_parked:
            self._drop_parked()
        if request.move:
            self.move(reply)
        with self._stages("look"):
            reply.base_shared, reply.base_own = self._cached(self._base)
            reply.new_shared, reply.new_own = self._cached(self._new)
        if request.count_own and request.own_salt is not None:
            reply.own_tokens = self._footprints.own_slots(self._radix, request.own_salt)
        reply.stages_ms = self._stages.ms
        return reply

    def move(self, reply: CacheReply) -> None:
        """Move the kept run, and say so in `reply`; or why not."""
        request = self._request
        try:
            self._move(reply)
            if request.parked_from is not None and not request.more_follow:
                # Where the last run was copied from there, or was in its place already.
                self._drop_parked()
        except RefusedError as refused:
            reply.reason, reply.message = refused.reason.value, str(refused)
        reply.stages_ms = self._stages.ms

    def _drop_parked(self) -> None:
        """Drop what is parked: nothing needs it any more."""
        own_salt = self._request.own_salt
        assert own_salt is not None
        self._footprints.drop_parked(self._radix, own_salt, parked_salt(own_salt))

    def _cached(self, token_ids: array[int]) -> tuple[int, int]:
        if not token_ids:
            return 0, 0
        shared = len(self._match(token_ids, self._request.shared_salt))
        return shared, len(self._match(token_ids, self._request.own_salt)) if self._request.own_salt else 0

    def _match(self, token_ids: array[int], salt: str | None, limit: int | None = None) -> Path:
        return self._radix.match(token_ids, self._request.extra_key, salt, limit)

    def _salt(self, own: bool) -> str | None:
        return self._request.own_salt if own else self._request.shared_salt

    def _sequence(self, token_ids: array[int], salt: str | None) -> Sequence:
        return Sequence(self._request.extra_key, salt, token_ids)

    def _insert(self, token_ids: array[int], salt: str | None, slots: torch.Tensor, *, matched: int) -> Path:
        """Key `slots` by `token_ids[matched:]`, the first of which are cached already, and take note of it."""
        with self._stages("insert"):
            extra_key = self._request.extra_key
            path = self._radix.insert(token_ids, slots, matched=matched, extra_key=extra_key, cache_salt=salt)
        assert self._request.own_salt is not None
        with self._stages("record"):
            self._footprints.record(self._radix, self._request.own_salt, self._sequence(token_ids, salt))
        return path

    # --- closing ----------------------------------------------------------------------------------------------------

    def _close(self) -> Purge:
        request = self._request
        total = Purge()
        for tag in request.close:
            self._footprints.close(
                tag, keep=self._new, forget=request.forget, scrub=request.scrub, successor=request.own_salt
            )
            if request.keep_tokens and tag == request.close[-1]:
                head_ids = self._new[: request.keep_tokens]
                total = _sum(total, self._footprints.empty(self._radix, tag, keep_own=head_ids), left=False)
                self._hand_over(tag, head_ids)
        for tag in sorted({*request.close, *self._footprints.due_before(request.own_salt)}):
            total = _sum(total, self._footprints.empty(self._radix, tag))
        return total

    def _hand_over(self, tag: str, head_ids: array[int]) -> None:
        """Key what is cached of `head_ids` in a closed namespace by the new one; copy it where somebody holds it."""
        own_salt = self._request.own_salt
        assert own_salt is not None
        path = self._match(head_ids, tag)
        head_ids = head_ids[: len(path)]
        if not head_ids or len(self._match(head_ids, own_salt)):
            return
        if self._radix.takeable_from(path) == 0:
            slots = self._radix.take(path, 0)
            self._footprints.cut(tag, self._sequence(head_ids, tag), 0)
        else:
            lock = self._radix.lock(path)
            try:
                fresh = self._radix.allocate(len(head_ids))
                if fresh is None:
                    # No room for a copy: it is prefilled again, which is all that a lost cache costs.
                    return
                try:
                    _copy_rows_(self._pool(), path.slots, fresh, old_start=0, new_start=0)
                except BaseException:
                    self._radix.free(fresh)
                    raise
                slots = fresh
            finally:
                self._radix.unlock(lock)
        self._insert(head_ids, own_salt, slots, matched=0)

    # --- moving -----------------------------------------------------------------------------------------------------

    def _move(self, reply: CacheReply) -> None:
        """Bring a kept run to its new place in the conversation's namespace."""
        request = self._request
        assert request.own_salt is not None
        offset = request.parked_from or 0
        parked = parked_salt(request.own_salt)
        source_salt = parked if request.parked_from is not None else self._salt(request.from_own)
        if request.parked_from is None:
            self._drop_parked()
        elif request.more_follow:
            # Unless this run is taken from there: then what is right of it is parked anew.
            reply.parked_from = request.parked_from

        with self._stages("match"):
            target_end = min(request.dst_start + request.src_end - request.src_start, len(self._new))
            target = self._match(self._new, request.own_salt, target_end)
            if len(target) == target_end:
                # A retry: the rows are there already.
                return
            # A match splits nodes but leaves slots where they are, so the lists stay right until something is evicted.
            head = target
            if len(target) < request.dst_start and not request.head_from_own:
                shared = self._match(self._new, request.shared_salt, request.dst_start)
                head = shared if len(shared) > len(target) else target
            # All that stands left of the run must be in the conversation's namespace already.
            cut = self._cut(offset) if len(head) == len(target) <= request.dst_start else None
            source_ids = self._base[offset:] if offset else self._base
            if cut and (offset or cut != len(target) or source_ids[:cut] != self._new[:cut]):
                # Splits the node there, so that the end of the source is nodes of its own. Else the match of the
                # target has done so.
                self._match(source_ids, source_salt, cut)
            source = self._match(source_ids, source_salt, None if cut is not None else request.src_end - offset)
            in_place = cut is not None and self._radix.takeable_from(source) <= cut
            if cut is not None and not in_place:
                # Only what is copied is to be held meanwhile.
                source = self._match(source_ids, source_salt, request.src_end - offset)
        num_kept = min(offset + len(source), request.src_end) - request.src_start
        if num_kept <= 0:
            raise RefusedError(
                Reason.EVICTED,
                f"{offset + len(source)} tokens of the base are cached, the kept run starts at {request.src_start}",
            )
        num_filled = max(0, request.dst_start - len(head))
        if num_filled and self._fill is None:
            raise RefusedError(
                Reason.EVICTED, f"{len(head)} of the {request.dst_start} tokens left of the kept run are cached"
            )
        if num_filled and self._fill is not None:
            self._fill.check_room(num_filled)
        target_ids = self._new[: request.dst_start + num_kept]
        assert len(target_ids) == request.dst_start + num_kept, "the kept run ends beyond the prompt"
        matched = min(len(target), len(target_ids))
        if matched == len(target_ids):
            return
        if in_place and cut is not None:
            self._move_in_place(reply, source_salt, offset, source, cut, target_ids, head, num_kept)
        else:
            self._copy(reply, source, offset, head, target, matched, target_ids)
        reply.filled = num_filled

    def _cut(self, offset: int) -> int | None:
        """Return from which token of the source on it would be taken out of the tree; None where it must be copied."""
        request = self._request
        if not (request.in_place and (request.from_own or request.parked_from is not None)):
            return None
        cut = 0
        if request.parked_from is None:
            # What the head has in common with the base stays.
            head_ids = self._new[: request.dst_start]
            cut = max(request.removed_start, common_prefix(self._base, head_ids))
        return None if offset + cut > request.src_start else cut

    def _move_in_place(
        self,
        reply: CacheReply,
        source_salt: str | None,
        offset: int,
        whole: Path,
        cut: int,
        target_ids: array[int],
        head: Path,
        num_kept: int,
    ) -> None:
        request = self._request
        assert request.own_salt is not None
        num_filled = request.dst_start - len(head)
        kept_start = request.src_start - offset - cut
        # R goes where the removed tokens were; what it needs beyond that is asked for while nothing has changed.
        filled = self._fill_in_place(whole, head, num_filled - kept_start, num_filled)
        with self._stages("match"):
            taken = self._radix.take(whole, cut)
            source_ids = self._base[offset : offset + len(whole)]
            self._footprints.cut(request.own_salt, self._sequence(source_ids, source_salt), cut)
        removed, kept = taken[:kept_start], taken[kept_start : kept_start + num_kept]
        rest = taken[kept_start + num_kept :]
        filled = torch.cat([removed[:num_filled], filled]) if len(filled) else removed[:num_filled]
        removed = removed[num_filled:]
        try:
            with self._stages("rotate"):
                pool = self._pool()
                _turn_rows_(pool, kept, old_start=request.src_start, new_start=request.dst_start)
        except BaseException:
            # Half of them may be turned by now; nobody can use them any more.
            self._radix.free(torch.cat([filled, removed, kept, rest]))
            raise
        path = self._insert(target_ids, request.own_salt, torch.cat([filled, kept]), matched=len(head))
        self._place(filled, path)
        if len(removed):
            self._radix.free(removed)
        reply.parked_from = None
        if len(rest) and request.more_follow:
            reply.parked_from = request.src_start + num_kept
            rest_ids = self._base[reply.parked_from : reply.parked_from + len(rest)]
            self._insert(rest_ids, parked_salt(request.own_salt), rest, matched=0)
        elif len(rest):
            self._radix.free(rest)
        reply.moved, reply.moved_in_place = num_kept, True

    def _fill_in_place(self, whole: Path, head: Path, num_more: int, num_filled: int) -> torch.Tensor:
        """Have R computed in this batch, if it is missing; return the slots that it needs beyond the removed ones."""
        slots = self._radix.no_slots()
        if num_filled and self._fill is not None:
            if num_more > 0:
                locks = [self._radix.lock(path) for path in (whole, head) if len(path)]
                try:
                    slots = self._allocate(num_more)
                finally:
                    for lock in locks:
                        self._radix.unlock(lock)
            self._admit(head, slots)
        return slots

    def _allocate(self, num_slots: int) -> torch.Tensor:
        with self._stages("allocate"):
            slots = self._radix.allocate(num_slots)
        if slots is None:
            raise RefusedError(
                Reason.POOL_FULL,
                f"{num_slots} slots are needed, {self._radix.counts()['available']} are free and the rest is held",
            )
        return slots

    def _admit(self, head: Path, allocated: torch.Tensor) -> None:
        assert self._fill is not None
        try:
            with self._stages("admit"):
                self._fill.admit(self._new[: self._request.dst_start], head)
        except BaseException:
            if len(allocated):
                self._radix.free(allocated)
            raise

    def _place(self, filled: torch.Tensor, path: Path) -> None:
        if len(filled):
            assert self._fill is not None
            with self._stages("admit"):
                self._fill.place(filled, path)

    def _copy(
        self,
        reply: CacheReply,
        source: Path,
        offset: int,
        head: Path,
        target: Path,
        matched: int,
        target_ids: array[int],
    ) -> None:
        request = self._request
        num_new = len(target_ids) - matched
        num_head = max(0, len(head) - matched)
        num_filled = max(0, request.dst_start - len(head))
        num_there = max(0, matched - request.dst_start)
        old_start, new_start = request.src_start + num_there, request.dst_start + num_there
        locks = [self._radix.lock(path) for path in (source, head, target) if len(path)]
        try:
            slots = self._allocate(num_new)
            if num_filled:
                self._admit(head, slots)
            copied, filled, moved = slots.tensor_split([num_head, num_head + num_filled])
            try:
                with self._stages("rotate"):
                    pool = self._pool()
                    _copy_rows_(pool, head.slots[matched:], copied, old_start=0, new_start=0)
                    kept = source.slots[old_start - offset :][: len(moved)]
                    _copy_rows_(pool, kept, moved, old_start=old_start, new_start=new_start)
            except BaseException:
                self._radix.free(slots)
                raise
            path = self._insert(target_ids, request.own_salt, slots, matched=matched)
            self._place(filled, path)
        finally:
            for lock in locks:
                self._radix.unlock(lock)
        if not request.from_own and request.parked_from is None:
            # Where an explicit splice has its base from is the conversation's from now on, for a later forget.
            self._footprints.record(
                self._radix, request.own_salt or "", self._sequence(self._base, request.shared_salt)
            )
        reply.copied, reply.moved = num_head, len(moved)

    def _pool(self) -> MlaPool:
        compat.wait_for_forward(self._scheduler)
        return compat.mla_pool(self._scheduler)


def _sum(total: Purge, more: Purge, *, left: bool = True) -> Purge:
    """Add up; `left=False` counts only what was dropped, where the rest is counted again later."""
    return Purge(
        dropped_tokens=total.dropped_tokens + more.dropped_tokens,
        held_tokens=total.held_tokens + more.held_tokens * left,
        shared_tokens=total.shared_tokens + more.shared_tokens * left,
    )


def _copy_rows_(pool: MlaPool, src: torch.Tensor, dst: torch.Tensor, *, old_start: int, new_start: int) -> None:
    """Copy a run of rows of every layer from `src` to `dst` slots and turn them to their new positions, in place."""
    if len(src):
        table = run_table(pool.inv_freq, len(src), old_start=old_start, position_delta=new_start - old_start)
        copy_rotate_all_(pool.layers, src, dst, table, is_neox_style=pool.is_neox_style)


def _turn_rows_(pool: MlaPool, slots: torch.Tensor, *, old_start: int, new_start: int) -> None:
    """Turn a run of rows of every layer to their new positions where they stand."""
    if old_start != new_start:
        table = run_table(pool.inv_freq, len(slots), old_start=old_start, position_delta=new_start - old_start)
        rotate_all_(pool.layers, slots, table, is_neox_style=pool.is_neox_style)
