"""What the plugin's hooks do while a batch is built, on the real `PrefillAdder` and `alloc_for_extend`, and its checks.

The hooks are the plugin's own (`one_step.admit`, `compat._write_to_placed_slots`), put where the plugin puts them. Each
move that an admission makes is carried out on the model as it is made, and what the admission says in the end is
compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from leyline_sglang import compat, move, one_step
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_policy import PrefillAdder

from leyline_agent.core.protocol import Reason
from tests.in_process.model import hold, row_of

if TYPE_CHECKING:
    from tests.in_process.engine import Engine
    from tests.in_process.requests import Running


class Admissions:
    """The admissions of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.siblings: list[Running] = []
        """Of the batch that is being built."""
        self.num_spliced = 0
        """R's that were computed beside their request."""
        self.fail_after: int | None = None
        """How often rows may yet be turned or copied, or R admitted, before that fails once; None fails none."""
        self._adder: Any = None
        self._replies: list[CacheReply] = []
        """Of the moves of the admission that is under way."""

    @property
    def adder_class(self) -> type[PrefillAdder]:
        """SGLang's adder with the plugin's hook around it."""
        admissions = self

        class Adder(PrefillAdder):  # type: ignore[misc]
            def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
                def plainly(other: Any) -> Any:
                    return PrefillAdder.add_one_req(self, other, *args, **kwargs)

                return admissions.admit(self, req, plainly)

        return Adder

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the hooks in place, and moves in an admission checked."""
        original = schedule_batch.alloc_for_extend
        with (
            patch.object(schedule_batch, "alloc_for_extend", lambda batch: self._alloc_for_extend(original, batch)),
            patch.object(one_step, "Move", self._move_class()),
            patch.object(move, "turn_rows_", self._failing(move.turn_rows_)),
            patch.object(move, "copy_rows_", self._failing(move.copy_rows_)),
        ):
            yield

    def _failing(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            self._may_fail()
            kernel(*args, **kwargs)

        return run

    def _may_fail(self) -> None:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after, self._engine.has_failed = None, True
                raise RuntimeError("made to fail")

    # --- a request joins the batch ----------------------------------------------------------------------------------

    def admit(self, adder: Any, req: Any, plainly: Callable[[Any], Any]) -> Any:
        """Admit a request as the plugin does; check what came of what was announced for it."""
        engine = self._engine
        running = next(running for running in engine.waiting if running.req is req)
        announced = one_step._ANNOUNCED.get(engine.scheduler, {}).get(req.rid)
        # A tag is what only the plugin puts on; another request may have the same id.
        if announced is not None and running.tag != announced.own_salt:
            announced = None
        self._adder, self._replies = adder, []
        num_told, salt = len(engine.replies), req.cache_salt
        engine.allocator.freed.clear()
        with engine.as_caller(running.caller):
            result = one_step.admit(
                engine.scheduler, adder, req, lambda other: self._admit_plainly(adder, other, plainly)
            )
            told = engine.replies[num_told:]
            assert len(told) <= 1
            if told:
                assert announced is not None, "what nobody has announced for a request was done"
                self._check_admission(running, announced, told[0])
            else:
                assert not self._replies, "rows are moved and nobody is told"
                assert req.cache_salt == salt
        engine.raise_failure()
        assert not engine.allocator.freed, "an admission frees more than its moves do"
        self._adder = None
        return result

    def _admit_plainly(self, adder: Any, req: Any, plainly: Callable[[Any], Any]) -> Any:
        if all(running.req is not req for running in self._engine.waiting):
            self._may_fail()
        result = plainly(req)
        if req in adder.can_run_list:
            with self._engine.noted_failure():
                self._take_hold(req)
        return result

    def _take_hold(self, req: Any) -> None:
        """Take note of what an admitted request holds, and check what it is served with."""
        engine = self._engine
        running = next((running for running in engine.waiting if running.req is req), None)
        slots = engine.tree.prefix_device_indices(req)[: req.prefix_len].tolist()
        nodes = [engine.model.by_slot[slot] for slot in slots]
        if running is None:
            running = engine.new_sibling(req)
            self.siblings.append(running)
        else:
            cached = engine.model.match(running.namespace, req.full_untruncated_fill_ids[:-1])
            assert nodes == cached, f"{req.prefix_len} tokens are served, the model says {len(cached)} are cached"
        engine.check_served(running, nodes)
        running.held, running.served = nodes, len(nodes)
        running.view = [row_of(node) for node in nodes]
        running.served_rows = list(running.view)
        hold(nodes, 1)

    def _check_admission(self, running: Running, announced: AdmissionRequest, told: AdmissionReply) -> None:
        engine, model, req = self._engine, self._engine.model, running.req
        # Where nothing was moved, what a lost splice has left there may stay.
        for node in engine.mirror.parked(req.extra_key, announced.own_salt) if self._replies else ():
            assert node.slot in engine.allocator.freed, f"{node.row} is still parked"
            engine.allocator.freed.remove(node.slot)
            model.drop(node)
        if told.reason == Reason.ABORTED:
            assert not self._replies
            return
        for name in ("moved", "copied", "filled"):
            assert getattr(told, name) == sum(getattr(reply, name) for reply in self._replies), name
        assert told.steps_done == sum(not reply.reason for reply in self._replies)
        assert told.steps_done == len(announced.steps) or told.reason, "steps are left out without a reason"
        # The last token is computed in any case.
        prompt = req.origin_input_ids[:-1]
        own = len(model.match((req.extra_key, announced.own_salt), prompt))
        shared = len(model.match((req.extra_key, announced.shared_salt), prompt))
        assert (told.new_own, told.new_shared) == (own, shared)
        in_own = own > shared or (own == shared and (bool(own) or announced.has_namespace))
        assert req.cache_salt == (announced.own_salt if in_own else announced.shared_salt), (
            f"served from {req.cache_salt}: {own} are cached in its own namespace, {shared} in the shared one"
        )

    # --- its moves --------------------------------------------------------------------------------------------------

    def _move_class(self) -> type[move.Move]:
        admissions = self

        class CheckedMove(move.Move):
            def run(self, reply: CacheReply) -> None:
                admissions.carry_out(self, reply, super().run)

        return CheckedMove

    def carry_out(self, moving: move.Move, reply: CacheReply, run: Callable[[CacheReply], None]) -> None:
        """Make one move of an admission, and the same on the model."""
        engine = self._engine
        request = moving._rows.request
        engine.allocator.freed.clear()
        available = engine.allocator.available_size()
        room = self._room()
        self._replies.append(reply)
        base, new = moving._rows.base, moving._rows.new
        engine.has_failed = False
        try:
            run(reply)
        except BaseException as error:
            if not engine.has_failed:
                # It was not made to.
                engine.failure = engine.failure or error
            with engine.noted_failure():
                engine.mirror.move_failed(request, set(engine.allocator.freed))
            # As it is told in the end.
            reply.reason = Reason.INTERNAL_ERROR
            engine.allocator.freed.clear()
            raise
        with engine.noted_failure():
            engine.mirror.moved(request, base, new, reply, set(engine.allocator.freed), available, room=room)
            engine.allocator.freed.clear()
            for sibling in self.siblings:
                if getattr(sibling.req, compat._SIBLING) is not None and not sibling.placed:
                    self._take_place(sibling)

    def _room(self) -> tuple[int, int, int]:
        """Return how many requests, tokens to compute and slots the batch has room for."""
        adder, engine = self._adder, self._engine
        requests = engine.req_to_token.available_size() - len(
            [req for req in adder.can_run_list if req is not engine.scheduler.chunked_req]
        )
        budgets = [adder.rem_input_tokens, adder.rem_chunk_tokens]
        return requests, min(budget for budget in budgets if budget is not None), int(adder.rem_total_tokens)

    def _take_place(self, sibling: Running) -> None:
        """Take note of where a sibling writes its rows to, and that it holds them from now on."""
        engine, req = self._engine, sibling.req
        hold(sibling.held, -1)
        slots = engine.tree.path_device_indices(req.last_node).tolist()
        sibling.held = [engine.model.by_slot[slot] for slot in slots]
        hold(sibling.held, 1)
        # It reads what stands left of it there, which may be a copy.
        engine.check_served(sibling, sibling.held)
        num_held = sum(1 for node in engine.model.nodes() if node.num_holds)
        assert engine.tree.protected_size() == num_held, "R is not held until it is written, or more than that is"
        sibling.view = [row_of(node) for node in sibling.held[: req.prefix_len]]
        placed = getattr(req, compat._SIBLING).tolist()
        sibling.placed = sibling.held[req.prefix_len :][: len(placed)]
        assert [node.slot for node in sibling.placed] == placed, "R is placed where it is not keyed"
        assert len(placed) == len(req.origin_input_ids) - req.prefix_len
        self.num_spliced += 1

    # --- its slots --------------------------------------------------------------------------------------------------

    def _alloc_for_extend(self, original: Callable[[Any], Any], batch: Any) -> Any:
        """Have the batch's slots allocated as the plugin does, and check what was evicted for them."""
        engine = self._engine
        engine.allocator.freed.clear()
        available = engine.allocator.available_size()
        result = compat._write_to_placed_slots(original, batch)
        evicted = engine.model.drop_slots(set(engine.allocator.freed))
        assert bool(evicted) == (available < batch.extend_num_tokens)
        return result
