"""Codes, names, and lines that look like notes and mean nothing."""

from __future__ import annotations

import random

# No vowels, so that no code is a word, and nothing that looks like something else: 25^8 codes, 1.5e11.
CODE_LETTERS = "BCDFGHJKMNPQRTVWXZ2346789"
CODE_LENGTH = 8

_PLACES = (
    "attic", "barn", "bridge", "canal", "cellar", "chapel", "depot", "dock", "ferry", "forge", "garden", "granary",
    "harbor", "kiln", "lodge", "market", "mill", "office", "orchard", "pump", "quarry", "school", "stable", "tower",
    "tunnel", "vault", "wharf", "yard",
)  # fmt: skip
_THINGS = ("the boiler", "a crate", "the fence", "the gate", "a ladder", "the lamp", "the roof", "the scale", "a valve")
_STATES = ("was checked", "was moved", "was painted", "was returned", "needs oil", "is in use", "is as it was")
_PEOPLE = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gus", "Hana", "Ivo", "Jo")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def make_code(rng: random.Random) -> str:
    """Return one of 25^8 codes."""
    return "".join(rng.choices(CODE_LETTERS, k=CODE_LENGTH))


def make_names(rng: random.Random, number: int) -> list[str]:
    """Return different names such as `mill-42`."""
    return rng.sample([f"{place}-{idx}" for place in _PLACES for idx in range(10, 100)], number)


def make_note(rng: random.Random) -> str:
    """Return a line of about 20 tokens."""
    thing, state, person, day = (rng.choice(words) for words in (_THINGS, _STATES, _PEOPLE, _DAYS))
    number = rng.randrange(2, 99)
    return rng.choice(
        (
            f"{day}: {thing} {state}, says {person}.",
            f"{person} saw on {day} that {thing} {state}; {number} left.",
            f"Reading {number} on {day}, {thing} {state}.",
            f"{person} asks whether {thing} {state}. No answer by {day}.",
        )
    )


def make_notes(rng: random.Random, number: int) -> list[str]:
    """Return that many lines."""
    return [make_note(rng) for _ in range(number)]
