"""Conversations as a client library has them, and what each of their turns must hold to.

Knows the wire (notes, outcomes, routes), and nothing of slots. The checks here are about whole turns: whatever the
server chose to do, what a request was served with must be the caller's to see, and nothing that was to be forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from leyline_sglang import conversations
from leyline_sglang.io_types import CacheRequest
from leyline_sglang.noted_request import SCOPE_KEY, generate
from leyline_sglang.sequences import RememberedTurn
from leyline_sglang.turn import salt_of
from sglang.srt.managers.io_struct import GenerateReqInput

from leyline_agent.core.plan import apply_directives
from leyline_agent.core.protocol import (
    NOTE_KEY,
    Directive,
    Note,
    Outcome,
    Reason,
    ReleaseReply,
    SpliceReply,
    SpliceRequest,
    hash_token_ids,
)
from tests.in_process.harness import SameIdError, World
from tests.in_process.mirror import is_own
from tests.in_process.model import Namespace
from tests.in_process.moves import common_prefix
from tests.in_process.requests import Caller
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

    def edited(self, directives: Sequence[Directive], then: int) -> dict[str, Any]:
        """Return the prompt and the note's fields that send its sequence again, edited, and one token more."""
        ids = self.sequence
        return {
            "prompt": [*apply_directives(ids, directives), then],
            "base": self.turn_id,
            "directives": tuple(directives),
            "base_len": len(ids),
            "base_hash": hash_token_ids(ids),
        }


