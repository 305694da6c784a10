"""What each conversation has put into the radix cache, so that it can be taken out again. Lives in the scheduler.

The cache cannot be asked for the sequences of a namespace, nor which of the caller's shared namespace came from one
conversation. So requests and splices report what they insert, under the *tag* of their conversation: the `cache_salt`
of its own namespace. A tag is closed when nobody may be served from that namespace any more; from then on whatever is
found under it is dropped, now or when the request that holds it ends.

Runs alike on every tensor-parallel rank: what it decides depends on the requests and the radix cache only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from leyline_agent.core.protocol import Purge
from leyline_agent.core.token_ids import common_prefix
from leyline_sglang import compat
from leyline_sglang.compat import RadixPort
from leyline_sglang.namespaces import is_own_salt

_MAX_SEQUENCES = 256
_TOKENS_PER_SLOT_OF_A_TAG = 2
"""Bounds of one tag; the rows of its least recently used sequences go then, as far as nothing else needs them."""
_MAX_CLOSED = 256
"""Closed tags that are remembered for requests that still run under them."""
_TAGS_A_RETRY = 8
_NOTHING = array("q")
_TOKENS_PER_SLOT = 8
"""Bound of all kept sequences, in tokens for each slot of the pool: sequences of one conversation have most of their
tokens in common."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids that were inserted into one namespace."""

    extra_key: str | None
    salt: str | None
    token_ids: array[int]

    @property
    def in_own(self) -> bool:
        """Whether it is in the conversation's own namespace; else in the caller's, shared one."""
        return is_own_salt(self.salt)

    def namespace(self) -> tuple[str | None, str | None]:
        """Return what keys it beside its ids."""
        return self.extra_key, self.salt


@dataclass(slots=True)
class _Closed:
    keep: array[int]
    """With `forget`: what may stay in the shared namespace, the prompt that came with the close."""
    forget: bool
    scrub: bool
    successor: str | None
    """The open tag that goes on for the conversation."""


