"""Whole turns of conversations: what a forget, a scrub, a release and a reprefill reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from leyline_agent.core.protocol import Directive, Mode, Purge
from tests.in_process.clients import Chat, Client
from tests.in_process.harness import World

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
CUT = Directive(start=2, end=4, replacement_ids=(9,))


@pytest.fixture
def world(core: str) -> Iterator[World]:
    with World(core) as world:
        yield world


@pytest.fixture
def client(world: World) -> Client:
    return Client(world, "anna")


def edit(client: Client, base: Chat, *directives: Directive) -> Chat:
    """Send the base's sequence again, edited, and one token more."""
    return client.chat(**base.turn.edited(directives, 10))


def cached(world: World) -> set[int]:
    """Return the tokens that are cached anywhere."""
    return {node.row.token for node in world.model.nodes() if node.row is not None}


def ask_without_a_note(world: World, token_ids: Sequence[int]) -> None:
    world.actor = "a stranger"
    world.finish(world.start(token_ids, (None, None)))


def test_a_forget_reaches_what_an_explicit_splice_has_prefilled(world: World, client: Client) -> None:
    client.chat(PROMPT)
    client.splice(PROMPT, [CUT])
    client.splice([1, 2, 9, 5, 6, 7, 8], [Directive(start=3, end=4, replacement_ids=(20,))])
    client.chat([1, 2], forget="all")
    assert cached(world) == {1, 2}


def test_a_forget_reaches_what_an_earlier_one_has_kept_for_a_prompt_that_never_came(
    world: World, client: Client
) -> None:
    client.chat(PROMPT)
    client.splice(PROMPT, [Directive(start=4, end=6, replacement_ids=(9,), mode=Mode.FORGET)])
    assert cached(world) == {1, 2, 3, 4}
    client.chat([1, 2], forget="all")
    assert cached(world) == {1, 2}


def test_a_release_reaches_what_an_explicit_splice_has_prefilled(world: World, client: Client) -> None:
    client.chat(PROMPT)
    client.splice(PROMPT, [CUT])
    client.splice([1, 2, 9, 5, 6, 7, 8], [Directive(start=3, end=4, replacement_ids=(20,))])
    own = client.own_namespace
    assert own is not None
    client.release()
    assert world.model.size(own) == 0


def test_a_reprefill_is_served_no_own_rows_where_others_have_as_many(world: World, client: Client) -> None:
    first = client.chat(PROMPT)
    second = edit(client, first, CUT)
    ask_without_a_note(world, second.turn.prompt)
    again = client.chat(second.turn.prompt, base=first.turn.turn_id, mode="reprefill")
    assert again.served_with is not None
    namespace, rows = again.served_with
    assert namespace == (None, None)
    assert len(rows) == len(second.turn.prompt) - 1


def test_a_scrub_reaches_a_request_that_an_earlier_forget_has_left_running(world: World, client: Client) -> None:
    running = client.begin([*PROMPT, 11], outputs=[12, 13, 14])
    client.chat([1, 2], forget="all")
    client.chat([1, 2, 3], forget="all", scrub=True)
    client.finish(running)
    assert not {11, 12, 13} & cached(world)
    for buffer in world.buffers:
        assert not buffer[world.free_slots()].any()


def test_a_release_tells_nothing_of_other_conversations(world: World, client: Client) -> None:
    other = Client(world, "bert")
    edited = edit(client, client.chat(PROMPT), CUT)
    running = client.begin([*edited.turn.prompt, 11], outputs=[12, 13], base=edited.turn.turn_id)
    held = client.release()
    assert held is not None
    assert held.purge.held_tokens > 0
    other.chat(PROMPT)
    released = other.release()
    assert released is not None
    assert released.purge == Purge()
    client.finish(running)


def test_rows_of_a_closed_namespace_go_when_the_request_that_holds_them_ends(world: World, client: Client) -> None:
    edited = edit(client, client.chat(PROMPT), CUT)
    own = client.own_namespace
    assert own is not None
    running = client.begin([*edited.turn.prompt, 11], outputs=[12, 13], base=edited.turn.turn_id)
    client.chat([1, 2], forget="all")
    assert world.model.size(own) == len(edited.turn.prompt) + 1
    client.finish(running)
    assert world.model.size(own) == 0


def test_two_conversations_share_the_rows_of_one_text_until_their_first_edit(world: World, client: Client) -> None:
    other = Client(world, "bert")
    client.chat(PROMPT)
    taken = world.allocator.available_size()
    other.chat(PROMPT)
    assert world.allocator.available_size() == taken
    edit(client, client.chat(PROMPT), CUT)
    again = other.chat(PROMPT)
    assert again.served_with is not None
    namespace, rows = again.served_with
    assert namespace == (None, None)
    assert len(rows) == len(PROMPT) - 1


def test_a_forget_reaches_all_of_more_sequences_than_are_remembered(core: str) -> None:
    with World(core, bounded=True) as world:
        client = Client(world, "anna")
        running = client.begin([1, 2, 120], outputs=[121, 122, 123])
        for token in range(50, 100):
            client.chat([1, 2, token])
        client.chat([1, 2], forget="all")
        client.finish(running)
        assert cached(world) == {1, 2}