@dataclass(eq=False, slots=True)
class Chat:
    """A request on its way."""

    client: Client
    turn: Turn
    note: Note
    fields: dict[str, Any]
    """Of the note, as its caller gave them."""
    caller: Caller
    stream: AsyncGenerator[Any, None]
    http_request: Any
    request: GenerateReqInput
    first: Any = None
    """The task that waits for its first chunk; None once that has come."""
    outcome: Outcome | None = None
    served: int = 0
    served_with: tuple[Namespace, list[Row]] | None = None
    """What it had from the cache; None where it was not served."""
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
        self.may_fail = False
        """Whether kernels are made to fail, of which an outcome may tell."""
        self._numbers = itertools.count(1)
        self._num_sent: Counter[str] = Counter()
        """How often each turn was sent."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def note(self, turn_id: str, **fields: Any) -> Note:
        """Return a note of this conversation."""
        return Note(conversation=self.conversation_id, turn=turn_id, **fields)

    def send(
        self,
        prompt: Sequence[int],
        *,
        outputs: Sequence[int] = (),
        turn_id: str | None = None,
        rid: str | None = None,
        num_choices: int = 1,
        **note: Any,
    ) -> Chat:
        """Send a turn, and let it come as far as it does before the scheduler's next batch."""
        world = self.world
        turn = Turn(turn_id or f"t{next(self._numbers)}", list(prompt))
        self._num_sent[turn.turn_id] += 1
        full_note = self.note(turn.turn_id, **note)
        custom = {NOTE_KEY: full_note.model_dump_json(), "outputs": " ".join(map(str, outputs))}
        request = GenerateReqInput(
            input_ids=list(prompt),
            sampling_params={"max_new_tokens": len(outputs), "n": num_choices, "custom_params": custom},
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            stream=True,
            rid=rid,
        )
        http_request = SimpleNamespace(scope={}, is_disconnected=_never)
        caller = Caller(self.name)
        stream = generate(world.serving, world.generate, world.manager, request, http_request)
        chat = Chat(self, turn, full_note, note, caller, stream, http_request, request)
        with world.as_caller(caller):
            chat.first = world.begin(_first_chunk(stream) if num_choices == 1 else anext(stream))
        return chat

    def arrive(self, chat: Chat) -> None:
        """Wait for the first chunk of a turn, and check what it was served with."""
        world = self.world
        first, chat.first = chat.first, None
        try:
            self._take(chat, world.wait_for(first))
        except StopAsyncIteration:
            chat.done = True
        except SameIdError:
            chat.done = True
            self._check_log(chat)
            return
        chat.outcome = chat.http_request.scope[SCOPE_KEY]
        assert chat.outcome.reason != Reason.INTERNAL_ERROR or self.may_fail, chat.outcome.message
        if chat.outcome.purge is not None:
            self._check_left(self.own_namespace)
        self._take_edits(chat.outcome, chat.caller)
        self._check_log(chat)
        chat.served_with = world.take_served(chat.request)
        if chat.served_with is not None:
            self._check_served(chat.note, chat.turn, *chat.served_with)
        self.turns.append(chat.turn)

    def begin(self, prompt: Sequence[int], **more: Any) -> Chat:
        """Send a turn, wait for its first chunk, and check what it was served with."""
        chat = self.send(prompt, **more)
        self.arrive(chat)
        return chat

    def _check_log(self, chat: Chat) -> None:
        """Check that the server knows which edits of a turn act on its own rows, also where it could not say so.

        Those ids are the client's too, for a later forget: the server's own route tells them.
        """
        remembered = self._remembered(chat.turn)
        moves = [
            (request, influence) for caller, request, influence in self.world.mirror.moves if caller is chat.caller
        ]
        if remembered is None or not remembered.in_own or self._num_sent[chat.turn.turn_id] > 1:
            # Of a turn that was sent again the log of the last one is remembered.
            return
        made = [edit for edit in remembered.edits if edit.turn == chat.turn.turn_id]
        for request, influence in moves:
            left = [edit for edit in made if edit.position <= request.dst_start]
            assert left, (
                f"{influence} acts on turn {chat.turn.turn_id!r} from {request.dst_start} on, the log has {made}"
            )
        for edit in made:
            acting = {influence for request, influence in moves if request.dst_start >= edit.position}
            self.edits.setdefault(edit.edit_id, acting)

    def _remembered(self, turn: Turn) -> RememberedTurn | None:
        conversation = self.world.serving.memory.find((self.extra_key, self.cache_salt or None), self.conversation_id)
        remembered = None if conversation is None else conversation.turns.get(turn.turn_id)
        return remembered if remembered is not None and remembered.prompt_ids.tolist() == turn.prompt else None

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
        with self.world.as_caller(chat.caller):
            try:
                self._take(chat, self.world.wait(anext(chat.stream)))
            except StopAsyncIteration:
                chat.done = True
                return False
        return True

    def _take(self, chat: Chat, chunk: Any) -> None:
        chat.turn.outputs = list(chunk["output_ids"])
        chat.served = chunk["meta_info"]["cached_tokens"]

    def finish(self, chat: Chat) -> None:
        """Take the rest of a request's chunks."""
        while self.advance(chat):
            pass

    def abort(self, chat: Chat) -> None:
        """Leave in the middle of a request."""
        with self.world.as_caller(chat.caller):
            if chat.first is not None:
                first, chat.first = chat.first, None
                first.cancel()
                self.world.wait(asyncio.wait([first]))
                error = None if first.cancelled() else first.exception()
                if not isinstance(error, SameIdError | StopAsyncIteration | None):
                    raise error
            self.world.wait(chat.stream.aclose())
        self._check_log(chat)
        self.world.take_served(chat.request)
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
        caller = Caller(self.name)
        body = SpliceRequest(
            conversation=self.conversation_id,
            base_ids=tuple(base_ids),
            directives=tuple(directives),
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            scrub=scrub,
        )
        with world.as_caller(caller):
            reply: SpliceReply = world.wait(conversations.splice(world.serving, world.manager, None, body))
        self._take_edits(reply.outcome, caller)
        return reply

    def release(self, *, scrub: bool = False) -> ReleaseReply | None:
        """Free what the conversation has; return None where the server knows nothing of it."""
        world = self.world
        conversation = world.serving.memory.find((self.extra_key, self.cache_salt or None), self.conversation_id)
        if conversation is None:
            return None
        with world.as_caller(Caller(self.name)):
            reply: ReleaseReply = world.wait(
                conversations.release(world.serving, world.manager, [conversation], scrub=scrub)
            )
        self._check_left(None)
        return reply

    def _check_left(self, namespace: Namespace | None) -> None:
        """Check that nothing is cached in any namespace that the conversation has ever had, but in this one.

        What requests hold is: it goes as they end.
        """
        world = self.world
        for other, root in world.model.roots.items():
            actor = world.actors.get((other[1] or "").removesuffix("-parked"))
            if actor == self.name and other != namespace:
                left = [node.row for node in root.below() if not node.num_holds]
                assert not left, f"rows of a closed namespace are cached: {left}"

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

    def _take_edits(self, outcome: Outcome, caller: Caller) -> None:
        """Remember which moves carried out which of the outcome's edits: the first one right of it, and those after."""
        moves = self._moves(caller)
        for directive in outcome.directives:
            if directive.edit_id is not None:
                self.edits[directive.edit_id] = {
                    influence for request, influence in moves if request.src_start >= directive.end
                }

    def _moves(self, caller: Caller) -> list[tuple[CacheRequest, Influence]]:
        return [(request, influence) for other, request, influence in self.world.mirror.moves if other is caller]


async def _never() -> bool:
    return False


async def _first_chunk(stream: AsyncGenerator[Any, None]) -> Any:
    """Return the first chunk; a stream of one chunk is read to its end."""
    chunk = await anext(stream)
    if chunk["meta_info"]["finish_reason"]:
        async for _more in stream:
            raise AssertionError("a chunk after the last one")
    return chunk
