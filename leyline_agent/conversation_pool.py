"""The conversations of one agent, found by thread and by their messages; bounded in number."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from leyline_agent.answered_prompts import MAX_VANISHED, AnsweredPrompts, prompt_points
from leyline_agent.conversation import Conversation, PolicyLike
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.digests import AnswerDigest, AnsweredTurn, goes_on
from leyline_agent.policy.loader import load_policy
from leyline_agent.policy.schema import Policy

_MAX_BRANCHES = 8
"""Conversations of one place; a further branch takes over the one that was left alone for longest."""
_MAX_TIPS = 32


class Place(NamedTuple):
    """Where in a thread calls are made. Those of one place are expected to go on from each other."""

    node: str = ""
    """The graph's node, below the nodes of the graphs around it: `researcher|model`."""
    server: str = ""
    """The base URL of the server asked: each holds conversations of its own, and is told no other's id."""

    @property
    def is_outermost(self) -> bool:
        """Whether it is no subgraph's."""
        return "|" not in self.node


class _Tip(NamedTuple):
    """An answered turn from which no later one went on."""

    turn: AnsweredTurn
    conversation: Conversation

    @property
    def is_base(self) -> bool:
        """Whether its conversation can go on from it."""
        base = self.conversation.base
        return base is not None and base.turn == self.turn.turn


@dataclass(slots=True)
class _Branches:
    """The conversations of one place: one, and another for each branch that goes on beside it."""

    conversations: list[Conversation] = field(default_factory=list)
    """The last used is the last."""
    tips: list[_Tip] = field(default_factory=list)


@dataclass(slots=True)
class _Thread:
    places: dict[Place, _Branches] = field(default_factory=dict)
    main: Conversation | None = None
    """The first of an outermost place. All others share its edits by hand."""
    main_is_placed: bool = False
    last: Conversation | None = None
    """The last asked for."""


