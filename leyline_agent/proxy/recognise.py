"""Which conversation a request belongs to: by the user's own name for it, else by the prompt that it goes on from.

Owns the remembered conversations and their ids. A conversation that was found by its prompt is *claimed* until its
turn is over, so that a second request from the same point starts one of its own. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakValueDictionary

from leyline_agent.answered_prompts import MAX_VANISHED, AnsweredPrompts, prompt_points
from leyline_agent.conversation import Conversation
from leyline_agent.core.messages import Message
from leyline_agent.digests import AnswerDigest, PromptDigest

# They do not vanish from the end of a prompt, as those of others may.
_OF_THE_AGENT = ("assistant", "tool", "function")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Known:
    """A conversation and where it stands. Only `Recogniser` writes."""

    conversation: Conversation
    scope: bytes
    by: Literal["header", "prefix"]
    size_bytes: int = 0
    last_used: float = field(default_factory=time.monotonic)
    answer: AnswerDigest | None = None
    points: tuple[bytes, ...] = ()
    """Digests of the prompts that its last answer may follow."""


@dataclass(slots=True)
class _Tenant:
    """What is remembered of one API key."""

    known: OrderedDict[str, Known] = field(default_factory=OrderedDict)
    """The last used last."""
    size_bytes: int = 0


class Recogniser:
    """Finds conversations. Any number of threads may use it.

    Args:
        key: ids are HMACs under it.
        make: makes a conversation from an id and whether the server may know that id already.
        max_conversations: remembered; the least recently used goes first, and of an API key that has more than half
            of the room its own before any other's.
        max_bytes: the same for the sum of their last requests' sizes.
        on_dropped: is told of each that is forgotten.
    """

    def __init__(
        self,
        key: bytes,
        make: Callable[[str, bool], Conversation],
        *,
        max_conversations: int,
        max_bytes: int,
        on_dropped: Callable[[Known], None] = lambda known: None,
    ) -> None:
        self._key, self._make = key, make
        self._max_conversations, self._max_bytes = max_conversations, max_bytes
        self._on_dropped = on_dropped
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._size_bytes = 0
        self._tenants: dict[bytes, _Tenant] = {}
        # Those with a name that have a request under way: its first two may come at once.
        self._named: WeakValueDictionary[str, Known] = WeakValueDictionary()
        self._waiting: AnsweredPrompts[Known] = AnsweredPrompts()

    def scope(self, credentials: Sequence[bytes]) -> bytes:
        """Return what stands for an API key."""
        return self._hmac(b"scope", *credentials)

    def named(self, scope: bytes, name: bytes) -> Known:
        """Return the conversation to which the user of an API key gave a name."""
        conversation_id = self._hmac(b"header", scope, name).hex()
        with self._lock:
            known = self._known.get(conversation_id) or self._named.get(conversation_id)
            if known is None:
                known = self._named[conversation_id] = Known(self._make(conversation_id, True), scope, "header")
            return known

    def claim(self, scope: bytes, messages: Sequence[Message]) -> Known:
        """Return the conversation whose last answered turn the messages go on from, or a new one.

        It is nobody else's until `keep` or `restore`.
        """
        points = prompt_points([message.digest() for message in messages], scope)
        with self._lock:
            known = self._waiting.find(points, messages)
            if known is not None:
                self._unlist(known)
                return known
        conversation_id = self._hmac(b"prefix", scope, secrets.token_bytes(32)).hex()
        return Known(self._make(conversation_id, False), scope, "prefix")

    def keep(self, known: Known, prompt: PromptDigest, roles: Sequence[str], answer: Message, size_bytes: int) -> None:
        """Remember a conversation at its newly answered turn, as the last used; `roles` are those of the prompt."""
        points: tuple[bytes, ...] = ()
        if known.by == "prefix":
            points = self._points_of(known.scope, prompt, roles)
        with self._lock:
            self._unlist(known)
            known.answer, known.points, known.last_used = AnswerDigest.of(answer), points, time.monotonic()
            self._forget(known)
            known.size_bytes = size_bytes
            tenant = self._tenants.setdefault(known.scope, _Tenant())
            self._known[known.conversation.id] = tenant.known[known.conversation.id] = known
            self._size_bytes += size_bytes
            tenant.size_bytes += size_bytes
            self._list(known)
            dropped = list(self._trim(tenant))
        for gone in dropped:
            self._on_dropped(gone)

    def restore(self, known: Known) -> None:
        """Give back a claim whose turn got no answer: the same request, sent again, finds the same conversation."""
        with self._lock:
            if self._known.get(known.conversation.id) is known:
                self._list(known)

    def remembered(self) -> list[Known]:
        """Return all, the last used last."""
        with self._lock:
            return list(self._known.values())

    def _points_of(self, scope: bytes, prompt: PromptDigest, roles: Sequence[str]) -> tuple[bytes, ...]:
        """Return the points of a prompt that its answer may follow in the next one."""
        first = len(roles)
        while first > max(1, len(roles) - MAX_VANISHED) and roles[first - 1] not in _OF_THE_AGENT:
            first -= 1
        return tuple(prompt_points(prompt.originals, scope)[first:])

    def _list(self, known: Known) -> None:
        if known.answer is not None:
            self._waiting.add(known.points, known.answer, known.conversation.id, known)

    def _unlist(self, known: Known) -> None:
        if known.answer is not None:
            self._waiting.remove(known.points, known.answer, known.conversation.id)

    def _trim(self, tenant: _Tenant) -> Iterator[Known]:
        """Make room for what a tenant has had remembered now."""
        while len(self._known) > self._max_conversations or (
            self._size_bytes > self._max_bytes and len(self._known) > 1
        ):
            has_much = (
                len(tenant.known) > self._max_conversations // 2 or tenant.size_bytes > self._max_bytes // 2
            ) and len(tenant.known) > 1
            known = next(iter((tenant.known if has_much else self._known).values()))
            self._unlist(known)
            self._forget(known)
            yield known

    def _forget(self, known: Known) -> None:
        if self._known.pop(known.conversation.id, None) is None:
            return
        tenant = self._tenants[known.scope]
        del tenant.known[known.conversation.id]
        self._size_bytes -= known.size_bytes
        tenant.size_bytes -= known.size_bytes
        if not tenant.known:
            del self._tenants[known.scope]

    def _hmac(self, *parts: bytes) -> bytes:
        # Each part with its length, so that no two lists of parts are one string.
        text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self._key, b"leyline-proxy:" + text, hashlib.sha256)
