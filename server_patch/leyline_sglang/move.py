"""Move one kept run to its new place: in its slots, or into copies.

What is decided depends on the message, the radix cache and the allocator only, which are the same on every
tensor-parallel rank. A refusal leaves tree, locks, slots and rows as they were: it is decided before anything is taken
or allocated.

Rows of the conversation's own namespace that nobody else holds or goes on from are moved where they are: taken out of
the tree, turned, and keyed anew. All others are copied, so whoever reads them is not touched.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import torch

from leyline_agent.core.protocol import Reason
from leyline_agent.core.token_ids import common_prefix
from leyline_sglang.cached_rows import CachedRows, copy_rows_, turn_rows_
from leyline_sglang.compat import Path
from leyline_sglang.io_types import CacheReply
from leyline_sglang.namespaces import parked_salt


class RefusedError(Exception):
    """One move is refused; tree, locks, slots and rows are as before it."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class Fill(Protocol):
    """Computes rows that are keyed before they are there, in the very batch of the request that reads them."""

    def check_room(self, num_tokens: int, path_tokens: int) -> None:
        """Raise `RefusedError` if so many tokens cannot be computed in this batch, on a path of so many in all."""

    def admit(self, token_ids: array[int], prefix: Path) -> None:
        """Have the batch compute what is missing of `token_ids` right of `prefix`; raises as `check_room`."""

    def place(self, slots: torch.Tensor, path: Path) -> None:
        """Say into which slots, and hold the path that names them until they are written."""


