from __future__ import annotations

from leyline_agent.noted_server import RETRY_S, NotedServer


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_server_that_refuses_is_asked_again_after_a_while() -> None:
    clock = Clock()
    server = NotedServer(clock)
    assert server.takes_notes
    assert server.add_refused()

    clock.now += RETRY_S - 1
    assert not server.takes_notes
    clock.now += 1
    assert server.takes_notes


def test_a_server_that_ignores_three_notes_is_sent_none_for_a_while() -> None:
    clock = Clock()
    server = NotedServer(clock)
    assert [server.add_taken(has_outcome=False) for _ in range(3)] == [False, False, True]
    assert (server.takes_notes, server.state) == (False, "ignored")

    clock.now += RETRY_S
    assert server.takes_notes
    # One is enough to see whether that has changed.
    assert server.add_taken(has_outcome=False)
    assert not server.takes_notes


def test_answers_that_could_not_be_read_say_nothing() -> None:
    server = NotedServer(Clock())
    for _ in range(9):
        server.add_taken(has_outcome=None)

    assert (server.takes_notes, server.state) == (True, "not seen yet")


def test_one_outcome_keeps_notes_on_for_good() -> None:
    server = NotedServer(Clock())
    server.add_taken(has_outcome=True)
    assert not [True for _ in range(9) if server.add_taken(has_outcome=False)]
    assert not server.add_refused()

    assert server.takes_notes


def test_an_outcome_that_comes_late_turns_notes_on_again() -> None:
    server = NotedServer(Clock())
    server.add_refused()
    server.add_taken(has_outcome=True)

    assert (server.takes_notes, server.state) == (True, "answered")
