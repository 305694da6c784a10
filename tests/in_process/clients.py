"""Conversations as a client library has them, and what each of their turns must hold to.

Knows the wire (notes, outcomes, routes), and nothing of slots. The checks here are about whole turns: whatever the
server chose to do, what a request was served with must be the caller's to see, and nothing that was to be forgotten.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from leyline_sglang import conversations
from leyline_sglang.noted_request import SCOPE_KEY, generate
from leyline_sglang.turn import salt_of
from sglang.srt.managers.io_struct import GenerateReqInput

from leyline_agent.core.protocol import (
    NOTE_KEY,
    Directive,
    Note,
    Outcome,
    Reason,
    ReleaseReply,
    SpliceReply,
    SpliceRequest,
)
from tests.in_process.harness import World
from tests.in_process.mirror import common_prefix, is_own
from tests.in_process.model import Namespace
from tests.in_process.rows import Influence, Row


@dataclass(eq=False, slots=True)
class Turn:
    """One turn of a conversation, perhaps still running."""

    turn_id: str
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    """As far as the client has them."""

    @property
    def sequence(self) -> list[int]:
        """Return what the next turn goes on from."""
        return [*self.prompt, *self.outputs]


@dataclass(eq=False, slots=True)
class Chat:
    """A request on its way."""

    client: Client
    turn: Turn
    outcome: Outcome | None
    stream: AsyncGenerator[Any, None]
    served: int = 0
    done: bool = False


class Client:
    """One conversation's client."""

    def __init__(self, world: World, name: str, *, extra_key: str | None = None, cache_salt: str | None = None) -> None:
        self.world = world
        self.name = name
        # As long and as mixed as a random one, and the same in each run.
        self.conversation_id = hashlib.sha256(name.encode()).hexdigest()
        self.extra_key = extra_key
        self.cache_salt = cache_salt
        self.turns: list[Turn] = []
        self.edits: dict[str, set[Influence]] = {}
        """What each edit that the server reported has made."""
        self._numbers = itertools.count(1)

    # --- requests ---------------------------------------------------------------------------------------------------

    def note(self, turn_id: str, **fields: Any) -> Note:
        """Return a note of this conversation."""
        return Note(conversation=self.conversation_id, turn=turn_id, **fields)

    def begin(
        self, prompt: Sequence[int], *, outputs: Sequence[int] = (), turn_id: str | None = None, **note: Any
    ) -> Chat:
        """Send a turn and wait for its first chunk; check what it was served with."""
        world = self.world
        turn = Turn(turn_id or f"t{next(self._numbers)}", list(prompt))
        custom = {
            NOTE_KEY: self.note(turn.turn_id, **note).model_dump_json(),
            "outputs": " ".join(map(str, outputs)),
        }
        request = GenerateReqInput(
            input_ids=list(prompt),
            sampling_params={"max_new_tokens": len(outputs), "custom_params": custom},
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            stream=True,
        )
        http_request = SimpleNamespace(scope={}, is_disconnected=_never)
        num_moves, num_served = len(world.mirror.moves), len(world.served)
        chat = Chat(self, turn, None, generate(world.serving, world.generate, world.manager, request, http_request))
        self.advance(chat)
        chat.outcome = http_request.scope[SCOPE_KEY]
        assert chat.outcome.reason != Reason.INTERNAL_ERROR, chat.outcome.message
        self._take_edits(chat.outcome, num_moves)
        if len(world.served) > num_served:
            self._check_served(self.note(turn.turn_id, **note), turn, *world.served[-1])
        self.turns.append(turn)
        return chat

    def _check_served(self, note: Note, turn: Turn, namespace: Namespace, rows: list[Row]) -> None:
        """Check what a turn was served with against what its note asked for."""
        acting = {influence for row in rows for influence in row.influences}
        if note.forget == "all":
            assert not acting, f"after a forget of all, {acting} act on what was served"
            assert not self.influences()
        elif note.forget:
            forgotten = set().union(*(self.edits.get(edit_id, set()) for edit_id in note.forget))
            assert not forgotten & (acting | self.influences()), f"{forgotten} were forgotten, {acting} act"
        if note.mode != "amortize" and is_own(namespace):
            known = [other.sequence for other in self.turns if other.turn_id == note.base]
            kept = max((common_prefix(sequence, turn.prompt) for sequence in known), default=0)
            assert len(rows) <= kept, f"{len(rows)} own rows were served to a {note.mode}, {kept} are left of the edit"

    def advance(self, chat: Chat) -> bool:
        """Take one more chunk of a request; return whether there was one."""
        self.world.actor = self.name
        try:
            chunk = self.world.wait(anext(chat.stream))
        except StopAsyncIteration:
            chat.done = True
            return False
        chat.turn.outputs = list(chunk["output_ids"])
        chat.served = chunk["meta_info"]["cached_tokens"]
        return True

    def finish(self, chat: Chat) -> None:
        """Take the rest of a request's chunks."""
        while self.advance(chat):
            pass

    def abort(self, chat: Chat) -> None:
        """Leave in the middle of a request."""
        self.world.actor = self.name
        self.world.wait(chat.stream.aclose())
        chat.done = True

    def chat(self, prompt: Sequence[int], **more: Any) -> Chat:
        """Send a turn and wait until it has ended."""
        chat = self.begin(prompt, **more)
        self.finish(chat)
        return chat

    def splice(self, base_ids: Sequence[int], directives: Sequence[Directive], *, scrub: bool = False) -> SpliceReply:
        """Splice outside of a request.

        Raises:
            PlanError: the server refused.
        """
        world = self.world
        world.actor = self.name
        num_moves = len(world.mirror.moves)
        body = SpliceRequest(
            conversation=self.conversation_id,
            base_ids=tuple(base_ids),
            directives=tuple(directives),
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            scrub=scrub,
        )
        reply: SpliceReply = world.wait(conversations.splice(world.serving, world.manager, None, body))
        self._take_edits(reply.outcome, num_moves)
        return reply

    def release(self, *, scrub: bool = False) -> ReleaseReply | None:
        """Free what the conversation has; return None where the server knows nothing of it."""
        world = self.world
        world.actor = self.name
        conversation = world.serving.memory.find((self.extra_key, self.cache_salt or None), self.conversation_id)
        if conversation is None:
            return None
        own = (self.extra_key, salt_of(world.config, conversation))
        reply: ReleaseReply = world.wait(
            conversations.release(world.serving, world.manager, [conversation], scrub=scrub)
        )
        left = [node for node in world.model.root(own).below() if not node.num_holds]
        assert not left, "rows of a released conversation are cached"
        return reply

    # --- what is known of it ----------------------------------------------------------------------------------------

    @property
    def own_namespace(self) -> tuple[str | None, str | None] | None:
        """The conversation's own namespace; None where the server does not know the conversation."""
        scope = (self.extra_key, self.cache_salt or None)
        conversation = self.world.serving.memory.find(scope, self.conversation_id)
        return None if conversation is None else (self.extra_key, salt_of(self.world.config, conversation))

    def influences(self) -> set[Influence]:
        """Return what acts on rows that this conversation can be served from now."""
        own = self.own_namespace
        nodes = [] if own is None else self.world.model.root(own).below()
        return {influence for node in nodes for influence in node.influences}

    def _take_edits(self, outcome: Outcome, num_moves: int) -> None:
        """Remember which moves carried out which of the outcome's edits: the first one right of it, and those after."""
        moves = self.world.mirror.moves[num_moves:]
        for directive in outcome.directives:
            if directive.edit_id is not None:
                self.edits[directive.edit_id] = {
                    influence for request, influence in moves if request.src_start >= directive.end
                }


async def _never() -> bool:
    return False
