"""The footprints' own bounds, on a real radix tree: what one conversation does must not cost the others."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from leyline_sglang import footprints as module
from leyline_sglang.compat import Path, RadixPort
from leyline_sglang.footprints import Footprints, Sequence

from tests.in_process.harness import World

MINE, OTHER = "leyline-mine", "leyline-other"


@pytest.fixture
def world(core: str) -> Iterator[World]:
    with World(core, size=64) as world:
        yield world


def _cache(world: World, footprints: Footprints, tag: str, ids: list[int], salt: str | None = None) -> None:
    """Key ids as a request that has ended would, and report them."""
    radix = RadixPort(world.tree)
    token_ids = array("q", ids)
    path = radix.match(token_ids, None, salt)
    slots = radix.allocate(len(ids) - len(path))
    assert slots is not None
    radix.insert(token_ids, slots, matched=len(path), extra_key=None, cache_salt=salt)
    footprints.record(radix, tag, Sequence(None, salt, token_ids))


def _cached(world: World, ids: list[int], salt: str | None = None) -> int:
    return len(RadixPort(world.tree).match(array("q", ids), None, salt))


def _written(world: World, radix: RadixPort, ids: list[int]) -> Path:
    """Write something to the cached rows of a text, and return where they are."""
    path = radix.match(array("q", ids), None, None)
    for buffer in world.buffers:
        buffer[path.slots] = 7.0
    return path


def test_a_sequence_and_what_it_goes_on_from_are_one(world: World) -> None:
    footprints = Footprints()
    for ids in ([1, 2], [1, 2, 3, 4], [1, 2, 3], [1, 2, 9]):
        _cache(world, footprints, MINE, ids)
    assert [s.token_ids.tolist() for s in footprints.sequences(MINE)] == [[1, 2, 3, 4], [1, 2, 9]]


def test_one_conversation_is_bounded_by_itself(world: World) -> None:
    """Its own least recently used sequences go, and nothing of the other one."""
    footprints = Footprints()
    _cache(world, footprints, OTHER, [50, 51, 52])
    with patch.object(module, "_TOKENS_PER_SLOT_OF_A_TAG", 0.5):
        for ending in range(10):
            _cache(world, footprints, MINE, [1, 2, 3, 4, 5, 6, 7, 20 + ending])
    assert sum(len(s.token_ids) for s in footprints.sequences(MINE)) <= 32
    assert _cached(world, [1, 2, 3, 4, 5, 6, 7, 20]) == 7
    assert _cached(world, [1, 2, 3, 4, 5, 6, 7, 29]) == 8
    assert _cached(world, [50, 51, 52]) == 3


def test_what_is_held_is_dropped_after_however_many_later_closes(world: World) -> None:
    footprints, radix = Footprints(), RadixPort(world.tree)
    _cache(world, footprints, MINE, [1, 2, 3, 4])
    lock = radix.lock(radix.match(array("q", [1, 2, 3, 4]), None, None))
    footprints.close(MINE, keep=array("q", [1]), forget=True, scrub=False, successor="leyline-next")
    purge = footprints.empty(radix, MINE)
    assert (purge.dropped_tokens, purge.held_tokens, purge.shared_tokens) == (0, 3, 0)
    for idx in range(2 * module._MAX_CLOSED):
        footprints.close(f"leyline-{idx}", keep=array("q"), forget=True, scrub=False, successor=None)
    radix.unlock(lock)
    footprints.retry(world.scheduler, radix, has_ended=False)
    assert _cached(world, [1, 2, 3, 4]) == 1
    assert not footprints.due


def test_while_nothing_is_given_back_nothing_is_tried_again(world: World) -> None:
    """A request that decodes for long must not cost every batch a search."""
    footprints, radix = Footprints(), RadixPort(world.tree)
    _cache(world, footprints, MINE, [1, 2, 3, 4])
    lock = radix.lock(radix.match(array("q", [1, 2, 3, 4]), None, None))
    footprints.close(MINE, keep=array("q"), forget=True, scrub=False, successor=None)
    footprints.empty(radix, MINE)
    footprints.retry(world.scheduler, radix, has_ended=False)
    with patch.object(Footprints, "empty", side_effect=AssertionError("searched again")):
        footprints.retry(world.scheduler, radix, has_ended=False)
    radix.unlock(lock)
    footprints.retry(world.scheduler, radix, has_ended=False)
    assert _cached(world, [1, 2, 3, 4]) == 0


def test_a_close_is_looked_at_although_nothing_was_given_back_since(world: World) -> None:
    """Two holds of equal size, one after the other: the sum alone would not tell that the second has ended."""
    footprints, radix = Footprints(), RadixPort(world.tree)
    for tag, ids in ((MINE, [1, 2, 3, 4]), (OTHER, [5, 6, 7, 8])):
        _cache(world, footprints, tag, ids)
        lock = radix.lock(radix.match(array("q", ids), None, None))
        footprints.close(tag, keep=array("q"), forget=True, scrub=False, successor=None)
        footprints.empty(radix, tag)
        radix.unlock(lock)
        footprints.retry(world.scheduler, radix, has_ended=False)
        assert _cached(world, ids) == 0


def test_an_ended_request_begins_another_round_whatever_the_sum(world: World) -> None:
    footprints, radix = Footprints(), RadixPort(world.tree)
    for tag, ids in ((MINE, [1, 2, 3, 4]), (OTHER, [5, 6, 7, 8])):
        _cache(world, footprints, tag, ids)
    locks = [radix.lock(radix.match(array("q", [1, 2, 3, 4]), None, None))]
    footprints.close(MINE, keep=array("q"), forget=True, scrub=False, successor=None)
    footprints.empty(radix, MINE)
    footprints.retry(world.scheduler, radix, has_ended=False)
    radix.unlock(locks[0])
    held = radix.lock(radix.match(array("q", [5, 6, 7, 8]), None, None))
    footprints.retry(world.scheduler, radix, has_ended=True)
    assert _cached(world, [1, 2, 3, 4]) == 0
    radix.unlock(held)


def test_the_bound_of_all_leaves_what_is_to_be_forgotten(world: World) -> None:
    footprints, radix = Footprints(), RadixPort(world.tree)
    _cache(world, footprints, MINE, [1, 2, 3, 4])
    lock = radix.lock(radix.match(array("q", [1, 2, 3, 4]), None, None))
    footprints.close(MINE, keep=array("q"), forget=True, scrub=False, successor=None)
    footprints.empty(radix, MINE)
    with patch.object(module, "_TOKENS_PER_SLOT", 0.1):
        for idx in range(5):
            _cache(world, footprints, f"leyline-{idx}", [10 * idx + 100, 1, 2, 3])
    radix.unlock(lock)
    footprints.retry(world.scheduler, radix, has_ended=False)
    assert _cached(world, [1, 2, 3, 4]) == 0


def test_a_scrub_does_not_depend_on_which_of_two_tags_lets_the_rows_go(world: World) -> None:
    """Both have had the same rows, one asked for a scrub, and the other one's turn comes first."""
    footprints, radix = Footprints(), RadixPort(world.tree)
    for tag in (MINE, OTHER):
        _cache(world, footprints, tag, [1, 2, 3, 4])
    path = _written(world, radix, [1, 2, 3, 4])
    lock = radix.lock(path)
    for tag, scrub in ((MINE, False), (OTHER, True)):
        footprints.close(tag, keep=array("q"), forget=True, scrub=scrub, successor=None)
        footprints.empty(radix, tag)
    radix.unlock(lock)
    footprints.retry(world.scheduler, radix, has_ended=True)
    assert _cached(world, [1, 2, 3, 4]) == 0
    assert not any(buffer[path.slots].any() for buffer in world.buffers)


