"""When a note has the server leave nothing cached of a message, and how long it is asked again."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from leyline_agent import Client, Conversation, SpliceTransportError
from leyline_agent.core.protocol import Note, Outcome, Purge, Reason, Status

Chat = dict[str, Any]

SECRET: Chat = {"role": "user", "content": "the key is sk-1"}
REFUSED = Outcome(status=Status.REFUSED, reason=Reason.TIMEOUT)


class Chatter:
    """Sends a growing history of user messages through the real client."""

    def __init__(self, server: Any, conversation: Conversation) -> None:
        self.server, self.conversation = server, conversation
        self.client = Client("http://server", transport=httpx.MockTransport(server))
        self.messages: list[Chat] = [{"role": "user", "content": "go"}]

    def send(self, *more: Chat) -> Note:
        """Send the history with `more` at its end, and go on from the answer."""
        self.messages += more
        self.messages.append(self.client.chat(self.conversation, self.messages, model="m").message)
        return Note.model_validate(self.server.notes[-1])

    def fail(self, *more: Chat) -> Note:
        """Send the same without getting an answer."""
        self.messages += more
        self.server.fail_next = httpx.ReadTimeout("gone")
        with pytest.raises(SpliceTransportError):
            self.client.chat(self.conversation, self.messages, model="m")
        return Note.model_validate(self.server.notes[-1])

    def forget(self) -> None:
        self.conversation.edit(SECRET, "[secret]", mode="forget")

    def user(self, text: str) -> Chat:
        return {"role": "user", "content": text}


def asked(note: Note) -> tuple[str, Any]:
    return note.mode, note.forget


@pytest.fixture
def chatter(server: Any) -> Chatter:
    return Chatter(server, Conversation())


def test_message_that_was_sent_is_purged_once(chatter: Chatter) -> None:
    before = chatter.send(SECRET)
    chatter.forget()
    note = chatter.send(chatter.user("a"))
    assert (note.base, *asked(note)) == (before.turn, "forget", ())
    assert asked(chatter.send(chatter.user("b"))) == ("amortize", ())


def test_message_that_was_never_sent_needs_no_purge(chatter: Chatter) -> None:
    chatter.send()
    chatter.forget()
    assert asked(chatter.send(SECRET)) == ("amortize", ())
    assert asked(chatter.send(chatter.user("a"))) == ("amortize", ())


def test_refused_purge_is_asked_again_of_a_base_that_does_not_show_it(chatter: Chatter) -> None:
    """The refused turn is the base now and has the edit already, so only "all" says what is to go."""
    chatter.send(SECRET)
    chatter.forget()
    chatter.server.outcomes = [REFUSED]
    refused = chatter.send(chatter.user("a"))
    again = chatter.send(chatter.user("b"))
    assert (again.base, *asked(again)) == (refused.turn, "forget", "all")
    assert asked(chatter.send(chatter.user("c"))) == ("amortize", ())


def test_purge_without_an_outcome_is_asked_again_until_one_comes(chatter: Chatter) -> None:
    chatter.send(SECRET)
    chatter.forget()
    chatter.server.patched = False
    chatter.send(chatter.user("a"))
    assert asked(chatter.send(chatter.user("b"))) == ("forget", "all")
    chatter.server.patched = True
    chatter.server.outcomes = [Outcome(status=Status.REPREFILL, purge=Purge(dropped_tokens=9))]
    assert asked(chatter.send(chatter.user("c"))) == ("forget", "all")
    assert asked(chatter.send(chatter.user("d"))) == ("amortize", ())


def test_purge_of_an_unanswered_turn_is_asked_again_of_the_same_base(chatter: Chatter) -> None:
    before = chatter.send(SECRET)
    chatter.forget()
    assert asked(chatter.fail(chatter.user("a"))) == ("forget", ())
    again = chatter.send()
    assert (again.base, *asked(again)) == (before.turn, "forget", ())
    assert asked(chatter.send(chatter.user("b"))) == ("amortize", ())


@pytest.mark.parametrize("failure", ["refused", "unanswered"])
def test_failed_purge_is_asked_again_although_the_message_is_gone_from_the_history(
    chatter: Chatter, failure: str
) -> None:
    chatter.send(SECRET)
    chatter.forget()
    if failure == "refused":
        chatter.server.outcomes = [REFUSED]
        chatter.send(chatter.user("a"))
    else:
        chatter.fail(chatter.user("a"))
    chatter.messages = [chatter.user("a summary of all that")]
    assert asked(chatter.send()) == ("forget", "all")
    assert asked(chatter.send(chatter.user("b"))) == ("amortize", ())


def test_message_of_an_unanswered_first_turn_is_purged(chatter: Chatter) -> None:
    """There is no base, but the server may have prefilled it."""
    chatter.fail(SECRET)
    chatter.forget()
    assert asked(chatter.send()) == ("forget", "all")
    assert asked(chatter.send(chatter.user("a"))) == ("amortize", ())


def test_message_of_a_later_unanswered_turn_is_purged(chatter: Chatter) -> None:
    """The base never had it."""
    chatter.send()
    chatter.fail(SECRET)
    chatter.forget()
    assert asked(chatter.send()) == ("forget", "all")
    assert asked(chatter.send(chatter.user("a"))) == ("amortize", ())


def test_message_right_of_another_change_is_purged(chatter: Chatter) -> None:
    chatter.send(SECRET)
    chatter.messages[0] = chatter.user("go on")
    chatter.forget()
    assert asked(chatter.send(chatter.user("a"))) == ("forget", "all")


def test_message_that_also_stands_unedited_in_the_prompt_is_not_purged_each_turn(chatter: Chatter) -> None:
    chatter.send(SECRET, SECRET)
    chatter.conversation.edit(SECRET, "[secret]", mode="forget", occurrence=1)
    assert asked(chatter.send(chatter.user("a"))) == ("forget", ())
    assert asked(chatter.send(chatter.user("b"))) == ("amortize", ())
    assert asked(chatter.send(chatter.user("c"))) == ("amortize", ())


def test_message_that_is_shown_again_is_purged_again(chatter: Chatter) -> None:
    chatter.send(SECRET)
    chatter.forget()
    chatter.send()
    chatter.conversation.undo_edit(SECRET)
    assert chatter.send().mode == "reprefill"
    chatter.forget()
    assert asked(chatter.send()) == ("forget", ())


def test_refused_forget_of_edits_alone_purges_no_message(chatter: Chatter) -> None:
    chatter.send(SECRET)
    chatter.conversation.edit(SECRET, "[stale]")
    chatter.server.will_splice("e1")
    chatter.send()
    chatter.messages[1] = chatter.user("the key is sk-2")
    chatter.server.outcomes = [REFUSED]
    assert asked(chatter.send()) == ("reprefill", ("e1",))
    assert asked(chatter.send()) == ("reprefill", ("e1",))


def test_scrub_goes_with_every_forget_and_with_nothing_else(server: Any) -> None:
    chatter = Chatter(server, Conversation(scrub=True))
    notes = [chatter.send(SECRET)]
    chatter.forget()
    notes.append(chatter.send())
    chatter.conversation.edit(0, "[stale]")
    server.will_splice("e1")
    notes.append(chatter.send())
    chatter.messages[0] = chatter.user("go on")
    notes.append(chatter.send())
    assert [(*asked(note), note.scrub) for note in notes] == [
        ("amortize", (), False),
        ("forget", (), True),
        ("amortize", (), False),
        ("reprefill", ("e1",), True),
    ]


def test_scrub_is_off_by_default(chatter: Chatter) -> None:
    chatter.send(SECRET)
    chatter.forget()
    assert not chatter.send().scrub
