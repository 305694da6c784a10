"""The scheduler's half of one step: it looks again at everything before it touches anything.

Nothing is locked between the prefill of R and the move, so whatever was cached then may be gone by now.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from leyline_sglang import compat
from leyline_sglang.io_types import CacheReply, CacheRequest, pack

from leyline_agent.core.protocol import Reason
from tests.in_process.harness import World

SHARED = (None, None)
OWN = "leyline-own"
BASE = list(range(1, 13))
R = [20, 21]
NEW = BASE[:4] + R + BASE[7:]
"""Tokens `[4, 7)` replaced: the head is 6 tokens, the kept run 5."""
MOVE: dict[str, Any] = {
    "base": pack(BASE),
    "new": pack(NEW),
    "own_salt": OWN,
    "move": True,
    "removed_start": 4,
    "src_start": 7,
    "src_end": 12,
    "dst_start": 6,
}


@pytest.fixture
def world(core: str) -> Iterator[World]:
    """The base and R are cached, R as a prefix of the prompt."""
    with World(core) as world:
        for token_ids in (BASE, NEW[:6]):
            world.finish(world.start(token_ids, SHARED, OWN))
        yield world


def seen(world: World) -> Any:
    """Return everything that a refusal must leave as it was: tree, locks, slots, rows."""
    walk = world.tree.tree_core.walk_for_kv_canary(False, False)
    cached = zip(walk.slot_indices.tolist(), walk.positions.tolist(), walk.prev_slot_indices.tolist(), strict=True)
    return (
        sorted(cached),
        sorted(world.free_slots()),
        world.tree.protected_size(),
        [buffer.tolist() for buffer in world.buffers],
    )


def refused(world: World, **fields: Any) -> CacheReply:
    """Ask for a move that must be refused and change nothing."""
    before = seen(world)
    reply = world.ask(CacheRequest(**MOVE | fields))
    assert seen(world) == before
    return reply


def use(world: World, token_ids: list[int]) -> None:
    """Mark a cached sequence as used last, so that others are evicted first."""
    assert len(world.slots_of(SHARED, token_ids)) == len(token_ids)


def test_what_is_cached_is_moved(world: World) -> None:
    reply = world.ask(CacheRequest(**MOVE))
    assert (reply.reason, reply.moved, reply.copied, reply.new_own) == ("", 5, 6, 11)


def test_a_base_evicted_after_r_was_prefilled_is_refused(world: World) -> None:
    use(world, NEW[:6])
    world.evict(1)
    assert len(world.slots_of(SHARED, BASE)) == 4
    assert refused(world).reason == Reason.EVICTED


def test_an_r_evicted_after_it_was_prefilled_is_refused(world: World) -> None:
    use(world, BASE)
    world.evict(1)
    assert len(world.slots_of(SHARED, NEW)) == 4
    assert refused(world).reason == Reason.EVICTED


def test_a_flush_in_between_is_refused(world: World) -> None:
    world.flush()
    assert refused(world).reason == Reason.EVICTED


def test_a_pool_without_room_is_refused(world: World) -> None:
    held = world.start([*BASE, 30], SHARED)
    # 5 slots are left for the 11 rows of head and run, and R may not be evicted for them.
    hog = world.start(list(range(40, 40 + world.allocator.available_size() - 5)), (None, "another"))
    assert refused(world).reason == Reason.POOL_FULL
    world.finish(held)
    world.finish(hog)


def test_a_base_in_nobodys_namespace_is_refused(world: World) -> None:
    assert refused(world, from_own=True, head_from_own=True).reason == Reason.EVICTED


def test_the_run_is_cut_to_what_is_cached(world: World) -> None:
    world.finish(world.start(BASE[:10], SHARED))
    use(world, BASE[:10])
    use(world, NEW[:6])
    world.evict(1)
    assert len(world.slots_of(SHARED, BASE)) == 10
    assert world.ask(CacheRequest(**MOVE)).moved == 3


def test_the_world_may_be_spliced(world: World) -> None:
    """Nothing of the harness is what the plugin would refuse a server for."""
    assert compat.unsupported(world.scheduler) == []
