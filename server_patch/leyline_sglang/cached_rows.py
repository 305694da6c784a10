"""A conversation's cached rows in the scheduler: found, keyed, copied and turned, in one message's namespaces.

Decides nothing: `move.py` and `splice.py` say which rows go where.
"""

from __future__ import annotations

import time
from array import array
from typing import Any

import torch
from leyline_kernels.dispatch import copy_rotate_all_, rotate_all_, run_table

from leyline_sglang import compat
from leyline_sglang.compat import MlaPool, Path, RadixPort
from leyline_sglang.footprints import Sequence, footprints_of
from leyline_sglang.io_types import CacheRequest, unpack
from leyline_sglang.namespaces import parked_salt


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


class CachedRows:
    """What a message is about: its sequences, the radix cache, and who has put what there."""

    def __init__(
        self,
        scheduler: Any,
        request: CacheRequest,
        *,
        base: array[int] | None = None,
        new: array[int] | None = None,
    ) -> None:
        """Read the message; `base` and `new` are what it has packed, where the caller has them unpacked."""
        self.scheduler = scheduler
        self.request = request
        self.stages = Stages()
        self.radix = RadixPort(scheduler.tree_cache)
        self.footprints = footprints_of(scheduler.tree_cache)
        self.base = unpack(request.base) if base is None else base
        self.new = unpack(request.new) if new is None else new

    def match(self, token_ids: array[int], salt: str | None, limit: int | None = None) -> Path:
        """Return what is cached of `token_ids[:limit]` in a namespace."""
        return self.radix.match(token_ids, self.request.extra_key, salt, limit)

    def sequence(self, token_ids: array[int], salt: str | None) -> Sequence:
        """Return a sequence as footprints have it."""
        return Sequence(self.request.extra_key, salt, token_ids)

    def insert(self, token_ids: array[int], salt: str | None, slots: torch.Tensor, *, matched: int) -> Path:
        """Key `slots` by `token_ids[matched:]`, the first of which are cached already, and take note of it."""
        with self.stages("insert"):
            extra_key = self.request.extra_key
            path = self.radix.insert(token_ids, slots, matched=matched, extra_key=extra_key, cache_salt=salt)
        assert self.request.own_salt is not None
        with self.stages("record"):
            self.footprints.record(self.radix, self.request.own_salt, self.sequence(token_ids, salt))
        return path

    def drop_parked(self) -> None:
        """Drop what is parked: nothing needs it any more."""
        own_salt = self.request.own_salt
        assert own_salt is not None
        self.footprints.drop_parked(self.radix, own_salt, parked_salt(own_salt))

    def pool(self) -> MlaPool:
        """Return the pool, to be changed behind the forward pass in flight."""
        compat.wait_for_forward(self.scheduler)
        return compat.mla_pool(self.scheduler)


def copy_rows_(pool: MlaPool, src: torch.Tensor, dst: torch.Tensor, *, old_start: int, new_start: int) -> None:
    """Copy a run of rows of every layer from `src` to `dst` slots and turn them to their new positions, in place."""
    if len(src):
        table = run_table(pool.inv_freq, len(src), old_start=old_start, position_delta=new_start - old_start)
        copy_rotate_all_(pool.layers, src, dst, table, is_neox_style=pool.is_neox_style)


def turn_rows_(pool: MlaPool, slots: torch.Tensor, *, old_start: int, new_start: int) -> None:
    """Turn a run of rows of every layer to their new positions where they stand."""
    if old_start != new_start:
        table = run_table(pool.inv_freq, len(slots), old_start=old_start, position_delta=new_start - old_start)
        rotate_all_(pool.layers, slots, table, is_neox_style=pool.is_neox_style)
