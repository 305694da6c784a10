"""What empties the cache, or is said to: what was cached before, and what comes of requests that wait, is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from leyline_agent.core.protocol import Status
from tests.in_process.clients import Chat, Client
from tests.in_process.harness import World
from tests.in_process.test_one_step import CUT, PROMPT, send_edited, status

OTHER = [*PROMPT[:4], 60, 61]
"""Has the first four tokens in common with it."""


@pytest.fixture
def world(core: str) -> Iterator[World]:
    with World(core, one_step=True) as world:
        yield world


@pytest.fixture
def client(world: World) -> Client:
    return Client(world, "anna")


def edit(client: Client, base: Chat) -> Chat:
    """Have the base's sequence edited, and the answer."""
    edited = send_edited(client, base, CUT)
    client.arrive(edited)
    assert status(edited) == Status.SPLICED
    client.finish(edited)
    return edited


def cached(client: Client, token_ids: list[int]) -> int:
    """Return how much of a sequence is cached for everybody."""
    return len(client.world.model.match((None, None), token_ids))


def update_weights(world: World) -> None:
    """Update weights and leave the cache as it is, as with `flush_cache: false`."""

    async def update(_manager: Any) -> tuple[bool, str]:
        return True, "Succeeded to update model weights."

    world.wait(world.serving.reset(update, world.manager))


@pytest.mark.parametrize("edited", [False, True], ids=["shared", "own"])
def test_what_an_update_of_weights_has_left_is_forgotten_later(world: World, client: Client, edited: bool) -> None:
    """The memory of turns goes, whether or not the cache was emptied; the rows can still be found."""
    base = client.chat(PROMPT, outputs=(9, 9))
    if edited:
        edit(client, base)
    update_weights(world)
    forgetting = client.chat(OTHER, forget="all")
    assert forgetting.outcome is not None
    assert forgetting.outcome.purge is not None
    assert forgetting.outcome.purge.dropped_tokens > 0
    assert cached(client, PROMPT) == 4
    assert all(namespace == (None, None) or not world.model.size(namespace) for namespace in world.model.roots)


def test_what_an_update_of_weights_has_left_is_released(world: World, client: Client) -> None:
    edit(client, client.chat(PROMPT))
    update_weights(world)
    reply = client.release()
    assert reply is not None
    assert reply.purge.dropped_tokens == 19


@pytest.mark.parametrize("edited", [False, True], ids=["grown", "edited"])
def test_a_turn_that_waits_through_a_flush_is_forgotten_later(world: World, client: Client, edited: bool) -> None:
    """While generation is paused a flush does not mind who waits."""
    base = client.chat(PROMPT)
    waiting = send_edited(client, base, CUT) if edited else client.send([*PROMPT, 50, 51], base=base.turn.turn_id)
    assert world.flush(is_paused=True)
    client.arrive(waiting)
    assert cached(client, waiting.turn.prompt) == len(waiting.turn.prompt)
    client.chat(OTHER, forget="all")
    assert cached(client, waiting.turn.prompt) == 4


def test_a_turn_that_waits_through_a_forget_and_a_flush_is_forgotten(world: World, client: Client) -> None:
    """The forget comes while it has cached nothing; what it caches later is dropped as it ends."""
    waiting = client.send(PROMPT, outputs=(9, 9))
    forgetting = client.send(OTHER, forget="all")
    assert world.flush(is_paused=True)
    client.arrive(waiting)
    client.arrive(forgetting)
    client.finish(waiting)
    assert cached(client, PROMPT) == 4
