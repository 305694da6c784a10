"""Random interleavings where turns wait in the scheduler's queue, their edits announced for when they are admitted.

To the rules of `machine.py` come those about what happens between announcement, admission and answer. Each run takes
one step of the scheduler for an edited turn, or sometimes one and sometimes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from leyline_sglang import one_step
from leyline_sglang.config import Config

from tests.in_process.clients import Chat, Client
from tests.in_process.harness import PATIENCE, World
from tests.in_process.machine import CacheMachine
from tests.in_process.requests import NoRoomError
from tests.in_process.strategies import BACK, CHOICES, INDEX, OUTPUTS, SPANS, TOKENS

_MAX_QUEUED = 3
_SAME_ID = "the same id"
RID = st.sampled_from([None, None, None, _SAME_ID])


class QueueMachine(CacheMachine):
    """The same conversations on a server whose attention backend lets R share its request's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[Chat] = []
        """Turns that were sent and have not been answered yet."""

    @initialize(
        size=st.sampled_from([96, 160, 320]),
        seed=st.integers(0, 7),
        both=st.booleans(),
        max_running=st.sampled_from([3, 8]),
        budget=st.sampled_from([12, 40, 1024]),
        chunks=st.booleans(),
        in_place=st.sampled_from([True, True, True, False]),
    )
    def start(  # type: ignore[override]
        self, size: int, seed: int, both: bool, max_running: int, budget: int, chunks: bool, in_place: bool
    ) -> None:
        """A server with a pool, request slots and batches of some size; `both` has edits in one step and in two."""
        self._both = both
        self._server: dict[str, Any] = {
            "max_running": max_running,
            "max_prefill_tokens": budget,
            "chunked_prefill_size": budget if chunks else None,
            "one_step": True,
            "config": Config(secret="a secret of the tests", turns_per_conversation=4, in_place=in_place),
        }
        super().start(size, seed)
        # As many batches are let go by as this takes long.
        self._patches.enter_context(patch.object(one_step, "_MAX_PASSED_OVER", 3))

    def make_world(self, size: int) -> World:
        """Return a world of the chosen kind."""
        return World(self.core, size=size, **self._server)

    # --- what is sent and waits -------------------------------------------------------------------------------------

    @rule(
        who=INDEX,
        back=BACK,
        spans=SPANS,
        extra=TOKENS,
        outputs=OUTPUTS,
        explicit=st.booleans(),
        rid=RID,
        one=st.booleans(),
    )
    def send_edited(
        self,
        who: int,
        back: int,
        spans: list[Any],
        extra: list[int],
        outputs: list[int],
        explicit: bool,
        rid: str | None,
        one: bool,
    ) -> None:
        """An edited turn, which waits in the queue or for the conversation's turn before it."""
        client = self._client(who)
        base = self._turn(client, back)
        self.world.set_one_step(one or not self._both)
        prompt, note = self._edited(base, spans, extra, explicit=explicit)
        self._send(client, prompt, outputs, rid=rid, **note)

    @rule(who=INDEX, back=BACK, extra=TOKENS, outputs=OUTPUTS, again=st.booleans(), rid=RID, n=CHOICES)
    def send_grown(
        self, who: int, back: int, extra: list[int], outputs: list[int], again: bool, rid: str | None, n: int
    ) -> None:
        """A turn that goes on from an earlier one, or the same turn once more."""
        client = self._client(who)
        base = self._turn(client, back)
        # SGLang gives each of several choices an id of its own.
        more = {"rid": rid} if n == 1 else {"num_choices": n}
        if again:
            self._send(client, base.prompt, outputs, turn_id=base.turn_id, **more)
        else:
            self._send(client, [*base.sequence, *extra], outputs, base=base.turn_id, **more)

    @precondition(lambda self: self.queued)
    @rule(idx=INDEX, outputs=OUTPUTS)
    def send_again(self, idx: int, outputs: list[int]) -> None:
        """A queued turn once more, as of a client that has waited too long."""
        chat = self.queued[idx % len(self.queued)]
        self._send(chat.client, chat.turn.prompt, outputs, turn_id=chat.turn.turn_id, **chat.fields)

    def _send(self, client: Client, prompt: Sequence[int], outputs: Sequence[int], **more: Any) -> None:
        if not self._fits(client, prompt):
            return
        if len(self.queued) >= _MAX_QUEUED:
            self._arrive(self.queued[0])
        self.queued.append(client.send(prompt, outputs=outputs, **more))
        self.on_step()

    # --- the scheduler's batches ------------------------------------------------------------------------------------

    @precondition(lambda self: self.queued)
    @rule(deliver=st.booleans())
    def batch(self, deliver: bool) -> None:
        """One batch, what is said of it arriving at once or later."""
        self.world.batch(deliver=deliver)
        self.on_step()

    @precondition(lambda self: self.queued)
    @rule(idx=INDEX, chunks=INDEX)
    def answer(self, idx: int, chunks: int) -> None:
        """A queued turn is waited for, and goes on for a while."""
        chat = self.queued[idx % len(self.queued)]
        self._arrive(chat)
        for _ in range(chunks):
            if chat.done or not chat.client.advance(chat):
                break
        self.on_step()

    @precondition(lambda self: self.queued)
    @rule(idx=INDEX, late=st.booleans())
    def leave(self, idx: int, late: bool) -> None:
        """A caller leaves before its answer; the engine hears of it at once or `late`."""
        chat = self.queued.pop(idx % len(self.queued))
        self.world.engine_hears = not late
        chat.client.abort(chat)
        self.world.engine_hears = True
        self.on_step()

    @precondition(lambda self: self.world.replies)
    @rule()
    def lose(self) -> None:
        """What the scheduler has said is lost; until the turns that wait for it have ended, later ones wait too."""
        lost = {reply.request_id for reply in self.world.replies}
        self.world.replies.clear()
        for chat in [chat for chat in self.queued if chat.request.rid in lost]:
            self._arrive(chat)
            self._end(chat)
        self.on_step()

    @precondition(lambda self: self.queued and self.world.waiting)
    @rule(idx=INDEX)
    def give_up(self, idx: int) -> None:
        """The engine finds that it cannot serve a queued request, as with a grammar that does not compile."""
        waiting = self.world.waiting[idx % len(self.world.waiting)]
        if waiting.req.to_finish is None:
            waiting.req.set_finish_with_abort("given up")

    @precondition(lambda self: self.queued)
    @rule(moves=st.integers(0, 5))
    def fail(self, moves: int) -> None:
        """A kernel is to fail, soon or after some more."""
        for client in self.clients:
            client.may_fail = True
        self.world.admissions.fail_after = moves

    # --- others -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.queued)
    @rule(idx=INDEX, extra=st.lists(st.integers(1, 7), max_size=2), same_id=st.booleans(), stays=st.booleans())
    def alike(self, idx: int, extra: list[int], same_id: bool, stays: bool) -> None:
        """A stranger asks for what a queued turn asks for, maybe under its id, before that is admitted."""
        chat = self.queued[idx % len(self.queued)]
        prompt, salt = [*chat.turn.prompt, *extra], chat.client.cache_salt
        rid = chat.request.rid if same_id else None
        world, before = self.world, self.world.actor
        world.actor = "a stranger"
        try:
            if stays:
                world.submit(prompt, (None, salt), rid=rid, max_new_tokens=0).is_left = True
            else:
                world.finish(world.start(prompt, (None, salt), rid=rid))
        except NoRoomError:
            pass
        finally:
            world.actor = before
        self.on_step()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _arrive(self, chat: Chat) -> None:
        self.queued.remove(chat)
        chat.client.arrive(chat)
        self._keep(chat)

    def end_all(self) -> None:
        """Take all answers, and end everything."""
        while self.queued:
            self._arrive(self.queued[0])
        self._take_all_in()
        super().end_all()
        self._take_all_in()
        assert not self.world.has_work

    def _take_all_in(self) -> None:
        """Have all admitted that wait, as far as those that decode leave room."""
        num_empty = 0
        while self.world.has_work and num_empty < PATIENCE:
            num_empty = 0 if self.world.batch() else num_empty + 1