@dataclass(slots=True)
class Footprints:
    """Sequences by tag, least recently used first to go."""

    _tags: OrderedDict[str, list[Sequence]] = field(default_factory=OrderedDict)
    _num_tokens: int = 0
    _closed: OrderedDict[str, _Closed] = field(default_factory=OrderedDict)
    _due: dict[str, None] = field(default_factory=dict)
    """Closed tags of which something was held or has come since; in the order of their coming, alike on all ranks."""
    _round: list[str] = field(default_factory=list)
    """Those of them that are still to be looked at in this round."""
    _protected_then: int = -1
    """Tokens that requests held when the round began; -1 begins another one."""

    def reset(self) -> None:
        """Forget all sequences. Closed tags stay closed: requests under them may still wait, and cache again."""
        self._tags.clear()
        self._num_tokens = 0
        self._due.clear()
        self._round.clear()
        self._protected_then = -1

    def sequences(self, tag: str) -> list[Sequence]:
        """Return what is known to have been inserted under a tag; some of it may be evicted by now."""
        return list(self._tags.get(tag, ()))

    @property
    def due(self) -> bool:
        """Whether a closed tag still has rows, so that `retry` is worth a call."""
        return bool(self._due)

    def record(self, radix: RadixPort, tag: str, sequence: Sequence) -> None:
        """Keep a sequence that was just inserted; one that it goes on from is the same one."""
        closed = self._closed.get(tag)
        if closed is not None and closed.successor and not sequence.in_own:
            if closed.forget:
                self._pass_on(closed.successor, [sequence], closed.keep)
            else:
                tag = closed.successor
        is_closed = tag in self._closed
        if is_closed:
            self._due[tag] = None
            self._protected_then = -1
        known = _merged(self.sequences(tag), sequence)
        limit = _TOKENS_PER_SLOT_OF_A_TAG * radix.counts()["size"]
        num_tokens = sum(len(other.token_ids) for other in known)
        # Of a closed tag nothing goes unseen: what cannot be dropped now is dropped later.
        while not is_closed and len(known) > 1 and (len(known) > _MAX_SEQUENCES or num_tokens > limit):
            oldest = known.pop(0)
            num_tokens -= len(oldest.token_ids)
            self._drop(radix, oldest, keep_tokens=0)
        self._set(tag, known)
        self._shrink(radix)

    def cut(self, tag: str, path: Sequence, keep_tokens: int) -> None:
        """Take note that a path was taken out of the cache from `keep_tokens` on."""
        kept: list[Sequence] = []
        start = path.token_ids[: keep_tokens + 1]
        for sequence in self.sequences(tag):
            goes_on = len(start) > keep_tokens and sequence.token_ids[: keep_tokens + 1] == start
            if goes_on and sequence.namespace() == path.namespace():
                sequence = Sequence(*sequence.namespace(), sequence.token_ids[:keep_tokens])
            kept.append(sequence)
        self._set(tag, kept)

    def drop_parked(self, radix: RadixPort, tag: str, salt: str) -> None:
        """Drop what an earlier splice left parked under `salt`."""
        known = self.sequences(tag)
        parked = [sequence for sequence in known if sequence.salt == salt]
        for sequence in parked:
            self._drop(radix, sequence, keep_tokens=0)
        if parked:
            self._set(tag, [sequence for sequence in known if sequence.salt != salt])

    def close(self, tag: str, *, keep: array[int], forget: bool, scrub: bool, successor: str | None) -> None:
        """Close a tag. Call `empty` next. The successor takes over what stays of what is shared."""
        for earlier in self._closed.values():
            # Requests under the conversation's earlier tags may still run.
            if earlier.successor == tag:
                earlier.successor = successor
                earlier.scrub |= scrub
                if forget:
                    # Nor may what was kept then stay, where it is to be forgotten now.
                    until = common_prefix(earlier.keep, keep) if earlier.forget else len(keep)
                    earlier.forget, earlier.keep = True, keep[:until]
        self._closed[tag] = _Closed(keep if forget else array("q"), forget, scrub, successor)
        self._closed.move_to_end(tag)
        self._protected_then = -1
        # Those of which something is held still stay, and take no other's place: the requests that hold it are few.
        idle = [other for other in self._closed if other not in self._due]
        for gone in idle[: max(0, len(idle) - _MAX_CLOSED)]:
            del self._closed[gone]
        if successor is not None:
            known = self.sequences(tag)
            shared = [sequence for sequence in known if not sequence.in_own]
            if forget:
                self._pass_on(successor, shared, keep)
            else:
                self._set(tag, [sequence for sequence in known if sequence.in_own])
                self._set(successor, self.sequences(successor) + shared)

    def due_before(self, successor: str | None) -> list[str]:
        """Return the conversation's closed tags of which something is held still."""
        return sorted(tag for tag in self._due if successor and self._closed[tag].successor == successor)

    def empty(self, radix: RadixPort, tag: str, *, keep_own: array[int] = _NOTHING) -> Purge:
        """Drop what a closed tag has, as far as nobody holds it or goes on from it.

        Kept are `keep_own` in its own namespace and, where the close was to forget, what is the prompt's in the
        shared one, else all of that.
        """
        closed = self._closed[tag]
        dropped = 0
        held: list[torch.Tensor] = []
        all_left: list[torch.Tensor] = []
        left: list[Sequence] = []
        sequences = self.sequences(tag)
        keeps = [_keep_tokens(sequence, closed, keep_own) for sequence in sequences]
        for sequence, keep_tokens in zip(sequences, keeps, strict=True):
            dropped += self._drop(radix, sequence, keep_tokens=keep_tokens)
        # Counted once all are gone that can go: until then one sequence holds up the other.
        for sequence, keep_tokens in zip(sequences, keeps, strict=True):
            path = radix.match(sequence.token_ids, *sequence.namespace())
            held_until = max(keep_tokens, radix.unlocked_from(path))
            held.append(path.slots[keep_tokens:held_until])
            all_left.append(path.slots[keep_tokens:])
            # What others go on from there stays: it is theirs from now on, whatever becomes of what they go on with.
            until = len(path) if sequence.in_own else held_until
            if held_until > keep_tokens or (sequence.in_own and until):
                left = _merged(left, Sequence(*sequence.namespace(), sequence.token_ids[:until]))
        self._set(tag, left)
        num_held = _num_different(held)
        self._due.pop(tag, None)
        if num_held:
            self._due[tag] = None
        return Purge(dropped_tokens=dropped, held_tokens=num_held, shared_tokens=_num_different(all_left) - num_held)

    def retry(self, scheduler: Any, radix: RadixPort, *, has_ended: bool) -> None:
        """Drop what requests under closed tags held until now, and scrub where that was asked.

        A few tags a call, so that no batch waits long, and only where a request has ended or given back a lock since.
        """
        protected = radix.counts()["protected"]
        if has_ended or protected != self._protected_then:
            self._round, self._protected_then = list(self._due), protected
        now, self._round = self._round[:_TAGS_A_RETRY], self._round[_TAGS_A_RETRY:]
        # Of any tag: the rows that two have had go with the first one.
        scrub = any(self._closed[tag].scrub for tag in self._due)
        has_gone = False
        for tag in now:
            if tag in self._due:
                purge = self.empty(radix, tag)
                has_gone |= purge.dropped_tokens > 0 or tag not in self._due
        if scrub and has_gone:
            compat.scrub_free_slots(scheduler)

    def own_slots(self, radix: RadixPort, tag: str) -> int:
        """Return how many slots a conversation's own namespace holds."""
        own = [sequence for sequence in self.sequences(tag) if sequence.in_own]
        return _num_different([radix.match(sequence.token_ids, *sequence.namespace()).slots for sequence in own])

    def _drop(self, radix: RadixPort, sequence: Sequence, *, keep_tokens: int) -> int:
        """Free what can be taken of a sequence's rows from `keep_tokens` on; return how many."""
        if keep_tokens >= len(sequence.token_ids):
            return 0
        # A match splits the node that it ends in, so that the cut is between two nodes.
        radix.match(sequence.token_ids[:keep_tokens], *sequence.namespace())
        path = radix.match(sequence.token_ids, *sequence.namespace())
        slots = radix.take(path, max(keep_tokens, radix.takeable_from(path)))
        if len(slots):
            radix.free(slots)
        return len(slots)

    def _pass_on(self, successor: str, shared: list[Sequence], keep: array[int]) -> None:
        """Have what stays of shared sequences be the successor's: the request that is to keep it may never come."""
        known = self.sequences(successor)
        for sequence in shared:
            num_kept = common_prefix(sequence.token_ids, keep)
            if num_kept:
                known = _merged(known, Sequence(*sequence.namespace(), sequence.token_ids[:num_kept]))
        self._set(successor, known)

    def _set(self, tag: str, sequences: list[Sequence]) -> None:
        known = self._tags.pop(tag, [])
        self._num_tokens += sum(len(s.token_ids) for s in sequences) - sum(len(s.token_ids) for s in known)
        kept = [sequence for sequence in sequences if sequence.token_ids]
        if kept:
            self._tags[tag] = kept

    def _shrink(self, radix: RadixPort) -> None:
        limit = _TOKENS_PER_SLOT * radix.counts()["size"]
        if self._num_tokens <= limit:
            return
        for tag, known in list(self._tags.items()):
            # What was evicted since is no footprint any more.
            cached = [(s, len(radix.match(s.token_ids, *s.namespace()))) for s in known]
            self._set(tag, [Sequence(*s.namespace(), s.token_ids[:tokens]) for s, tokens in cached])
        # Well below the bound, so that not every insertion comes here.
        for oldest in [tag for tag in self._tags if tag not in self._due][:-1]:
            if self._num_tokens <= limit * 3 // 4:
                break
            for sequence in self.sequences(oldest):
                self._drop(radix, sequence, keep_tokens=0)
            self._set(oldest, [])


