"""One edited turn in the tokenizer process: from a note to cached rows, asking the scheduler for each step.

The order is left to right, so that each R is prefilled as a prefix of the request itself: it never saw removed text,
and a refusal wastes nothing. Whatever goes wrong here costs a re-prefill and nothing else.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from leyline_agent.core.plan import SplicePlan, SpliceStep, make_plan
from leyline_agent.core.protocol import Directive, Note, Outcome, Purge, Reason, Status
from leyline_agent.core.token_ids import common_prefix
from leyline_agent.errors import PlanError
from leyline_sglang.config import Config
from leyline_sglang.edit_log import MAX_EDITS, carried_over, directive_outcome, fill_tokens, made_by, num_worth_showing
from leyline_sglang.gate import Gate
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply, CacheRequest, pack
from leyline_sglang.namespaces import own_salt
from leyline_sglang.note import check_explicit, directives_from_diff, first_in_answer
from leyline_sglang.prefill_cost import Cost, saved_by_moving
from leyline_sglang.sequences import Conversation, Edit, RememberedTurn, SequenceMemory

Result = TypeVar("Result")
Ask = Callable[[CacheRequest], Awaitable[CacheReply]]
Prefill = Callable[["array[int]", str | None], Awaitable[int]]
"""Prefill ids in a namespace (a `cache_salt`); returns how many were not cached before.

Raises `PlanError` where the prefill was refused or aborted.
"""

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="leyline")
"""Of our own, so that long diffs do not take the threads in which long notes are read."""
_AT_ONCE_BUDGET = 20_000
"""Of a diff that is made on the event loop, in 5 ms at most: a thread and back costs more where the loop is busy, since
its interpreter changes threads every 5 ms. What takes longer is begun anew in a thread."""
_AT_ONCE_DIRECTIVES = 256
_ONE_STEP_DIRECTIVES = 4
_ONE_STEP_TOKENS = 512
"""An edit of more is carried out before its request: each kept run takes a request slot of the one batch, and the R's
their part of its prefill budget."""


def salt_of(config: Config, conversation: Conversation) -> str:
    """Return the `cache_salt` of a conversation's own namespace, which is also its tag in the scheduler."""
    return own_salt(
        config.secret,
        conversation_hash=conversation.hashed_id,
        caller_salt=conversation.scope[1],
        nonce=conversation.nonce,
    )


@dataclass(frozen=True, slots=True)
class Announced:
    """What the scheduler does as it admits the request: carry out edits, or only choose its namespace."""

    request: AdmissionRequest
    settle: Callable[[AdmissionReply], Awaitable[Served]]
    """Say how the request was served, once that is known."""

    @property
    def edits(self) -> bool:
        """Whether it keeps other turns of the conversation waiting."""
        return bool(self.request.steps)


@dataclass(frozen=True, slots=True)
class Served:
    """How a request goes on: what was done, and the namespace it is served from."""

    outcome: Outcome
    cache_salt: str | None
    tag: str
    """Under which the scheduler takes note of what the request puts into the cache."""
    nonce: str
    edits: tuple[Edit, ...] = ()
    in_own: bool = False
    announced: Announced | None = None
    """If not None, all else here holds only for a request that ends before it is admitted."""


