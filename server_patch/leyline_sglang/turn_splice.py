"""The edits of one turn, carried out: in the batch of the request itself, or in steps before it.

The order is left to right, so that each R is prefilled as a prefix of the request itself: it never saw removed text,
and a refusal wastes nothing. Whatever goes wrong here costs a re-prefill and nothing else. The other half of each way
is in the scheduler: `one_step.py`, or `splice.py` and `move.py`.
"""

from __future__ import annotations

import secrets
import time
from array import array
from dataclasses import dataclass, field

from leyline_agent.core.plan import SplicePlan, SpliceStep
from leyline_agent.core.protocol import Directive, Outcome, Reason, Status
from leyline_agent.errors import PlanError
from leyline_sglang.edit_log import MAX_EDITS, carried_over, directive_outcome, fill_tokens, made_by, num_worth_showing
from leyline_sglang.find_directives import plan_directives
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply, pack
from leyline_sglang.sequences import Edit
from leyline_sglang.turn import Announced, Served, Turn

_ONE_STEP_DIRECTIVES = 4
_ONE_STEP_TOKENS = 512
"""An edit of more is carried out before its request: each kept run takes a request slot of the one batch, and the R's
their part of its prefill budget."""


async def splice(
    turn: Turn,
    base_ids: array[int],
    directives: list[Directive],
    *,
    base_in_own: bool,
    edits: tuple[Edit, ...] = (),
    first_in_answer: int | None = None,
    scrub: bool = False,
    gated: bool = False,
) -> Served:
    """Carry out checked directives whose application to `base_ids` gives a prefix of the turn's prompt.

    `base_in_own` says in which namespace the base's rows are, `edits` which act on them, `first_in_answer` which
    directive is the first to differ from the base in its answer; `scrub` is for directives that forget. With `gated`
    nothing is done where prefilling again is cheaper. Hold `turn.conversation.lock`.
    """
    plan = await plan_directives(turn, directives, base_tokens=len(base_ids))
    work = _Splice(turn, base_ids, base_in_own, directives, edits, first_in_answer, plan)
    left = tuple(edit for edit in edits if edit.position < plan.prefix_tokens)
    if not work.steps and plan.first_forget is None:
        return await turn.serve(Status.UNCHANGED, edits=left)
    one_step = work.fits_one_step()
    if gated and plan.first_forget is None and (why_not := work.why_not(one_step)):
        return await turn.serve(Status.REPREFILL, reason=Reason.GATED, message=why_not, edits=left)
    return work.announce() if one_step else await work.carry_out(scrub=scrub)