class _Anonymous:
    """The conversations without a thread id, found by the digests of what they answered. Its user holds a lock."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[bytes], AnswerDigest]] = OrderedDict()
        self.prompts: AnsweredPrompts[Conversation] = AnsweredPrompts()

    def keep(self, conversation: Conversation, most: int) -> None:
        """Keep a conversation where it stands now, as the last used of at most so many."""
        self._drop(conversation.id)
        base = conversation.base
        if base is None:
            return
        points = prompt_points(base.prompt.originals)
        points = points[max(1, len(points) - 1 - MAX_VANISHED) :]
        self._kept[conversation.id] = points, base.answer
        self.prompts.add(points, base.answer, conversation.id, conversation)
        while len(self._kept) > most:
            self._drop(next(iter(self._kept)))

    def _drop(self, conversation_id: str) -> None:
        if conversation_id in self._kept:
            self.prompts.remove(*self._kept.pop(conversation_id), conversation_id)


class ConversationPool:
    """Keeps the `max_conversations` last used threads; an older one starts anew, which costs a re-prefill.

    Args:
        policy: as for `Conversation`; loaded once.
        key: derives the ids from thread id, node and server, so that they survive a restart. Without one they are
            random and live as long as this object.
        max_conversations: of threads, and again of conversations without a thread id.
        options: other keyword arguments of `Conversation`.
    """

    def __init__(
        self,
        policy: PolicyLike = None,
        *,
        key: str | bytes | None = None,
        max_conversations: int = 1024,
        **options: Any,
    ) -> None:
        self._policy = policy if policy is None or isinstance(policy, Policy) else load_policy(policy)
        self._key = key.encode() if isinstance(key, str) else key
        self._options = options
        self._max_conversations = max_conversations
        self._lock = threading.Lock()
        self._threads: OrderedDict[str, _Thread] = OrderedDict()
        self._anonymous = _Anonymous()
        # A bad key or option is the caller's mistake now, not the first request's.
        if key is None:
            self._new(None, None)
        else:
            Conversation.for_thread(key, "", self._policy, **options)

    def of_thread(self, thread_id: str) -> Conversation:
        """Return the conversation that a thread's last call belonged to; before the first call, that one's.

        With a key, its id is that of a server only from its first call on.
        """
        with self._lock:
            thread = self._thread(thread_id)
            return thread.last or self._main(thread_id, thread)

    def all_of_thread(self, thread_id: str) -> list[Conversation]:
        """Return all conversations of a thread: one for each place, and one for each branch."""
        with self._lock:
            thread = self._threads.get(thread_id, _Thread())
            return [found for branches in thread.places.values() for found in branches.conversations]

    def of_call(self, thread_id: str, place: Place, messages: Sequence[Message]) -> Conversation:
        """Return the conversation of a call: of those of its place, the one that these messages go on from.

        Where none is gone on from, the history was changed, and the last used one finds out what was changed. Where an
        answered turn is gone on from that is not its conversation's last, another branch lives beside this one. It
        gets a conversation of its own, so that two branches do not prefill each other's turns away.
        """
        digests = tuple([message.digest() for message in messages])
        with self._lock:
            thread = self._thread(thread_id)
            branches = thread.places.setdefault(place, _Branches())
            tips = [tip for tip in branches.tips if goes_on(tip.turn, messages, digests)]
            held = branches.conversations
            # The same turn may have been answered twice, as LangGraph does it after an interrupt.
            last = max(tips, key=lambda tip: (len(tip.turn.prompt.originals), tip.is_base)) if tips else None
            if not held or (last is not None and not last.is_base and len(held) < _MAX_BRANCHES):
                found = self._of_place(thread_id, thread, place, len(held))
            elif last is None:
                found = held[-1]
            else:
                found = last.conversation if last.is_base else held[0]
            branches.conversations = [*(other for other in held if other is not found), found]
            thread.last = found
            return found

    def answered(
        self,
        thread_id: str,
        place: Place,
        messages: Sequence[Message],
        turn: AnsweredTurn,
        conversation: Conversation,
    ) -> None:
        """Take note of an answered call, so that the next one finds the conversation.

        Args:
            thread_id: as for `of_call`.
            place: likewise.
            messages: likewise.
            turn: what the commit returned.
            conversation: whose turn it is.
        """
        digests = tuple([message.digest() for message in messages])
        with self._lock:
            branches = self._thread(thread_id).places.setdefault(place, _Branches())
            left = [tip for tip in branches.tips if not goes_on(tip.turn, messages, digests)]
            branches.tips = [*left, _Tip(turn, conversation)][-_MAX_TIPS:]

    def of_messages(self, messages: Sequence[Mapping[str, Any] | Message]) -> Conversation:
        """Return the conversation without a thread id whose last answered turn these messages go on from, or a new one.

        Up to three messages at the end of that turn's prompt may be gone. A new one is kept by `keep`, once it has an
        answer.
        """
        parsed = messages_from_openai(messages)
        points = prompt_points([message.digest() for message in parsed])
        with self._lock:
            found = self._anonymous.prompts.find(points, parsed)
        return found or Conversation(self._policy, **self._options)

    def keep(self, conversation: Conversation) -> None:
        """Keep a conversation that `of_messages` returned, as the last used."""
        with self._lock:
            self._anonymous.keep(conversation, self._max_conversations)

    def _thread(self, thread_id: str) -> _Thread:
        thread = self._threads.setdefault(thread_id, _Thread())
        self._threads.move_to_end(thread_id)
        while len(self._threads) > self._max_conversations:
            self._threads.popitem(last=False)
        return thread

    def _main(self, thread_id: str, thread: _Thread) -> Conversation:
        if thread.main is None:
            thread.main = self._new(self._id(thread_id), None)
        return thread.main

    def _of_place(self, thread_id: str, thread: _Thread, place: Place, num_others: int) -> Conversation:
        main = self._main(thread_id, thread)
        conversation_id = self._id(thread_id, place.node, place.server, num_others)
        if place.is_outermost and not thread.main_is_placed:
            thread.main_is_placed = True
            # It may have been made for edits by hand, before anybody knew which server is asked.
            main.id = conversation_id or main.id
            return main
        return self._new(conversation_id, main)

    def _new(self, conversation_id: str | None, edits_of: Conversation | None) -> Conversation:
        return Conversation(
            self._policy,
            conversation_id=conversation_id,
            resumed=conversation_id is not None,
            edits_of=edits_of,
            **self._options,
        )

    def _id(self, *parts: str | int) -> str | None:
        """Return the id that follows from the key; another for each list of parts, none without a key."""
        if self._key is None:
            return None
        # Another hash than `Conversation.for_thread`, so that no thread id there gives an id of ours.
        return hmac.digest(self._key, json.dumps(["leyline-pool", *parts]).encode(), hashlib.sha512).hex()[:64]
