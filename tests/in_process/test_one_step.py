"""Edits carried out in the batch of their own request: what a scenario of its own shows better than random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
from leyline_sglang import one_step

from leyline_agent.core.protocol import Directive, Reason, Status
from tests.in_process.clients import Chat, Client
from tests.in_process.harness import World
from tests.in_process.rows import Row

PROMPT = [*range(1, 21)]
CUT = Directive(start=4, end=8, replacement_ids=(30, 31))


@pytest.fixture
def world(core: str) -> Iterator[World]:
    with World(core, one_step=True) as world:
        yield world


@pytest.fixture
def client(world: World) -> Client:
    return Client(world, "anna")


def send_edited(client: Client, base: Chat, *directives: Directive) -> Chat:
    """Send the base's sequence again, edited, and one token more; it waits in the queue."""
    return client.send(**base.turn.edited(directives, 55))


def own_rows(client: Client, token_ids: Sequence[int]) -> list[Row]:
    """Return what the conversation has cached of a sequence in its own namespace."""
    assert client.own_namespace is not None
    return [node.row for node in client.world.model.match(client.own_namespace, token_ids) if node.row is not None]


def status(chat: Chat) -> str:
    assert chat.outcome is not None
    return chat.outcome.reason or chat.outcome.status


def test_an_r_is_computed_beside_its_request(world: World, client: Client) -> None:
    edited = send_edited(client, client.chat(PROMPT), CUT)
    assert world.admissions.num_spliced == 0
    client.arrive(edited)
    assert status(edited) == Status.SPLICED
    assert world.admissions.num_spliced == 1
    rows = own_rows(client, edited.turn.prompt)
    assert [bool(row.influences) for row in rows] == [False] * 6 + [True] * 13


def test_where_as_much_is_cached_for_everybody_the_request_is_served_from_its_own(world: World, client: Client) -> None:
    edited = send_edited(client, client.chat(PROMPT), CUT)
    client.arrive(edited)
    world.actor = "a stranger"
    world.finish(world.start(edited.turn.prompt, (None, None)))
    again = client.chat(edited.turn.prompt, turn_id=edited.turn.turn_id)
    assert again.served_with is not None
    assert again.served_with[0] == client.own_namespace


def test_what_is_announced_is_for_the_request_of_its_conversation_alone(world: World, client: Client) -> None:
    edited = send_edited(client, client.chat(PROMPT), CUT)
    world.actor = "a stranger"
    stranger = world.start([*PROMPT, 60], (None, None), rid=edited.request.rid)
    assert stranger.namespace == (None, None)
    world.finish(stranger)
    client.arrive(edited)
    assert status(edited) == Status.SPLICED


def test_the_next_turn_waits_until_the_edits_are_carried_out(world: World, client: Client) -> None:
    base = client.chat(PROMPT)
    edited = send_edited(client, base, CUT)
    next_one = send_edited(client, base, Directive(start=10, end=12))
    assert len(world.waiting) == 1
    world.batch(deliver=False)
    assert not world.waiting
    client.arrive(edited)
    client.arrive(next_one)
    assert [status(edited), status(next_one)] == [Status.SPLICED] * 2


@pytest.mark.parametrize("admitted", [False, True], ids=["announced", "carried out"])
def test_a_caller_who_leaves_lets_the_next_turn_begin(world: World, client: Client, admitted: bool) -> None:
    base = client.chat(PROMPT)
    edited = send_edited(client, base, CUT)
    if admitted:
        world.batch(deliver=False)
    client.abort(edited)
    assert not list(world.announced())
    world.replies.clear()
    again = send_edited(client, base, CUT)
    client.arrive(again)
    assert status(again) == Status.SPLICED
    # What was carried out for the one who left is not carried out twice.
    assert again.outcome is not None
    assert bool(again.outcome.moved_tokens) != admitted


def test_a_kernel_that_fails_costs_the_edits_and_nothing_else(world: World, client: Client) -> None:
    base = client.chat(PROMPT)
    client.may_fail = True
    world.admissions.fail_after = 0
    edited = send_edited(client, base, CUT)
    client.arrive(edited)
    assert status(edited) == Reason.INTERNAL_ERROR
    assert not own_rows(client, edited.turn.prompt)
    assert edited.served == 4


def test_r_is_not_computed_where_what_it_holds_leaves_no_slots_for_the_batch(core: str) -> None:
    """R takes slots twice for a while, and nothing of the path that names it can be evicted meanwhile."""
    with World(core, size=48, one_step=True) as world:
        client = Client(world, "anna")
        base = send_edited(client, client.chat(PROMPT), CUT)
        client.arrive(base)
        world.evict(len(PROMPT))
        hog = world.start(range(60, 60 + world.allocator.available_size() - 4), (None, "another tenant"))
        edited = send_edited(client, base, Directive(start=4, end=14, replacement_ids=tuple(range(40, 50))))
        client.arrive(edited)
        assert status(edited) == Reason.POOL_FULL
        assert edited.served == 4
        world.finish(hog)


def test_what_is_announced_beyond_the_bound_is_answered_at_once(world: World, client: Client) -> None:
    """The oldest goes: its request is served as any other, and does not wait for what nobody says any more."""
    other = Client(world, "bert")
    bases = [client.chat(PROMPT), other.chat(PROMPT)]
    with patch.object(one_step, "_MAX_ANNOUNCED", 1):
        first, second = (send_edited(base.client, base, CUT) for base in bases)
    client.arrive(first)
    other.arrive(second)
    assert [status(first), status(second)] == [Reason.ABORTED, Status.SPLICED]
    assert not world._loop.skipped_s, "an answer was waited for in vain"
