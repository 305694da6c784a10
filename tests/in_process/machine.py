"""Random interleavings of everything that conversations and strangers may do, as a hypothesis state machine.

The rules only choose; what must hold is checked by the world after each operation, and by the clients after each turn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from leyline_sglang import footprints

from leyline_agent.core.plan import apply_directives
from leyline_agent.core.protocol import Mode, hash_token_ids
from leyline_agent.errors import PlanError
from tests.in_process.between import Between
from tests.in_process.clients import Chat, Client, Turn
from tests.in_process.harness import UNBOUNDED, World
from tests.in_process.requests import NoRoomError
from tests.in_process.stand_ins import predictable_secrets
from tests.in_process.strategies import BACK, BETWEEN, CHOICES, INDEX, OUTPUTS, SPAN, SPANS, TOKENS, directives_of

_MAX_TOKENS = 60
"""Of a prompt: two of them fill the small pool, so that evictions and a full pool come about."""
_MAX_CHATS = 4

_SYSTEM_PROMPTS = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 1, 1, 2, 3, 4), (1, 2, 3, *range(8, 32)))
"""Texts that conversations begin with, so that they share rows. The diff keeps no runs as short as in most of them."""
_FIRST_OUTPUTS = (7, 6, 5)


class CacheMachine(RuleBasedStateMachine):
    """Three conversations, two of them of one caller, and requests without a note."""

    core = "rust"
    system_prompts = _SYSTEM_PROMPTS

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[Chat] = []
        self.clients: list[Client] = []

    @initialize(size=st.sampled_from([96, 160, 320]), seed=st.integers(0, 7))
    def start(self, size: int, seed: int) -> None:
        """A server with a small, a middling or a large pool."""
        self._patches = ExitStack()
        self._patches.enter_context(predictable_secrets(seed))
        # The model remembers everything.
        self._patches.enter_context(patch.multiple(footprints, **UNBOUNDED))
        self.world = self.make_world(size)
        self.clients = [
            Client(self.world, "anna"),
            Client(self.world, "bert"),
            Client(self.world, "cleo", cache_salt="tenant"),
        ]

    def make_world(self, size: int) -> World:
        """Return a world whose pool has so many slots."""
        return World(self.core, size=size)

    def teardown(self) -> None:
        """End everything, which must leave no slot held."""
        if not self.clients:
            return
        self.world.given_up = sys.exc_info()[0] is not None
        try:
            if not self.world.given_up:
                self.end_all()
                assert not self.world.running, [running.req.rid for running in self.world.running]
                assert self.world.tree.protected_size() == 0
        finally:
            self.world.given_up = True
            self.world.close()
            self._patches.close()

    def end_all(self) -> None:
        """End what still runs."""
        for chat in list(self.chats):
            self._end(chat)

    # --- requests ---------------------------------------------------------------------------------------------------

    @rule(who=INDEX, start=INDEX, extra=TOKENS, outputs=OUTPUTS, chunks=INDEX, again=st.booleans())
    def begin(self, who: int, start: int, extra: list[int], outputs: list[int], chunks: int, again: bool) -> None:
        """A first turn, or the same turn once more."""
        client = self._client(who)
        if again:
            turn = self._turn(client, start)
            self._chat(client, turn.prompt, outputs, chunks, turn_id=turn.turn_id)
        else:
            self._chat(client, [*_SYSTEM_PROMPTS[start % len(_SYSTEM_PROMPTS)], *extra], outputs, chunks)

    @rule(who=INDEX, back=BACK, extra=TOKENS, outputs=OUTPUTS, chunks=INDEX, n=CHOICES)
    def grow(self, who: int, back: int, extra: list[int], outputs: list[int], chunks: int, n: int) -> None:
        """A turn that goes on from an earlier one."""
        client = self._client(who)
        base = self._turn(client, back)
        self._chat(client, [*base.sequence, *extra], outputs, chunks, base=base.turn_id, num_choices=n)

    @rule(who=INDEX, spans=SPANS, extra=TOKENS, outputs=OUTPUTS)
    def edit(self, who: int, spans: list[Any], extra: list[int], outputs: list[int]) -> None:
        """A turn whose base, the last turn, was edited."""
        self._edit(self._client(who), 0, spans, extra, outputs)

    @rule(who=INDEX, spans=SPANS, extra=TOKENS, outputs=OUTPUTS, scrub=st.booleans())
    def edit_explicitly(self, who: int, spans: list[Any], extra: list[int], outputs: list[int], scrub: bool) -> None:
        """The same, the note having the directives."""
        self._edit(self._client(who), 0, spans, extra, outputs, explicit=True, scrub=scrub)

    @rule(who=INDEX, edits=st.lists(SPANS, min_size=2, max_size=4), outputs=OUTPUTS)
    def edit_again_and_again(self, who: int, edits: list[Any], outputs: list[int]) -> None:
        """Several edited turns in a row, each editing what the last one left."""
        for spans in edits:
            amortized = [(gap, length, replacement, Mode.AMORTIZE) for gap, length, replacement, _ in spans]
            self._edit(self._client(who), 0, amortized, [1], outputs, explicit=True)

    @rule(
        who=INDEX,
        back=BACK,
        spans=SPANS,
        extra=TOKENS,
        outputs=OUTPUTS,
        chunks=INDEX,
        explicit=st.booleans(),
        n=CHOICES,
    )
    def edit_side_by_side(
        self,
        who: int,
        back: int,
        spans: list[Any],
        extra: list[int],
        outputs: list[int],
        chunks: int,
        explicit: bool,
        n: int,
    ) -> None:
        """A turn that edits any earlier one, and may go on running."""
        self._edit(self._client(who), back, spans, extra, outputs, chunks, explicit=explicit, num_choices=n)

    @rule(who=INDEX, spans=SPANS, extra=TOKENS, outputs=OUTPUTS, explicit=st.booleans(), between=BETWEEN)
    def edit_interrupted(
        self, who: int, spans: list[Any], extra: list[int], outputs: list[int], explicit: bool, between: Any
    ) -> None:
        """A turn in the middle of whose edits something happens."""
        self._edit(self._client(who), 0, spans, extra, outputs, explicit=explicit, between=between)

    @rule(
        who=INDEX,
        back=BACK,
        spans=st.lists(SPAN, max_size=2),
        mode=st.sampled_from(["reprefill", "forget"]),
        extra=TOKENS,
        outputs=OUTPUTS,
        chunks=INDEX,
        between=BETWEEN,
        scrub=st.booleans(),
    )
    def start_over(
        self,
        who: int,
        back: int,
        spans: list[Any],
        mode: str,
        extra: list[int],
        outputs: list[int],
        chunks: int,
        between: Any,
        scrub: bool,
    ) -> None:
        """A turn that is to be spliced nowhere, or whose old text is to be forgotten."""
        client = self._client(who)
        base = self._turn(client, back)
        prompt = [*apply_directives(base.sequence, directives_of(base.sequence, spans)), *extra]
        self._chat(client, prompt, outputs, chunks, between, base=base.turn_id, mode=mode, scrub=scrub)

    @rule(
        who=INDEX,
        back=BACK,
        which=st.one_of(st.just("all"), st.lists(INDEX, min_size=1, max_size=3)),
        extra=TOKENS,
        outputs=OUTPUTS,
        chunks=INDEX,
        between=BETWEEN,
        scrub=st.booleans(),
    )
    def forget(
        self,
        who: int,
        back: int,
        which: Any,
        extra: list[int],
        outputs: list[int],
        chunks: int,
        between: Any,
        scrub: bool,
    ) -> None:
        """A turn that forgets earlier edits."""
        client = self._client(who)
        base = self._turn(client, back)
        if which != "all" and not client.edits:
            return
        edits = list(client.edits)
        forget = which if which == "all" else tuple(edits[-1 - idx % len(edits)] for idx in which)
        self._chat(
            client,
            [*base.sequence, *extra],
            outputs,
            chunks,
            between,
            base=base.turn_id,
            forget=forget,
            scrub=scrub,
        )

    @rule(salt=st.sampled_from([None, "tenant", "stranger"]), start=INDEX, whose=INDEX, back=INDEX, extra=TOKENS)
    def stranger(self, salt: str | None, start: int, whose: int, back: int, extra: list[int]) -> None:
        """A request without a note, perhaps for a text that a conversation has."""
        prompt = (
            self._turn(self._client(whose), back).prompt if start % 2 else _SYSTEM_PROMPTS[start % len(_SYSTEM_PROMPTS)]
        )
        self.ask_plainly([*prompt, *extra], salt)

    # --- routes -----------------------------------------------------------------------------------------------------

    @rule(who=INDEX, back=BACK, spans=SPANS, between=BETWEEN, scrub=st.booleans())
    def splice(self, who: int, back: int, spans: list[Any], between: Any, scrub: bool) -> None:
        """An explicit splice, outside of a request."""
        client = self._client(who)
        base = self._turn(client, back)
        # A refusal with a reason, or a reply that we have lost; an internal error is neither.
        with Between(self, client, between), suppress(PlanError, TimeoutError):
            client.splice(base.sequence, directives_of(base.sequence, spans), scrub=scrub)
        self.on_step()

    @rule(who=INDEX, scrub=st.booleans())
    def release(self, who: int, scrub: bool) -> None:
        """A conversation is let go."""
        self._client(who).release(scrub=scrub)
        self.on_step()

    # --- the engine -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.chats)
    @rule(idx=INDEX, how=st.sampled_from(["advance", "finish", "abort"]))
    def go_on(self, idx: int, how: str) -> None:
        """A request decodes, ends, or is left by its caller."""
        chat = self.chats[idx % len(self.chats)]
        if how == "advance" and chat.client.advance(chat):
            self.on_step()
            return
        self._end(chat, abort=how == "abort")
        self.on_step()

    @precondition(lambda self: self.chats)
    @rule(idx=INDEX)
    def retract(self, idx: int) -> None:
        """A request has to give its rows back, and waits until there is room for it again."""
        running = self.world.running
        if running:
            self.world.retract(running[idx % len(running)])
            self.on_step()

    @rule(num_tokens=st.one_of(st.integers(1, 8), st.integers(1, 200)))
    def evict(self, num_tokens: int) -> None:
        """Other requests need room."""
        self.world.evict(num_tokens)
        self.on_step()

    @precondition(lambda self: self.clients)
    @rule(how=st.sampled_from(["flush"] * 6 + ["paused", "weights"]))
    def flush(self, how: str) -> None:
        """The cache is to be emptied, which is refused while it is used; or weights are updated, and it stays."""
        if how == "weights":
            self.world.reset(False)
        else:
            is_paused = how == "paused"
            is_idle = not self.world.running and (is_paused or not self.world.waiting)
            assert self.world.flush(is_paused=is_paused) == is_idle
        self.on_step()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _client(self, who: int) -> Client:
        return self.clients[who % len(self.clients)]

    def _turn(self, client: Client, back: int) -> Turn:
        """Return an earlier turn; a conversation that has none has its first one now."""
        if not client.turns:
            client.chat(_SYSTEM_PROMPTS[back % len(_SYSTEM_PROMPTS)], outputs=_FIRST_OUTPUTS)
            self.on_step()
        return client.turns[-1 - back % len(client.turns)]

    def _edit(
        self,
        client: Client,
        back: int,
        spans: list[Any],
        extra: Sequence[int],
        outputs: Sequence[int],
        chunks: int = 7,
        *,
        explicit: bool = False,
        between: Any = None,
        scrub: bool = False,
        num_choices: int = 1,
    ) -> None:
        prompt, note = self._edited(self._turn(client, back), spans, extra, explicit=explicit)
        self._chat(client, prompt, outputs, chunks, between, scrub=scrub, num_choices=num_choices, **note)

    def _edited(
        self, base: Turn, spans: list[Any], extra: Sequence[int], *, explicit: bool
    ) -> tuple[list[int], dict[str, Any]]:
        """Return a turn's prompt, edited and gone on with, and the note that goes with it."""
        directives = directives_of(base.sequence, spans)
        note: dict[str, Any] = {"base": base.turn_id}
        if explicit:
            note |= {
                "directives": tuple(directives),
                "base_len": len(base.sequence),
                "base_hash": hash_token_ids(base.sequence),
            }
        return [*apply_directives(base.sequence, directives), *extra], note

    def _chat(
        self,
        client: Client,
        prompt: Sequence[int],
        outputs: Sequence[int],
        chunks: int,
        between: Any = None,
        **more: Any,
    ) -> None:
        if not self._fits(client, prompt):
            return
        with Between(self, client, between):
            chat = client.begin(prompt, outputs=outputs, **more)
        for _ in range(chunks):
            if not client.advance(chat):
                break
        self._keep(chat)
        self.on_step()

    def _fits(self, client: Client, prompt: Sequence[int]) -> bool:
        """Whether a prompt is to be sent; where it is too long to go on with, the conversation begins anew."""
        if len(prompt) > _MAX_TOKENS:
            client.turns.clear()
            return False
        return True

    def _keep(self, chat: Chat) -> None:
        """Let a turn run on that has more to say."""
        if chat.done:
            return
        if len(self.chats) >= _MAX_CHATS:
            self._end(self.chats[0])
        self.chats.append(chat)

    def _end(self, chat: Chat, *, abort: bool = False) -> None:
        if abort:
            chat.client.abort(chat)
        else:
            chat.client.finish(chat)
        if chat in self.chats:
            self.chats.remove(chat)

    def ask_plainly(self, prompt: Sequence[int], salt: str | None) -> None:
        """Have a stranger ask without a note."""
        actor, self.world.actor = self.world.actor, "a stranger"
        try:
            self.world.finish(self.world.start(prompt, (None, salt)))
        except NoRoomError:
            pass
        finally:
            self.world.actor = actor
        self.on_step()

    def on_step(self) -> None:
        """Called after each operation."""
