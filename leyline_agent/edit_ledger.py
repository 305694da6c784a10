"""What the server may still hold of messages: in which edits they were amortized away, and which are to be purged.

So a later `forget` can name the edits, and one that failed is asked for again. Not locked: its owner is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from leyline_agent.core.protocol import Outcome, Status

EditIds = frozenset[str] | Literal["all"]

NO_IDS: frozenset[str] = frozenset()
# A message that is edited anew each turn would otherwise collect ids without end.
_MAX_IDS_OF_A_MESSAGE = 256
_MAX_UNANSWERED = 32


class EditLedger:
    """Knows messages by their digests. Holds no text."""

    def __init__(self, *, resumed: bool = False) -> None:
        self._resumed = resumed
        """Whether a process before this one may have edited what this one knows nothing of."""
        self._ids: dict[str, EditIds] = {}
        """By message: the edits that amortized it away."""
        self._unanswered: dict[str, frozenset[str]] = {}
        """By turn: messages whose edits the server may have amortized without our having got their ids."""
        self._owed: EditIds = NO_IDS
        """Edits that were to be forgotten by a turn which the server refused."""
        self._sent: set[str] = set()
        """Messages that went out, answered or not, in turns that did not forget them."""
        self._unpurged: set[str] = set()
        """Messages of which a turn was to leave nothing cached, as long as no answer says that it was done."""

    def send(self, turn: str, *, amortized: frozenset[str], shown: Iterable[str], purged: frozenset[str]) -> None:
        """Note that a turn goes out.

        Args:
            turn: its id.
            amortized: messages whose edits the server may amortize.
            shown: messages that it sends, edited or not, without forgetting them.
            purged: messages of which it is to leave nothing cached.
        """
        self._sent.update(shown)
        self._unpurged |= purged
        if not amortized:
            return
        self._unanswered[turn] = amortized
        if len(self._unanswered) > _MAX_UNANSWERED:
            oldest = next(iter(self._unanswered))
            self._ids |= dict.fromkeys(self._unanswered.pop(oldest), "all")

    def to_forget(self, digests: Iterable[str]) -> EditIds:
        """Return the ids of all edits that took these messages away, and of those still owed."""
        ids = self._owed
        for digest in digests:
            if self._resumed or any(digest in amortized for amortized in self._unanswered.values()):
                return "all"
            ids = _union(ids, self._ids.get(digest, NO_IDS))
        return ids

    def to_purge(self, forgotten: frozenset[str]) -> frozenset[str]:
        """Return those of these messages that the server may have cached, and all whose purge is still owed."""
        sent = forgotten if self._resumed else forgotten & self._sent
        return sent | self._unpurged

    def settle(
        self,
        turn: str,
        *,
        amortized: frozenset[str],
        purged: frozenset[str],
        asked: EditIds,
        outcome: Outcome | None,
    ) -> None:
        """Take what became of a turn: what its note asked to forget, and the edits that it made.

        A turn's ids go to every message that it edited, since directives do not say which message they are of.
        """
        self._unanswered.pop(turn, None)
        if outcome is None or outcome.status is Status.REFUSED:
            # Not known to be forgotten: asked for again.
            self._owed = _union(self._owed, asked)
        else:
            self._sent -= purged
            self._unpurged -= purged
            if asked == "all":
                self._resumed = False
                self._unanswered.clear()
                self.forget_ids()
            else:
                self._owed = _minus(self._owed, asked)
                self._ids = {digest: left for digest, ids in self._ids.items() if (left := _minus(ids, asked))}
        if new_ids := _outcome_ids(outcome):
            for digest in amortized:
                self._ids[digest] = _union(self._ids.get(digest, NO_IDS), new_ids)

    def rename(self, renamed: Mapping[str, str]) -> None:
        """Let what is known of messages hold for what their caller keeps in their place, too."""
        for old, new in renamed.items():
            if ids := self._ids.get(old):
                self._ids[new] = _union(self._ids.get(new, NO_IDS), ids)
            if old in self._sent:
                self._sent.add(new)
            for turn, amortized in self._unanswered.items():
                if old in amortized:
                    self._unanswered[turn] = amortized | {new}

    def forget_ids(self) -> None:
        """Forget all edit ids, since the server has nothing left of these edits."""
        self._owed = NO_IDS
        self._ids.clear()


def _outcome_ids(outcome: Outcome | None) -> EditIds:
    """Ids of what a turn amortized; all, where they are not told."""
    if outcome is None:
        return "all"
    if outcome.status not in (Status.SPLICED, Status.PARTIAL):
        return NO_IDS
    if len(outcome.directives) < outcome.num_directives:
        return "all"
    return frozenset(directive.edit_id for directive in outcome.directives if directive.edit_id is not None)


def _union(left: EditIds, right: EditIds) -> EditIds:
    if left == "all" or right == "all":
        return "all"
    both = left | right
    return "all" if len(both) > _MAX_IDS_OF_A_MESSAGE else both


def _minus(left: EditIds, right: frozenset[str]) -> EditIds:
    return left if left == "all" else left - right