def _merged(known: list[Sequence], sequence: Sequence) -> list[Sequence]:
    """Return the sequences with one more at the end; those of which one goes on from the other are one."""
    merged = []
    for other in known:
        if other.namespace() == sequence.namespace() and _same_start(other.token_ids, sequence.token_ids):
            sequence = max(other, sequence, key=lambda either: len(either.token_ids))
        else:
            merged.append(other)
    return [*merged, sequence]


def _num_different(slots: list[torch.Tensor]) -> int:
    return len(torch.unique(torch.cat(slots))) if slots else 0


def _same_start(left: array[int], right: array[int]) -> bool:
    """Whether one goes on from the other."""
    shorter = min(len(left), len(right))
    # The last token tells most that differ, without a look at the rest.
    return left[shorter - 1] == right[shorter - 1] and left[:shorter] == right[:shorter]


_OF_TREE: WeakKeyDictionary[Any, Footprints] = WeakKeyDictionary()


def footprints_of(tree: Any) -> Footprints:
    """Return the footprints in a radix cache."""
    return _OF_TREE.setdefault(tree, Footprints())


def forget_footprints(tree: Any) -> None:
    """Forget them all, as after a reset of the cache."""
    if tree in _OF_TREE:
        _OF_TREE[tree].reset()


def _keep_tokens(sequence: Sequence, closed: _Closed, keep_own: array[int]) -> int:
    if sequence.in_own:
        return common_prefix(sequence.token_ids, keep_own)
    return common_prefix(sequence.token_ids, closed.keep) if closed.forget else len(sequence.token_ids)