class Move:
    """The move that a message asks for."""

    def __init__(self, rows: CachedRows, fill: Fill | None = None) -> None:
        """`fill` computes what is missing left of the run; without one the move is refused then."""
        self._rows = rows
        self._fill = fill

    def run(self, reply: CacheReply) -> None:
        """Move the kept run, and say so in `reply`; or why not."""
        request = self._rows.request
        try:
            self._move(reply)
            if request.parked_from is not None and not request.more_follow:
                # Where the last run was copied from there, or was in its place already.
                self._rows.drop_parked()
        except RefusedError as refused:
            reply.reason, reply.message = refused.reason.value, str(refused)
        reply.stages_ms = self._rows.stages.ms

    def _move(self, reply: CacheReply) -> None:
        """Bring a kept run to its new place in the conversation's namespace."""
        request = self._rows.request
        assert request.own_salt is not None
        offset = request.parked_from or 0
        parked = parked_salt(request.own_salt)
        own_or_shared = request.own_salt if request.from_own else request.shared_salt
        source_salt = parked if request.parked_from is not None else own_or_shared
        if request.parked_from is None:
            self._rows.drop_parked()
        elif request.more_follow:
            # Unless this run is taken from there: then what is right of it is parked anew.
            reply.parked_from = request.parked_from

        with self._rows.stages("match"):
            target_end = min(request.dst_start + request.src_end - request.src_start, len(self._rows.new))
            target = self._rows.match(self._rows.new, request.own_salt, target_end)
            if len(target) == target_end:
                # A retry: the rows are there already.
                return
            # A match splits nodes but leaves slots where they are, so the lists stay right until something is evicted.
            head = target
            if len(target) < request.dst_start and not request.head_from_own:
                shared = self._rows.match(self._rows.new, request.shared_salt, request.dst_start)
                head = shared if len(shared) > len(target) else target
            # All that stands left of the run must be in the conversation's namespace already.
            cut = self._cut(offset) if len(head) == len(target) <= request.dst_start else None
            source_ids = self._rows.base[offset:] if offset else self._rows.base
            if cut and (offset or cut != len(target) or source_ids[:cut] != self._rows.new[:cut]):
                # Splits the node there, so that the end of the source is nodes of its own. Else the match of the
                # target has done so.
                self._rows.match(source_ids, source_salt, cut)
            source = self._rows.match(source_ids, source_salt, None if cut is not None else request.src_end - offset)
            in_place = cut is not None and self._rows.radix.takeable_from(source) <= cut
            if cut is not None and not in_place:
                # Only what is copied is to be held meanwhile.
                source = self._rows.match(source_ids, source_salt, request.src_end - offset)
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
            self._fill.check_room(num_filled, request.dst_start + num_kept)
        target_ids = self._rows.new[: request.dst_start + num_kept]
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
        request = self._rows.request
        if not (request.in_place and (request.from_own or request.parked_from is not None)):
            return None
        cut = 0
        if request.parked_from is None:
            # What the head has in common with the base stays.
            head_ids = self._rows.new[: request.dst_start]
            cut = max(request.removed_start, common_prefix(self._rows.base, head_ids))
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
        request = self._rows.request
        assert request.own_salt is not None
        num_filled = request.dst_start - len(head)
        kept_start = request.src_start - offset - cut
        # R goes where the removed tokens were; what it needs beyond that is asked for while nothing has changed.
        filled = self._fill_in_place(whole, head, num_filled - kept_start, num_filled)
        with self._rows.stages("match"):
            taken = self._rows.radix.take(whole, cut)
            source_ids = self._rows.base[offset : offset + len(whole)]
            self._rows.footprints.cut(request.own_salt, self._rows.sequence(source_ids, source_salt), cut)
        removed, kept = taken[:kept_start], taken[kept_start : kept_start + num_kept]
        rest = taken[kept_start + num_kept :]
        filled = torch.cat([removed[:num_filled], filled]) if len(filled) else removed[:num_filled]
        removed = removed[num_filled:]
        try:
            with self._rows.stages("rotate"):
                pool = self._rows.pool()
                turn_rows_(pool, kept, old_start=request.src_start, new_start=request.dst_start)
        except BaseException:
            # Half of them may be turned by now; nobody can use them any more.
            self._rows.radix.free(torch.cat([filled, removed, kept, rest]))
            raise
        path = self._rows.insert(target_ids, request.own_salt, torch.cat([filled, kept]), matched=len(head))
        self._place(filled, path)
        if len(removed):
            self._rows.radix.free(removed)
        reply.parked_from = None
        if len(rest) and request.more_follow:
            reply.parked_from = request.src_start + num_kept
            rest_ids = self._rows.base[reply.parked_from : reply.parked_from + len(rest)]
            self._rows.insert(rest_ids, parked_salt(request.own_salt), rest, matched=0)
        elif len(rest):
            self._rows.radix.free(rest)
        reply.moved, reply.moved_in_place = num_kept, True

    def _fill_in_place(self, whole: Path, head: Path, num_more: int, num_filled: int) -> torch.Tensor:
        """Have R computed in this batch, if it is missing; return the slots that it needs beyond the removed ones."""
        slots = self._rows.radix.no_slots()
        if num_filled and self._fill is not None:
            if num_more > 0:
                locks = [self._rows.radix.lock(path) for path in (whole, head) if len(path)]
                try:
                    slots = self._allocate(num_more)
                finally:
                    for lock in locks:
                        self._rows.radix.unlock(lock)
            self._admit(head, slots)
        return slots

    def _allocate(self, num_slots: int) -> torch.Tensor:
        with self._rows.stages("allocate"):
            slots = self._rows.radix.allocate(num_slots)
        if slots is None:
            raise RefusedError(
                Reason.POOL_FULL,
                f"{num_slots} slots are needed, {self._rows.radix.counts()['available']} are free and the rest is held",
            )
        return slots

    def _admit(self, head: Path, allocated: torch.Tensor) -> None:
        assert self._fill is not None
        try:
            with self._rows.stages("admit"):
                self._fill.admit(self._rows.new[: self._rows.request.dst_start], head)
        except BaseException:
            if len(allocated):
                self._rows.radix.free(allocated)
            raise

    def _place(self, filled: torch.Tensor, path: Path) -> None:
        if len(filled):
            assert self._fill is not None
            with self._rows.stages("admit"):
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
        request = self._rows.request
        num_new = len(target_ids) - matched
        num_head = max(0, len(head) - matched)
        num_filled = max(0, request.dst_start - len(head))
        num_there = max(0, matched - request.dst_start)
        old_start, new_start = request.src_start + num_there, request.dst_start + num_there
        locks = [self._rows.radix.lock(path) for path in (source, head, target) if len(path)]
        try:
            slots = self._allocate(num_new)
            if num_filled:
                self._admit(head, slots)
            copied, filled, moved = slots.tensor_split([num_head, num_head + num_filled])
            try:
                with self._rows.stages("rotate"):
                    pool = self._rows.pool()
                    copy_rows_(pool, head.slots[matched:], copied, old_start=0, new_start=0)
                    kept = source.slots[old_start - offset :][: len(moved)]
                    copy_rows_(pool, kept, moved, old_start=old_start, new_start=new_start)
            except BaseException:
                self._rows.radix.free(slots)
                raise
            path = self._rows.insert(target_ids, request.own_salt, slots, matched=matched)
            self._place(filled, path)
        finally:
            for lock in locks:
                self._rows.radix.unlock(lock)
        if not request.from_own and request.parked_from is None:
            # Where an explicit splice has its base from is the conversation's from now on, for a later forget.
            self._rows.footprints.record(
                self._rows.radix, request.own_salt or "", self._rows.sequence(self._rows.base, request.shared_salt)
            )
        reply.copied, reply.moved = num_head, len(moved)
