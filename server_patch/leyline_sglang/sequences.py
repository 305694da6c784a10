"""The token ids of each conversation's recent turns, bounded in memory. Lives in the tokenizer process.

Knows nothing of SGLang: keys, ids and namespaces are handed in. What is remembered describes cached KV and is
forgotten with it.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

from leyline_sglang.namespaces import new_nonce

Scope = tuple[str | None, str | None]
"""The caller's own namespace: (extra_key, cache_salt)."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An amortized edit whose removed text still acts on what lies right of `position`. Holds no text."""

    edit_id: str
    position: int
    turn: str | None
    """The turn that made it; None for an explicit splice."""
    removed_tokens: int
    replacement_tokens: int


@dataclass(frozen=True, slots=True)
class RememberedTurn:
    """One turn: its prompt and what was generated for it, as far as it is known."""

    prompt_ids: array[int]
    outputs: tuple[array[int], ...] = ()
    """One for each choice of a request with `n > 1`; none while the first token is awaited."""
    edits: tuple[Edit, ...] = ()
    in_own: bool = False
    """Whether it was served from the conversation's own namespace; its rows are there, or in the shared one."""

    @property
    def num_tokens(self) -> int:
        """Token ids held."""
        return len(self.prompt_ids) + sum(map(len, self.outputs))

    def sequences(self) -> list[array[int]]:
        """Return the cached sequences that a later prompt may edit, at least one."""
        return [self.prompt_ids + output for output in self.outputs] or [self.prompt_ids]


@dataclass(slots=True, eq=False)
class Conversation:
    """What the server knows of one conversation, for one caller's namespace."""

    scope: Scope
    hashed_id: str
    nonce: str = field(default_factory=new_nonce)
    """Makes the namespace; a new one closes the old namespace for good."""
    has_namespace: bool = False
    """Whether anything was ever spliced into the namespace or served from it."""
    closing: list[str] = field(default_factory=list)
    """Namespaces closed before, of which the scheduler has not yet said that they are dropped."""
    explicit_edits: tuple[Edit, ...] = ()
    """Made by splices outside of a turn, newest last; for people to see, as no turn's log has them."""
    turns: OrderedDict[str, RememberedTurn] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    """Remembered token ids."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a turn's edits are carried out: splices of one conversation are serialized."""


class SequenceMemory:
    """Conversations by (scope, hashed id), least recently used first to go."""

    def __init__(
        self,
        *,
        turns_per_conversation: int,
        conversation_memory_tokens: int,
        memory_tokens: int,
        scope_memory_tokens: int,
        max_conversations: int,
    ) -> None:
        self._turns_per_conversation = turns_per_conversation
        self._max_conversations = max_conversations
        self._conversation_memory_tokens = conversation_memory_tokens
        self._memory_tokens = memory_tokens
        self._scope_memory_tokens = scope_memory_tokens
        self._conversations: OrderedDict[tuple[Scope, str], Conversation] = OrderedDict()
        self._holding: dict[Scope | None, OrderedDict[str, Conversation]] = defaultdict(OrderedDict)
        """Those with turns, of each scope and, under None, of all: what a bound takes from."""
        self._scope_tokens: Counter[Scope] = Counter()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def num_tokens(self) -> int:
        """Remembered token ids of all conversations."""
        return self._num_tokens

    def open(self, scope: Scope, conversation_id: str) -> Conversation:
        """Return the conversation, made now where it is not known, and mark it as just used."""
        key = (scope, hash_id(conversation_id))
        conversation = self._conversations.get(key)
        if conversation is None:
            conversation = self._conversations[key] = Conversation(*key)
        self._conversations.move_to_end(key)
        if conversation.turns:
            self._hold(conversation)
        while len(self._conversations) > self._max_conversations:
            _, oldest = self._conversations.popitem(last=False)
            self.close_namespace(oldest)
        return conversation

    def find(self, scope: Scope, conversation_id: str) -> Conversation | None:
        """Return a conversation that is known, or None. Released or with all turns pushed out it still is."""
        return self._conversations.get((scope, hash_id(conversation_id)))

    def find_hashed(self, hashed_id: str) -> list[Conversation]:
        """Return the conversations with a hashed id, one for each caller's namespace."""
        return [conversation for (_, known), conversation in self._conversations.items() if known == hashed_id]

    def remember(self, conversation: Conversation, turn_id: str, turn: RememberedTurn, *, nonce: str) -> None:
        """Keep a turn, replacing what was kept under the same id, and drop what is over the bounds.

        A turn is not kept that was served from a namespace closed since (`nonce`), nor one of a conversation that was
        dropped while it ran.
        """
        known = self._conversations.get((conversation.scope, conversation.hashed_id)) is conversation
        if not known or nonce != conversation.nonce:
            return
        self._drop(conversation, turn_id)
        conversation.turns[turn_id] = turn
        self._account(conversation, turn.num_tokens)
        self._hold(conversation)
        while (
            len(conversation.turns) > self._turns_per_conversation
            or conversation.num_tokens > self._conversation_memory_tokens
        ):
            self._drop(conversation, next(iter(conversation.turns)))
        self._shrink(conversation.scope)

    def close_namespace(self, conversation: Conversation) -> None:
        """Start a new namespace and forget every turn: none of their rows can be reached any more."""
        conversation.nonce = new_nonce()
        conversation.has_namespace = False
        conversation.explicit_edits = ()
        self._forget_turns(conversation)

    def forget_all(self) -> None:
        """Forget the turns of every conversation, as where the cache was emptied or may no longer be relied on.

        Their namespaces stay: not all that is to empty a cache does so, and turns that still run put more into it, all
        of which must be found by a later forget.
        """
        for conversation in self._conversations.values():
            conversation.explicit_edits = ()
            self._forget_turns(conversation)

    def _drop(self, conversation: Conversation, turn_id: str) -> None:
        dropped = conversation.turns.pop(turn_id, None)
        if dropped is not None:
            self._account(conversation, -dropped.num_tokens)

    def _hold(self, conversation: Conversation) -> None:
        """Mark a conversation with turns as the most recently used one."""
        for scope, key in _places(conversation):
            self._holding[scope][key] = conversation
            self._holding[scope].move_to_end(key)

    def _account(self, conversation: Conversation, num_tokens: int) -> None:
        conversation.num_tokens += num_tokens
        self._num_tokens += num_tokens
        self._scope_tokens[conversation.scope] += num_tokens
        if not self._scope_tokens[conversation.scope]:
            del self._scope_tokens[conversation.scope]
        if not conversation.turns:
            for scope, key in _places(conversation):
                self._holding[scope].pop(key, None)
                if not self._holding[scope]:
                    del self._holding[scope]

    def _shrink(self, scope: Scope) -> None:
        while self._scope_tokens[scope] > self._scope_memory_tokens:
            self._forget_turns(next(iter(self._holding[scope].values())))
        while self.num_tokens > self._memory_tokens:
            self._forget_turns(next(iter(self._holding[None].values())))

    def _forget_turns(self, conversation: Conversation) -> None:
        """Forget the turns alone: by the rest, what the conversation has cached can still be forgotten or released."""
        conversation.turns.clear()
        self._account(conversation, -conversation.num_tokens)


def _places(conversation: Conversation) -> tuple[tuple[Scope | None, str], ...]:
    return (conversation.scope, conversation.hashed_id), (None, f"{conversation.scope}{conversation.hashed_id}")


def hash_id(conversation_id: str) -> str:
    """Return what stands for a conversation wherever it is written down; the id itself is a bearer secret."""
    return hashlib.sha256(conversation_id.encode()).hexdigest()[:32]