def test_nor_does_it_on_what_else_is_held_of_the_one_that_asked(world: World) -> None:
    """The other tag lets the rows go first, and the one that asked still waits for another request."""
    footprints, radix = Footprints(), RadixPort(world.tree)
    for tag, ids in ((OTHER, [1, 2, 3, 4]), (MINE, [1, 2, 3, 4]), (MINE, [7, 8])):
        _cache(world, footprints, tag, ids)
    path = _written(world, radix, [1, 2, 3, 4])
    lock, still_held = radix.lock(path), radix.lock(radix.match(array("q", [7, 8]), None, None))
    for tag, scrub in ((OTHER, False), (MINE, True)):
        footprints.close(tag, keep=array("q"), forget=True, scrub=scrub, successor=None)
        footprints.empty(radix, tag)
    radix.unlock(lock)
    footprints.retry(world.scheduler, radix, has_ended=True)
    assert _cached(world, [1, 2, 3, 4]) == 0
    assert not any(buffer[path.slots].any() for buffer in world.buffers)
    radix.unlock(still_held)


def test_branches_that_one_request_holds_are_remembered_once(world: World) -> None:
    footprints, radix = Footprints(), RadixPort(world.tree)
    for ending in range(10):
        _cache(world, footprints, MINE, [1, 2, 3, 20 + ending])
    lock = radix.lock(radix.match(array("q", [1, 2, 3]), None, None))
    footprints.close(MINE, keep=array("q"), forget=True, scrub=False, successor=None)
    purge = footprints.empty(radix, MINE)
    assert (purge.dropped_tokens, purge.held_tokens) == (10, 3)
    assert len(footprints.sequences(MINE)) == 1
    radix.unlock(lock)
    footprints.retry(world.scheduler, radix, has_ended=False)
    assert _cached(world, [1, 2, 3]) == 0


