from __future__ import annotations

from leyline_agent.proxy.notes import RETRY_S, Notes


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_upstream_that_refuses_is_asked_again_after_a_while() -> None:
    clock = Clock()
    notes = Notes(clock)
    assert notes.are_sent
    assert notes.add_refused()

    clock.now += RETRY_S - 1
    assert not notes.are_sent
    clock.now += 1
    assert notes.are_sent


def test_an_upstream_that_ignores_three_notes_is_sent_none_for_a_while() -> None:
    clock = Clock()
    notes = Notes(clock)
    assert [notes.add_taken(has_outcome=False) for _ in range(3)] == [False, False, True]
    assert (notes.are_sent, notes.state) == (False, "ignored")

    clock.now += RETRY_S
    assert notes.are_sent
    assert [notes.add_taken(has_outcome=False) for _ in range(3)] == [False, False, True]


def test_answers_that_could_not_be_read_say_nothing() -> None:
    notes = Notes(Clock())
    for _ in range(9):
        notes.add_taken(has_outcome=None)

    assert (notes.are_sent, notes.state) == (True, "not seen yet")


def test_one_outcome_keeps_notes_on_for_good() -> None:
    notes = Notes(Clock())
    notes.add_taken(has_outcome=True)
    assert not [True for _ in range(9) if notes.add_taken(has_outcome=False)]
    assert not notes.add_refused()

    assert notes.are_sent


def test_an_outcome_that_comes_late_turns_notes_on_again() -> None:
    notes = Notes(Clock())
    notes.add_refused()
    notes.add_taken(has_outcome=True)

    assert (notes.are_sent, notes.state) == (True, "answered")