@dataclass(slots=True)
class Turn:
    """Carries out the edits of one turn. Hold `conversation.lock` around `carry_out` and `splice`.

    And until the scheduler says that they are done, where edits are only announced.
    """

    config: Config
    memory: SequenceMemory
    gate: Gate
    conversation: Conversation
    ask: Ask
    prefill: Prefill
    new_ids: array[int]
    vocab_size: int
    turn_id: str | None = None
    last_position: int | None = None
    """Rows from here on are left to the request: a server computes at least the last token of a prompt."""
    request_id: str | None = None
    """Of the request, if its edits may be carried out as it is admitted."""
    one_batch: dict[str, int] = field(default_factory=dict)
    """What a batch can hold at most (`compat.one_batch`)."""
    _first_in_answer: int | None = None
    """Index of the first directive that differs from the base in its answer; None where there is none."""
    _started: float = field(default_factory=time.perf_counter)
    _prefilled: int = 0
    _moved: int = 0
    _scheduler_ms: float = 0.0
    _purge: Purge | None = None
    _stages_ms: dict[str, float] = field(default_factory=dict)

    @property
    def own_salt(self) -> str:
        """The `cache_salt` of the conversation's own namespace."""
        return salt_of(self.config, self.conversation)

    async def carry_out(self, note: Note) -> Served:
        """Do what the note asks for and choose the namespace that the request is served from."""
        base = self.conversation.turns.get(note.base) if note.base is not None else None
        if note.forget or note.mode == "forget":
            return await self._forget(note, base)
        if note.base is None and note.mode == "amortize":
            return await self._serve(Status.UNCHANGED)
        if note.base is not None and base is None:
            message = f"turn {note.base!r} is not remembered here: it never came, is too old, or was flushed"
            if note.mode == "reprefill":
                # What the conversation's rows have in common with the unknown base is as unknown.
                return await self._reprefill(None, reason=Reason.UNKNOWN_BASE, message=message)
            return await self._serve(Status.REFUSED, reason=Reason.UNKNOWN_BASE, message=message)
        if note.base is not None:
            # Its retries and branches come back to it, so it is not the oldest any more.
            self.conversation.turns.move_to_end(note.base)
        if note.mode == "reprefill" or base is None:
            return await self._reprefill(base)
        try:
            base_ids, directives = await self._find_directives(note, base)
            self._count({"diff": (time.perf_counter() - self._started) * 1e3})
        except PlanError as error:
            _, edits = self._left_of_difference(base)
            return await self._serve(Status.REFUSED, reason=Reason(error.reason), message=str(error), edits=edits)
        # What is explicit was asked for.
        cut = note.template_changes == "reprefill" and note.directives is None
        first = self._first_in_answer if cut else None
        # The end of a base, which nothing is kept behind, is prefilled in any case.
        if first is not None and directives[first].end < len(base_ids):
            if not first:
                return await self._reprefill(base)
            directives = [*directives[:first], Directive(start=directives[first].start, end=len(base_ids))]
        # What is explicit was asked for, here too.
        gated = note.gate == "auto" and note.directives is None and self.config.gate
        return await self.splice(
            base_ids, directives, base_in_own=base.in_own, edits=base.edits, scrub=note.scrub, gated=gated
        )

    async def _reprefill(
        self, base: RememberedTurn | None, *, reason: Reason | None = None, message: str | None = None
    ) -> Served:
        """Serve nothing of the conversation's own rows right of the first difference from the base, whoever left them.

        What lies left of it saw nothing of the changed text.
        """
        kept_tokens, edits = self._left_of_difference(base) if base is not None else (0, ())
        look = None
        if self.conversation.has_namespace:
            look = await self.look()
            # On a tie too, where the own namespace would be preferred.
            if look.new_own > kept_tokens and look.new_own >= look.new_shared:
                await self._close_namespace(keep_tokens=kept_tokens)
                look = None
        # Decided by the same look: were the shared rows evicted meanwhile, another one would prefer the own.
        status = Status.REPREFILL if reason is None else Status.REFUSED
        return await self._serve(status, reason=reason, message=message, edits=edits, look=look)

    def _left_of_difference(self, base: RememberedTurn) -> tuple[int, tuple[Edit, ...]]:
        """Return how far the prompt is the base, and the base's edits as far as there, where positions are the same."""
        tokens = max(common_prefix(sequence, self.new_ids) for sequence in base.sequences())
        return tokens, tuple(edit for edit in base.edits if edit.position < tokens)

    async def splice(
        self,
        base_ids: array[int],
        directives: list[Directive],
        *,
        base_in_own: bool,
        edits: tuple[Edit, ...] = (),
        scrub: bool = False,
        gated: bool = False,
    ) -> Served:
        """Carry out checked directives whose application to `base_ids` gives a prefix of `new_ids`.

        `base_in_own` says in which namespace the base's rows are; `scrub` is for directives that forget. With `gated`
        nothing is done where prefilling again is cheaper.
        """
        planning = partial(make_plan, directives, base_tokens=len(base_ids))
        # Thousands take a while.
        plan = planning() if len(directives) <= _AT_ONCE_DIRECTIVES else await self._in_thread(planning)
        steps = self._steps(plan)
        left = tuple(edit for edit in edits if edit.position < plan.prefix_tokens)
        if not steps and plan.first_forget is None:
            return await self._serve(Status.UNCHANGED, edits=left)
        one_step = self._fits_one_step(plan, steps)
        if gated and plan.first_forget is None and (why_not := self._why_not(plan, steps, one_step)):
            return await self._serve(Status.REPREFILL, reason=Reason.GATED, message=why_not, edits=left)
        if one_step:
            return self._announce(base_ids, directives, plan, steps, base_in_own, edits)
        started = time.perf_counter()
        done, reason, message, look = await self._take_steps(base_ids, plan, steps, base_in_own)
        if steps and reason is None:
            self._observe_splice(steps, one_step=False, ms=(time.perf_counter() - started) * 1e3)
        if reason is None and len(plan.steps[: plan.first_forget]) > self.config.max_directives:
            reason = Reason.TOO_MANY_DIRECTIVES
            message = f"{len(directives)} directives, of which the first {self.config.max_directives} are carried out"
        kept = min(plan.prefix_tokens, max(look.base_shared, look.base_own)) if look and done else 0
        trim = None
        if plan.first_forget is not None:
            # Also after a refusal: what was to be forgotten must not be reached, whatever else failed.
            trim = plan.steps[plan.first_forget].replacement.start
            await self._close_namespace(keep_tokens=trim, forget=True, scrub=scrub)
            look = None
        return await self._spliced(directives, plan, steps, done, reason, message, edits, kept, look, trim)

    def _fits_one_step(self, plan: SplicePlan, steps: list[SpliceStep]) -> bool:
        """Whether all of an edit is done as the request is admitted, and its R's fit beside it into one batch."""
        all_of_them = plan.first_forget is None and len(plan.steps) <= self.config.max_directives
        if self.request_id is None or not all_of_them or len(steps) > _ONE_STEP_DIRECTIVES:
            return False
        fills = fill_tokens(plan, steps)
        fit = 1 + sum(map(bool, fills)) <= self.one_batch["requests"] and 2 * sum(fills) <= self.one_batch["tokens"]
        return fit and sum(fills) <= _ONE_STEP_TOKENS

    def _observe_splice(self, steps: list[SpliceStep], *, one_step: bool, ms: float) -> None:
        # Of a retry, whose rows stand there already, nothing is learnt.
        if self._moved:
            self.gate.observe(moved_tokens=self._num_moved(steps), one_step=one_step, ms=ms)

    def _num_moved(self, steps: list[SpliceStep]) -> int:
        """Return how many tokens steps move."""
        return sum(src_end - src_start for _, src_start, src_end, _ in map(self._positions, steps))

    def _why_not(self, plan: SplicePlan, steps: list[SpliceStep], one_step: bool) -> str | None:
        """Return why the edit is better not spliced; see `Gate.why_not`."""
        return self.gate.why_not(
            prompt_tokens=len(self.new_ids),
            kept_tokens=plan.prefix_tokens,
            moved_tokens=self._num_moved(steps),
            replacement_tokens=sum(fill_tokens(plan, steps)),
            one_step=one_step,
        )

    def _announce(
        self,
        base_ids: array[int],
        directives: list[Directive],
        plan: SplicePlan,
        steps: list[SpliceStep],
        base_in_own: bool,
        edits: tuple[Edit, ...],
    ) -> Served:
        """Leave the steps to the scheduler, for when it admits the request."""
        assert self.request_id is not None
        conversation = self.conversation
        had_namespace, conversation.has_namespace = conversation.has_namespace, True
        request = AdmissionRequest(
            request_id=self.request_id,
            prompt_tokens=len(self.new_ids),
            base=pack(base_ids),
            shared_salt=conversation.scope[1],
            own_salt=self.own_salt,
            has_namespace=had_namespace,
            from_own=base_in_own,
            num_fills=sum(1 for tokens in fill_tokens(plan, steps) if tokens),
            fill_tokens=sum(fill_tokens(plan, steps)),
            in_place=self.config.in_place,
            steps=[self._positions(step) for step in steps],
        )
        announced_ms = (time.perf_counter() - self._started) * 1e3

        async def settle(reply: AdmissionReply) -> Served:
            reason = Reason(reply.reason) if reply.reason else None
            if reason is not None:
                conversation.has_namespace = had_namespace or reply.new_own > 0
            self._moved, self._prefilled = reply.moved, reply.filled
            self._take_account(reply, announced_ms)
            if reason is None:
                self._observe_splice(steps, one_step=True, ms=reply.ms)
            done = reply.steps_done
            # All of it was cached, or the run right of it was not.
            kept = plan.prefix_tokens if done else 0
            message = reply.message or None
            return await self._spliced(directives, plan, steps, done, reason, message, edits, kept, reply)

        ended = "the request ended before its edits were carried out"
        outcome = Outcome(status=Status.REFUSED, reason=Reason.ABORTED, message=ended, turn=self.turn_id)
        # Some of them may have been: then a later `forget` finds them.
        possible = (
            *carried_over(edits, plan),
            *made_by([secrets.token_hex(6) for _ in directives], plan, self.turn_id),
        )
        return Served(
            outcome,
            self._salt(base_in_own),
            self.own_salt,
            conversation.nonce,
            possible[-MAX_EDITS:],
            base_in_own,
            Announced(request, settle),
        )

    async def _spliced(
        self,
        directives: list[Directive],
        plan: SplicePlan,
        steps: list[SpliceStep],
        done: int,
        reason: Reason | None,
        message: str | None,
        edits: tuple[Edit, ...],
        kept: int,
        look: CacheReply | None,
        trim: int | None = None,
    ) -> Served:
        """State the outcome of the first `done` steps; edits from `trim` on are forgotten."""
        num_shown = num_worth_showing(directives, steps, plan.first_forget)
        done_directives = steps[done - 1].directive_idx + 1 if done else 0
        carried = [secrets.token_hex(6) for _ in range(done_directives)]
        new_edits = (*carried_over(edits, plan), *made_by(carried, plan, self.turn_id))
        finished = reason is None
        status = Status.SPLICED if finished and done else Status.REPREFILL if finished else Status.REFUSED
        first = len(directives) if self._first_in_answer is None else self._first_in_answer
        left_of_answer = self._num_moved([step for step in steps[:done] if step.directive_idx < first])
        return await self._serve(
            Status.PARTIAL if done and not finished else status,
            reason=reason,
            message=message,
            directives=tuple(
                directive_outcome(directive, carried[idx] if idx < done_directives else None, idx >= first)
                for idx, directive in enumerate(directives[: min(num_shown, self.config.max_directives)])
            ),
            num_directives=num_shown,
            answer_directives=max(0, num_shown - first),
            answer_moved_tokens=max(0, self._moved - left_of_answer),
            kept_tokens=kept,
            edits=tuple(edit for edit in new_edits if trim is None or edit.position < trim),
            look=look,
        )

    async def _find_directives(self, note: Note, base: RememberedTurn) -> tuple[array[int], list[Directive]]:
        """Return base ids and directives, of the note or by a diff."""
        budget = self.config.diff_budget
        if note.directives is None and budget > _AT_ONCE_BUDGET:
            try:
                return self._directives(note, base, _AT_ONCE_BUDGET)
            except PlanError as error:
                if error.reason != Reason.DIFF_BUDGET:
                    raise
        return await self._in_thread(self._directives, note, base, budget)

    def _directives(self, note: Note, base: RememberedTurn, budget: int) -> tuple[array[int], list[Directive]]:
        sequences = base.sequences()
        if note.directives is None:
            base_ids, directives = directives_from_diff(sequences, self.new_ids, budget=budget)
        else:
            base_ids, directives = check_explicit(note, sequences, self.new_ids, vocab_size=self.vocab_size)
        self._first_in_answer = first_in_answer(base_ids, directives, answer_start=len(base.prompt_ids))
        return base_ids, directives

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run what takes milliseconds off the event loop; give up where the threads are taken for too long."""
        running = asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)
        try:
            return await asyncio.wait_for(running, self.config.timeout_s)
        except TimeoutError as error:
            message = f"the diff was not made within {self.config.timeout_s} s: too many others wait for theirs"
            raise PlanError(message, reason=Reason.TIMEOUT) from error

    @property
    def _limit(self) -> int:
        return len(self.new_ids) if self.last_position is None else self.last_position

    def _steps(self, plan: SplicePlan) -> list[SpliceStep]:
        """Return the steps that move rows: those left of the first `forget` with a run to keep."""
        steps = plan.steps[: plan.first_forget][: self.config.max_directives]
        return [step for step in steps if len(step.kept.dst) and step.kept.dst.start < self._limit]

    def _positions(self, step: SpliceStep) -> tuple[int, int, int, int]:
        """Return what the scheduler needs of a step: `removed_start`, `src_start`, `src_end` and `dst_start`."""
        src, dst_start = step.kept.src, step.kept.dst.start
        return step.removed.start, src.start, src.start + min(len(src), self._limit - dst_start), dst_start

    def _count(self, stages_ms: dict[str, float]) -> None:
        for name, ms in stages_ms.items():
            self._stages_ms[name] = self._stages_ms.get(name, 0.0) + ms

    async def _take_steps(
        self, base_ids: array[int], plan: SplicePlan, steps: list[SpliceStep], base_in_own: bool
    ) -> tuple[int, Reason | None, str | None, CacheReply | None]:
        """Take steps from the left until one is refused; return how many were taken, why not the rest, what is cached.

        R goes to where the base is, as a prefix of the base stands left of it; the next one to the conversation's
        namespace, where the step before it has put everything by then.
        """
        look: CacheReply | None = None
        first_new = 0
        for idx, step in enumerate(steps):
            head_salt = self._salt(base_in_own or idx > 0)
            head_tokens = step.kept.dst.start
            # Directives without a run between them are one as far as rows go: their R's stand in a row.
            replacements = [other.replacement for other in plan.steps[first_new : step.directive_idx + 1]]
            first_new = step.directive_idx + 1
            if any(map(len, replacements)):
                started = time.perf_counter()
                try:
                    self._prefilled += await self.prefill(self.new_ids[:head_tokens], head_salt)
                except PlanError as error:
                    return idx, Reason(error.reason), str(error), await self._give_up(base_ids, look)
                finally:
                    self._count({"prefill": (time.perf_counter() - started) * 1e3})
            request = self._request(base_ids, own=True)
            request.move, request.in_place = True, self.config.in_place
            request.from_own, request.head_from_own = base_in_own, base_in_own or idx > 0
            request.removed_start, request.src_start, request.src_end, request.dst_start = self._positions(step)
            request.more_follow = idx + 1 < len(steps)
            request.parked_from = look.parked_from if look else None
            # Set before, as there may be rows under the namespace whatever becomes of the answer.
            had_namespace, self.conversation.has_namespace = self.conversation.has_namespace, True
            before, look = look, await self._ask(request)
            if look.reason:
                self.conversation.has_namespace = had_namespace or look.new_own > 0
                return idx, Reason(look.reason), look.message, await self._give_up(base_ids, before) or look
            self._moved += look.moved
        return len(steps), None, None, look

    async def _give_up(self, base_ids: array[int], look: CacheReply | None) -> CacheReply | None:
        """Drop what the last step left parked for the next one; return what is cached now."""
        if look is None or look.parked_from is None:
            return look
        request = self._request(base_ids, own=True)
        request.drop_parked = True
        return await self._ask(request)

    def _salt(self, own: bool) -> str | None:
        return self.own_salt if own else self.conversation.scope[1]

    async def _forget(self, note: Note, base: RememberedTurn | None) -> Served:
        """Serve the request from rows that nothing forgotten has touched, and drop all others of this conversation.

        Kept is what lies left of the first difference from the base and of every forgotten edit. An edit that the
        base's log does not know may have been anywhere, as may those that "all" stands for beside the base's own, so
        nothing of the namespace is kept then.
        """
        keep_tokens = 0
        edits: tuple[Edit, ...] = ()
        if base is not None and note.forget != "all":
            positions = {edit.edit_id: edit.position for edit in base.edits}
            if all(edit_id in positions for edit_id in note.forget):
                first_difference = max(common_prefix(s, self.new_ids) for s in base.sequences())
                keep_tokens = min([first_difference, *(positions[edit_id] for edit_id in note.forget)])
                edits = tuple(edit for edit in base.edits if edit.position < keep_tokens)
        await self._close_namespace(keep_tokens=keep_tokens, forget=True, scrub=note.scrub)
        return await self._serve(Status.REPREFILL, edits=edits)

    async def _close_namespace(self, *, keep_tokens: int, forget: bool = False, scrub: bool = False) -> None:
        """Leave the conversation's namespace for a new one that holds the first `keep_tokens` of the prompt.

        Nobody can name the old one any more, and its rows are dropped. With `forget`, so are those that this
        conversation has in the shared namespace, right of where they differ from the prompt.
        """
        had_namespace = self.conversation.has_namespace
        self.conversation.closing.append(self.own_salt)
        self.memory.close_namespace(self.conversation)
        request = self._request(array("i"), own=True)
        request.close = tuple(self.conversation.closing)
        request.keep_tokens = keep_tokens if had_namespace else 0
        request.forget, request.scrub = forget, scrub
        closed = await self._ask(request)
        if closed.reason:
            # What could not be dropped now is with the next close; nobody is served from it meanwhile.
            raise PlanError(closed.message, reason=Reason(closed.reason))
        self.conversation.closing.clear()
        self.conversation.has_namespace = closed.new_own > 0
        if forget:
            self._purge = Purge(
                dropped_tokens=closed.dropped,
                held_tokens=closed.held,
                shared_tokens=closed.shared,
                scrubbed_tokens=closed.scrubbed,
            )

    async def look(self, base_ids: array[int] | None = None) -> CacheReply:
        """Return how much is cached of the base and of the new ids, in both namespaces."""
        return await self._ask(self._request(base_ids or array("i"), own=self.conversation.has_namespace))

    async def _ask(self, request: CacheRequest) -> CacheReply:
        started = time.perf_counter()
        reply = await self.ask(request)
        self._scheduler_ms += reply.ms
        self._learn(reply)
        self._count({"wait": (time.perf_counter() - started) * 1e3 - reply.ms, **reply.stages_ms})
        return reply

    def _learn(self, reply: CacheReply) -> None:
        if reply.prefill_cost is not None:
            self.gate.prefill_cost = Cost(*reply.prefill_cost)

    def _request(self, base_ids: array[int], *, own: bool) -> CacheRequest:
        extra_key, caller_salt = self.conversation.scope
        return CacheRequest(
            base=pack(base_ids),
            new=pack(self.new_ids),
            extra_key=extra_key,
            shared_salt=caller_salt,
            own_salt=self.own_salt if own else None,
        )

    async def _serve(
        self,
        status: Status,
        *,
        reason: Reason | None = None,
        message: str | None = None,
        edits: tuple[Edit, ...] = (),
        look: CacheReply | None = None,
        **facts: Any,
    ) -> Served:
        """Choose the namespace with the longer match, the conversation's on a tie, and state the outcome.

        `edits` are the turn's log; `look` is what is cached now, where the caller knows it; `facts` are more of the
        outcome's.
        """

        def state(look: CacheReply | None) -> Served:
            return self._state(status, look, edits=edits, reason=reason, message=message, **facts)

        if look is None and self.conversation.has_namespace:
            if self.request_id is not None:
                return self._announce_choice(state)
            look = await self.look()
        return state(look)

    def _announce_choice(self, state: Callable[[CacheReply | None], Served]) -> Served:
        """Leave the choice of the namespace to the scheduler: asked for it now, it answers after its next batch."""
        assert self.request_id is not None
        shared_salt = self.conversation.scope[1]
        request = AdmissionRequest(
            request_id=self.request_id,
            prompt_tokens=len(self.new_ids),
            shared_salt=shared_salt,
            own_salt=self.own_salt,
            has_namespace=True,
        )
        announced_ms = (time.perf_counter() - self._started) * 1e3
        # Until the scheduler says otherwise, and if it never does.
        own = replace(state(None), cache_salt=self.own_salt, in_own=True)

        async def settle(reply: AdmissionReply) -> Served:
            self._take_account(reply, announced_ms)
            # Of the namespace that was announced: another turn may have left it meanwhile for a new one.
            in_own = bool(reply.reason) or reply.new_own >= reply.new_shared
            outcome = state(reply).outcome
            return replace(own, outcome=outcome, cache_salt=own.cache_salt if in_own else shared_salt, in_own=in_own)

        return replace(own, announced=Announced(request, settle))

    def _take_account(self, reply: AdmissionReply, announced_ms: float) -> None:
        self._scheduler_ms += reply.ms
        self._learn(reply)
        # What passed since then is the request's own: it waited, and was computed.
        self._started = time.perf_counter() - (announced_ms + reply.ms) / 1e3
        self._count(reply.stages_ms)

    def _state(
        self,
        status: Status,
        look: CacheReply | None,
        *,
        edits: tuple[Edit, ...],
        kept_tokens: int = 0,
        **facts: Any,
    ) -> Served:
        """State what was done, and from where the request is served by what is cached (`look`)."""
        in_own = look is not None and self.conversation.has_namespace and look.new_own >= look.new_shared
        ms = (time.perf_counter() - self._started) * 1e3
        saved_ms = saved_by_moving(
            self.gate.prefill_cost,
            prompt_tokens=len(self.new_ids),
            kept_tokens=kept_tokens,
            moved_tokens=self._moved,
            # In one step R is in the request's own batch.
            prefilled_tokens=self._prefilled if "prefill" in self._stages_ms else 0,
            ms=ms,
        )
        outcome = Outcome(
            status=status,
            turn=self.turn_id,
            kept_tokens=kept_tokens,
            moved_tokens=self._moved,
            prefilled_tokens=self._prefilled,
            saved_ms=saved_ms,
            purge=self._purge,
            ms=round(ms, 3),
            scheduler_ms=round(self._scheduler_ms, 3),
            stages_ms={name: round(ms, 3) for name, ms in self._stages_ms.items()},
            **facts,
        )
        return Served(outcome, self._salt(in_own), self.own_salt, self.conversation.nonce, edits[-MAX_EDITS:], in_own)