def test_what_others_went_on_from_is_not_dropped_when_somebody_caches_it_again(world: World) -> None:
    """Of a forgotten sequence a request holds a part, and another conversation goes on from all of it."""
    footprints, radix = Footprints(), RadixPort(world.tree)
    _cache(world, footprints, MINE, [1, 2, 3, 4])
    _cache(world, footprints, OTHER, [1, 2, 3, 4, 5, 6])
    lock = radix.lock(radix.match(array("q", [1, 2]), None, None))
    footprints.close(MINE, keep=array("q"), forget=True, scrub=False, successor=None)
    purge = footprints.empty(radix, MINE)
    assert (purge.dropped_tokens, purge.held_tokens, purge.shared_tokens) == (0, 2, 2)
    footprints.close(OTHER, keep=array("q"), forget=True, scrub=False, successor=None)
    assert footprints.empty(radix, OTHER).dropped_tokens == 4
    _cache(world, footprints, "leyline-third", [1, 2, 3])
    radix.unlock(lock)
    footprints.retry(world.scheduler, radix, has_ended=True)
    assert _cached(world, [1, 2, 3]) == 3


def test_closed_tags_whose_rows_are_held_do_not_push_out_those_that_nothing_was_cached_for(world: World) -> None:
    footprints, radix, nothing = Footprints(), RadixPort(world.tree), array("q")
    with patch.object(module, "_MAX_CLOSED", 2):
        locks = []
        for tag in ("leyline-held", "leyline-held-too", "leyline-held-three"):
            _cache(world, footprints, tag, [50, 51], salt=tag)
            locks.append(radix.lock(radix.match(array("q", [50, 51]), None, tag)))
            footprints.close(tag, keep=nothing, forget=True, scrub=False, successor=None)
            footprints.empty(radix, tag)
        for tag in (MINE, OTHER):
            footprints.close(tag, keep=nothing, forget=True, scrub=False, successor=None)
        # As where one message closes both.
        for tag in (MINE, OTHER):
            footprints.empty(radix, tag)
        _cache(world, footprints, MINE, [1, 2, 3])
        footprints.retry(world.scheduler, radix, has_ended=True)
        assert not _cached(world, [1, 2, 3])
        for lock in locks:
            radix.unlock(lock)
