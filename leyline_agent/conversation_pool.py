"""The conversations of one agent, found by thread id or by their messages; bounded in number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from leyline_agent.conversation import Conversation, PolicyLike
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.policy.loader import load_policy
from leyline_agent.policy.schema import Policy


class ConversationPool:
    """Keeps the `max_conversations` last used conversations; an older one starts anew, which costs a re-prefill.

    Args:
        policy: as for `Conversation`; loaded once.
        key: derives the ids from the thread ids, so that they survive a restart. Without one they are random and
            live as long as this object.
        max_conversations: of those with a thread id, and again of those without.
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
        self._key = key
        self._options = options
        self._max_conversations = max_conversations
        self._lock = threading.Lock()
        self._by_thread: OrderedDict[str, Conversation] = OrderedDict()
        self._anonymous: OrderedDict[str, Conversation] = OrderedDict()
        # A bad key or option is the caller's mistake now, not the first request's.
        self._new("")

    def of_thread(self, thread_id: str) -> Conversation:
        """Return a thread's conversation."""
        with self._lock:
            conversation = self._by_thread.get(thread_id)
            if conversation is None:
                conversation = self._by_thread[thread_id] = self._new(thread_id)
            self._by_thread.move_to_end(thread_id)
            _trim(self._by_thread, self._max_conversations)
        return conversation

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """Return the conversation without a thread id whose last answered turn these messages go on from, or a new one.

        A new one is kept by `keep`, once it has an answer.
        """
        parsed: list[Message] = messages_from_openai(messages)
        with self._lock:
            candidates = list(reversed(self._anonymous.values()))
        for conversation in candidates:
            if conversation.is_continued_by(parsed):
                return conversation
        return Conversation(self._policy, **self._options)

    def keep(self, conversation: Conversation) -> None:
        """Keep a conversation that `of_messages` returned, as the last used."""
        with self._lock:
            self._anonymous[conversation.id] = conversation
            self._anonymous.move_to_end(conversation.id)
            _trim(self._anonymous, self._max_conversations)

    def _new(self, thread_id: str) -> Conversation:
        if self._key is None:
            return Conversation(self._policy, **self._options)
        return Conversation.for_thread(self._key, thread_id, self._policy, **self._options)


def _trim(conversations: OrderedDict[str, Conversation], max_conversations: int) -> None:
    while len(conversations) > max_conversations:
        conversations.popitem(last=False)
