"""What a prompt shares with the one before it: what a cache keeps, what a splice moves, what is computed anew.

**The base** of a request is the prompt of the request before it and the answer to that, since a server has both in its
cache. The recorded answer is taken for what the server generated. Evictions, other requests and the server's own cost
gate are not foreseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import Mode
from leyline_agent.policy import Applied

State = Literal["kept", "moved", "recomputed"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A message of an edited prompt, and the messages `[start, end)` of the history that it stands for."""

    start: int
    end: int
    message: Message


@dataclass(frozen=True, slots=True)
class Change:
    """A directive without its ids: tokens `[start, end)` of the base are replaced by so many others."""

    start: int
    end: int
    replacement_tokens: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Reuse:
    """What becomes of one prompt's tokens. Kept, moved and recomputed ones add up to the prompt."""

    prompt_tokens: int
    kept_tokens: int
    """Left of the first difference from the base: any prefix cache has them."""
    moved_tokens: int
    """Right of it, and still there: a splice moves them."""
    changes: tuple[Change, ...] = ()
    problem: str | None = None
    """Why nothing could be spliced, where that is so."""

    @property
    def recomputed_tokens(self) -> int:
        """Tokens to prefill with splices."""
        return self.prompt_tokens - self.kept_tokens - self.moved_tokens

    @property
    def recomputed_tokens_without_splice(self) -> int:
        """Tokens to prefill where the cache only helps up to the first difference."""
        return self.prompt_tokens - self.kept_tokens


def reuse(
    prompt_tokens: int,
    kept_tokens: int,
    moved_tokens: int,
    changes: Sequence[Change] = (),
    problem: str | None = None,
) -> Reuse:
    """Return what is reused, less the last token: a server computes at least that, since it needs its logits."""
    moved_tokens = max(0, min(moved_tokens, prompt_tokens - 1 - kept_tokens))
    kept_tokens = max(0, min(kept_tokens, prompt_tokens - 1))
    return Reuse(prompt_tokens, kept_tokens, moved_tokens, tuple(changes), problem)


def given_pieces(messages: Sequence[Message]) -> tuple[Piece, ...]:
    """Cut an unedited prompt into its messages."""
    return tuple(Piece(idx, idx + 1, message) for idx, message in enumerate(messages))


def pieces_of(edits: Sequence[Edit], given: Sequence[Piece]) -> tuple[Piece, ...]:
    """Cut an edited prompt into its messages; those that no edit touched are the `given` ones themselves."""
    pieces: list[Piece] = []
    at = 0
    for edit in edits:
        pieces += given[at : edit.start]
        pieces += (Piece(edit.start, edit.end, message) for message in edit.replacement)
        at = edit.end
    pieces += given[at:]
    return tuple(pieces)


def forgets(applied: Applied, num_sent: int) -> bool:
    """Tell whether a rule that forgets has newly met one of the first `num_sent` messages, which the server has seen.

    The client then asks for a prefill from the first difference on.
    """
    return any(made.mode is Mode.FORGET and any(idx < num_sent for idx in made.message_idxs) for made in applied.new)


def states(base: Sequence[Piece] | None, new: Sequence[Piece], *, forget: bool) -> tuple[State, ...]:
    """Say of each message of a prompt what becomes of it; a message that changed at all is recomputed as a whole."""
    same = 0
    base = base or ()
    while same < min(len(base), len(new)) and base[same] == new[same]:
        same += 1
    left = {piece.start: piece for piece in base[same:]}
    found: list[State] = ["kept"] * same
    for piece in new[same:]:
        found.append("moved" if not forget and left.get(piece.start) == piece else "recomputed")
    return tuple(found)