@dataclass(slots=True)
class _Splice:
    """Planned edits of a turn."""

    turn: Turn
    base_ids: array[int]
    base_in_own: bool
    directives: list[Directive]
    edits: tuple[Edit, ...]
    first_in_answer: int | None
    plan: SplicePlan
    steps: list[SpliceStep] = field(init=False)
    """Those that move rows: left of the first `forget`, with a run to keep."""

    def __post_init__(self) -> None:
        steps = self.plan.steps[: self.plan.first_forget][: self.turn.config.max_directives]
        self.steps = [step for step in steps if len(step.kept.dst) and step.kept.dst.start < self.turn.limit]

    def _positions(self, step: SpliceStep) -> tuple[int, int, int, int]:
        """Return what the scheduler needs of a step: `removed_start`, `src_start`, `src_end` and `dst_start`."""
        src, dst_start = step.kept.src, step.kept.dst.start
        return step.removed.start, src.start, src.start + min(len(src), self.turn.limit - dst_start), dst_start

    def _num_moved(self, steps: list[SpliceStep]) -> int:
        """Return how many tokens steps move."""
        return sum(src_end - src_start for _, src_start, src_end, _ in map(self._positions, steps))

    # --- in one step or two, or not at all --------------------------------------------------------------------------

    def fits_one_step(self) -> bool:
        """Whether all of an edit is done as the request is admitted, and its R's fit beside it into one batch."""
        turn, plan = self.turn, self.plan
        all_of_them = plan.first_forget is None and len(plan.steps) <= turn.config.max_directives
        if turn.request_id is None or not all_of_them or len(self.steps) > _ONE_STEP_DIRECTIVES:
            return False
        fills = fill_tokens(plan, self.steps)
        fit = 1 + sum(map(bool, fills)) <= turn.one_batch["requests"] and 2 * sum(fills) <= turn.one_batch["tokens"]
        return fit and sum(fills) <= _ONE_STEP_TOKENS

    def why_not(self, one_step: bool) -> str | None:
        """Return why the edit is better not spliced; see `Gate.why_not`."""
        return self.turn.gate.why_not(
            prompt_tokens=len(self.turn.new_ids),
            kept_tokens=self.plan.prefix_tokens,
            moved_tokens=self._num_moved(self.steps),
            replacement_tokens=sum(fill_tokens(self.plan, self.steps)),
            one_step=one_step,
        )

    def _observe(self, *, one_step: bool, ms: float) -> None:
        """Have the gate learn what it took."""
        # Of a retry, whose rows stand there already, nothing is learnt.
        if self.turn.moved:
            self.turn.gate.observe(moved_tokens=self._num_moved(self.steps), one_step=one_step, ms=ms)

    # --- in one step ------------------------------------------------------------------------------------------------

    def announce(self) -> Served:
        """Leave the steps to the scheduler, for when it admits the request."""
        turn, plan, conversation = self.turn, self.plan, self.turn.conversation
        assert turn.request_id is not None
        had_namespace, conversation.has_namespace = conversation.has_namespace, True
        fills = fill_tokens(plan, self.steps)
        request = AdmissionRequest(
            request_id=turn.request_id,
            prompt_tokens=len(turn.new_ids),
            base=pack(self.base_ids),
            shared_salt=conversation.scope[1],
            own_salt=turn.own_salt,
            has_namespace=had_namespace,
            from_own=self.base_in_own,
            num_fills=sum(map(bool, fills)),
            fill_tokens=sum(fills),
            in_place=turn.config.in_place,
            steps=[self._positions(step) for step in self.steps],
        )
        announced_ms = turn.elapsed_ms()

        async def settle(reply: AdmissionReply) -> Served:
            reason = Reason(reply.reason) if reply.reason else None
            if reason is not None:
                conversation.has_namespace = had_namespace or reply.new_own > 0
            turn.moved, turn.prefilled = reply.moved, reply.filled
            turn.take_account(reply, announced_ms)
            if reason is None:
                self._observe(one_step=True, ms=reply.ms)
            # All of it was cached, or the run right of it was not.
            kept = plan.prefix_tokens if reply.steps_done else 0
            return await self._spliced(reply.steps_done, reason, reply.message or None, kept, reply)

        ended = "the request ended before its edits were carried out"
        outcome = Outcome(status=Status.REFUSED, reason=Reason.ABORTED, message=ended, turn=turn.turn_id)
        # Some of them may have been: then a later `forget` finds them.
        possible = self._log([secrets.token_hex(6) for _ in self.directives])
        return Served(
            outcome,
            turn.salt(self.base_in_own),
            turn.own_salt,
            conversation.nonce,
            possible[-MAX_EDITS:],
            self.base_in_own,
            Announced(request, settle),
        )

    # --- in two steps -----------------------------------------------------------------------------------------------

    async def carry_out(self, *, scrub: bool) -> Served:
        """Take the steps, and close the namespace where a directive forgets."""
        turn, plan = self.turn, self.plan
        started = time.perf_counter()
        done, reason, message, look = await self._take_steps()
        if self.steps and reason is None:
            self._observe(one_step=False, ms=(time.perf_counter() - started) * 1e3)
        most = turn.config.max_directives
        if reason is None and len(plan.steps[: plan.first_forget]) > most:
            reason = Reason.TOO_MANY_DIRECTIVES
            message = f"{len(self.directives)} directives, of which the first {most} are carried out"
        kept = min(plan.prefix_tokens, max(look.base_shared, look.base_own)) if look and done else 0
        trim = None
        if plan.first_forget is not None:
            # Also after a refusal: what was to be forgotten must not be reached, whatever else failed.
            trim = plan.steps[plan.first_forget].replacement.start
            await turn.close_namespace(keep_tokens=trim, forget=True, scrub=scrub)
            look = None
        return await self._spliced(done, reason, message, kept, look, trim)

    async def _take_steps(self) -> tuple[int, Reason | None, str | None, CacheReply | None]:
        """Take steps from the left until one is refused; return how many were taken, why not the rest, what is cached.

        R goes to where the base is, as a prefix of the base stands left of it; the next one to the conversation's
        namespace, where the step before it has put everything by then.
        """
        turn, conversation = self.turn, self.turn.conversation
        look: CacheReply | None = None
        first_new = 0
        for idx, step in enumerate(self.steps):
            head_in_own = self.base_in_own or idx > 0
            # Directives without a run between them are one as far as rows go: their R's stand in a row.
            replacements = [other.replacement for other in self.plan.steps[first_new : step.directive_idx + 1]]
            first_new = step.directive_idx + 1
            if any(map(len, replacements)):
                started = time.perf_counter()
                try:
                    head_ids = turn.new_ids[: step.kept.dst.start]
                    turn.prefilled += await turn.prefill(head_ids, turn.salt(head_in_own))
                except PlanError as error:
                    return idx, Reason(error.reason), str(error), await self._give_up(look)
                finally:
                    turn.count({"prefill": (time.perf_counter() - started) * 1e3})
            request = turn.request(self.base_ids, own=True)
            request.move, request.in_place = True, turn.config.in_place
            request.from_own, request.head_from_own = self.base_in_own, head_in_own
            request.removed_start, request.src_start, request.src_end, request.dst_start = self._positions(step)
            request.more_follow = idx + 1 < len(self.steps)
            request.parked_from = look.parked_from if look else None
            # Set before, as there may be rows under the namespace whatever becomes of the answer.
            had_namespace, conversation.has_namespace = conversation.has_namespace, True
            before, look = look, await turn.ask(request)
            if look.reason:
                conversation.has_namespace = had_namespace or look.new_own > 0
                return idx, Reason(look.reason), look.message, await self._give_up(before) or look
            turn.moved += look.moved
        return len(self.steps), None, None, look

    async def _give_up(self, look: CacheReply | None) -> CacheReply | None:
        """Drop what the last step left parked for the next one; return what is cached now."""
        if look is None or look.parked_from is None:
            return look
        request = self.turn.request(self.base_ids, own=True)
        request.drop_parked = True
        return await self.turn.ask(request)

    # --- what became of it ------------------------------------------------------------------------------------------

    async def _spliced(
        self,
        done: int,
        reason: Reason | None,
        message: str | None,
        kept: int,
        look: CacheReply | None,
        trim: int | None = None,
    ) -> Served:
        """State the outcome of the first `done` steps; edits from `trim` on are forgotten."""
        turn, steps = self.turn, self.steps
        num_shown = num_worth_showing(self.directives, steps, self.plan.first_forget)
        done_directives = steps[done - 1].directive_idx + 1 if done else 0
        carried = [secrets.token_hex(6) for _ in range(done_directives)]
        finished = reason is None
        status = Status.SPLICED if finished and done else Status.REPREFILL if finished else Status.REFUSED
        first = len(self.directives) if self.first_in_answer is None else self.first_in_answer
        left_of_answer = self._num_moved([step for step in steps[:done] if step.directive_idx < first])
        return await turn.serve(
            Status.PARTIAL if done and not finished else status,
            reason=reason,
            message=message,
            directives=tuple(
                directive_outcome(directive, carried[idx] if idx < done_directives else None, idx >= first)
                for idx, directive in enumerate(self.directives[: min(num_shown, turn.config.max_directives)])
            ),
            num_directives=num_shown,
            answer_directives=max(0, num_shown - first),
            answer_moved_tokens=max(0, turn.moved - left_of_answer),
            kept_tokens=kept,
            edits=tuple(edit for edit in self._log(carried) if trim is None or edit.position < trim),
            look=look,
        )

    def _log(self, edit_ids: list[str]) -> tuple[Edit, ...]:
        """Return what acts on the turn's rows once the first directives were carried out, one for each id."""
        return (*carried_over(self.edits, self.plan), *made_by(edit_ids, self.plan, self.turn.turn_id))
