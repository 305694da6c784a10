"""How a conversation goes on after the server has released it."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from leyline_agent import Client, Conversation, SpliceRejectedError
from leyline_agent.core.protocol import Note, Outcome, Reason, Status
from leyline_agent.digests import goes_on

MESSAGES = [{"role": "user", "content": "u"}]
RELEASED = {"conversation_hash": "0" * 32, "purge": {}}


class Releasing:
    """The chat server of the fixture, which also releases."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.answer = httpx.Response(200, json=RELEASED)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        return self.answer if request.url.path == "/leyline/release" else self.server(request)


def releasing_client(server: Any) -> Client:
    return Client("http://server", transport=httpx.MockTransport(Releasing(server)))


def last_note(server: Any) -> Note:
    return Note.model_validate(server.notes[-1])


def test_turn_after_a_release_names_no_base_and_the_next_one_does(server: Any, caplog: Any) -> None:
    client, conversation = releasing_client(server), Conversation()
    with caplog.at_level(logging.WARNING, "leyline_agent"):
        reply = client.chat(conversation, MESSAGES)
        client.release(conversation)
        messages = [*MESSAGES, reply.message, *MESSAGES]
        assert conversation.base is not None
        assert goes_on(conversation.base, conversation.prepare({"messages": messages}).messages)
        reply = client.chat(conversation, messages)
        first = last_note(server)
        client.chat(conversation, [*messages, reply.message])
    assert (first.base, first.mode, first.forget) == (None, "amortize", ())
    assert last_note(server).base == first.turn
    assert not caplog.records


def test_refused_release_changes_nothing(server: Any) -> None:
    releasing = Releasing(server)
    client, conversation = Client("http://server", transport=httpx.MockTransport(releasing)), Conversation()
    client.chat(conversation, MESSAGES)
    releasing.answer = httpx.Response(404, json={"reason": "unknown_conversation", "message": "in another namespace"})
    with pytest.raises(SpliceRejectedError):
        client.release(conversation)
    client.chat(conversation, MESSAGES)
    assert last_note(server).base == server.notes[0]["turn"]


def test_turn_that_ran_during_a_release_is_no_base(server: Any) -> None:
    client, conversation = releasing_client(server), Conversation()
    running = conversation.prepare({"messages": MESSAGES})
    client.release(conversation)
    conversation.commit(running, {"role": "assistant", "content": "a"}, Outcome(status=Status.UNCHANGED))
    client.chat(conversation, MESSAGES)
    assert last_note(server).base is None


@pytest.mark.parametrize(("releases", "forget"), [(True, ()), (False, ("e1",))])
def test_released_edits_are_not_forgotten_again(server: Any, releases: bool, forget: Any) -> None:
    client, conversation = releasing_client(server), Conversation()
    messages = [*MESSAGES, client.chat(conversation, MESSAGES).message]
    conversation.edit(0, "[stale]")
    server.will_splice("e1")
    messages.append(client.chat(conversation, messages).message)
    if releases:
        client.release(conversation)
    messages.append(client.chat(conversation, messages).message)
    conversation.undo_edit(MESSAGES[0])
    client.chat(conversation, messages)
    assert (last_note(server).mode, last_note(server).forget) == ("reprefill", forget)


def test_purge_that_was_refused_before_a_release_is_asked_again_after_it(server: Any) -> None:
    """A release does not reach what the conversation has in the caller's own namespace."""
    client, conversation = releasing_client(server), Conversation()
    client.chat(conversation, MESSAGES)
    conversation.edit(0, "[secret]", mode="forget")
    server.outcomes = [Outcome(status=Status.REFUSED, reason=Reason.TIMEOUT)]
    client.chat(conversation, MESSAGES)
    client.release(conversation)
    client.chat(conversation, MESSAGES)
    assert (last_note(server).mode, last_note(server).forget) == ("forget", "all")
