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
from dataclasses import dataclass, field

from leyline_agent.core.plan import SplicePlan, SpliceStep, make_plan
from leyline_agent.core.protocol import Directive, DirectiveOutcome, Note, Outcome, Reason, Status
from leyline_agent.errors import PlanError
from leyline_sglang.config import Config
from leyline_sglang.io_types import CacheReply, CacheRequest, pack
from leyline_sglang.namespaces import own_salt
from leyline_sglang.note import check_explicit, directives_from_diff
from leyline_sglang.sequences import Conversation, Edit, RememberedTurn, SequenceMemory

Ask = Callable[[CacheRequest], Awaitable[CacheReply]]
Prefill = Callable[["array[int]", str | None], Awaitable[int]]
"""Prefill ids in a namespace (a `cache_salt`); returns how many were not cached before.

Raises `PlanError` where the prefill was refused or aborted.
"""

_MAX_EDITS = 1024
"""Remembered of one turn. A `forget` of an older one gives up the whole namespace, as for any id that is in no log."""


@dataclass(frozen=True, slots=True)
class Served:
    """How a request goes on: what was done, and the namespace it is served from."""

    outcome: Outcome
    cache_salt: str | None
    nonce: str
    edits: tuple[Edit, ...] = ()
    in_own: bool = False


@dataclass(slots=True)
class Turn:
    """Carries out the edits of one turn. Hold `conversation.lock` around `carry_out` and `splice`."""

    config: Config
    memory: SequenceMemory
    conversation: Conversation
    ask: Ask
    prefill: Prefill
    new_ids: array[int]
    vocab_size: int
    turn_id: str | None = None
    last_position: int | None = None
    """Rows from here on are left to the request: a server computes at least the last token of a prompt."""
    _started: float = field(default_factory=time.perf_counter)
    _prefilled: int = 0
    _moved: int = 0

    @property
    def own_salt(self) -> str:
        """The `cache_salt` of the conversation's own namespace."""
        return own_salt(
            self.config.secret,
            conversation_hash=self.conversation.hashed_id,
            caller_salt=self.conversation.scope[1],
            nonce=self.conversation.nonce,
        )

    async def carry_out(self, note: Note) -> Served:
        """Do what the note asks for and choose the namespace that the request is served from."""
        base = self.conversation.turns.get(note.base) if note.base is not None else None
        if note.forget:
            return await self._forget(note, base)
        if note.base is None and note.mode == "amortize":
            return await self._serve(Status.UNCHANGED)
        if note.base is not None and base is None:
            return await self._serve(
                Status.REFUSED,
                reason=Reason.UNKNOWN_BASE,
                message=f"turn {note.base!r} is not remembered here: it never came, is too old, or was flushed",
            )
        if note.base is not None:
            # Its retries and branches come back to it, so it is not the oldest any more.
            self.conversation.turns.move_to_end(note.base)
        if note.mode == "reprefill" or base is None:
            return await self._reprefill(base)
        try:
            base_ids, directives = await asyncio.to_thread(self._directives, note, base)
        except PlanError as error:
            _, edits = self._left_of_difference(base)
            return await self._serve(Status.REFUSED, reason=Reason(error.reason), message=str(error), edits=edits)
        return await self.splice(base_ids, directives, base_in_own=base.in_own, edits=base.edits)

    async def _reprefill(self, base: RememberedTurn | None) -> Served:
        """Serve nothing of the conversation's own rows right of the first difference from the base, whoever left them.

        What lies left of it saw nothing of the changed text.
        """
        kept_tokens, edits = self._left_of_difference(base) if base is not None else (0, ())
        if self.conversation.has_namespace:
            look = await self.look()
            if look.new_own > max(kept_tokens, look.new_shared):
                await self._close_namespace(keep_tokens=kept_tokens)
        return await self._serve(Status.REPREFILL, edits=edits)

    def _left_of_difference(self, base: RememberedTurn) -> tuple[int, tuple[Edit, ...]]:
        """Return how far the prompt is the base, and the base's edits as far as there, where positions are the same."""
        tokens = max(_common_prefix(sequence, self.new_ids) for sequence in base.sequences())
        return tokens, tuple(edit for edit in base.edits if edit.position < tokens)

    async def splice(
        self,
        base_ids: array[int],
        directives: list[Directive],
        *,
        base_in_own: bool,
        edits: tuple[Edit, ...] = (),
    ) -> Served:
        """Carry out checked directives whose application to `base_ids` gives a prefix of `new_ids`.

        `base_in_own` says in which namespace the base's rows are.
        """
        plan = make_plan(directives, base_tokens=len(base_ids))
        steps = self._steps(plan)
        shown = _shown(directives, steps, plan.first_forget)
        if not steps and plan.first_forget is None:
            left = tuple(edit for edit in edits if edit.position < plan.prefix_tokens)
            return await self._serve(Status.UNCHANGED, edits=left)
        done, reason, message, look = await self._take_steps(base_ids, plan, steps, base_in_own)
        if reason is None and len(plan.steps[: plan.first_forget]) > self.config.max_directives:
            reason = Reason.TOO_MANY_DIRECTIVES
            message = f"{len(directives)} directives, of which the first {self.config.max_directives} are carried out"
        done_directives = steps[done - 1].directive_idx + 1 if done else 0
        carried = [secrets.token_hex(6) for _ in range(done_directives)]
        new_edits = (*_carry_over(edits, plan), *_made(carried, plan))
        kept = min(plan.prefix_tokens, max(look.base_shared, look.base_own)) if look and done else 0
        if plan.first_forget is not None:
            # Also after a refusal: what was to be forgotten must not be reached, whatever else failed.
            trim = plan.steps[plan.first_forget].replacement.start
            await self._close_namespace(keep_tokens=trim)
            new_edits = tuple(edit for edit in new_edits if edit.position < trim)
            look = None
        finished = reason is None
        status = Status.SPLICED if finished and done else Status.REPREFILL if finished else Status.REFUSED
        return await self._serve(
            Status.PARTIAL if done and not finished else status,
            reason=reason,
            message=message,
            directives=tuple(
                outcome.model_copy(update={"edit_id": carried[idx]}) if idx < done_directives else outcome
                for idx, outcome in enumerate(shown)
            ),
            num_directives=len(shown),
            kept_tokens=kept,
            edits=new_edits,
            look=look,
        )

    def _directives(self, note: Note, base: RememberedTurn) -> tuple[array[int], list[Directive]]:
        """Return base ids and directives. Runs in a thread: the diff of a long prompt takes milliseconds."""
        sequences = base.sequences()
        if note.directives is None:
            return directives_from_diff(sequences, self.new_ids, budget=self.config.diff_budget)
        return check_explicit(note, sequences, self.new_ids, vocab_size=self.vocab_size)

    def _steps(self, plan: SplicePlan) -> list[SpliceStep]:
        """Return the steps that move rows: those left of the first `forget` with a run to keep."""
        limit = len(self.new_ids) if self.last_position is None else self.last_position
        steps = plan.steps[: plan.first_forget][: self.config.max_directives]
        return [step for step in steps if len(step.kept.dst) and step.kept.dst.start < limit]

    async def _take_steps(
        self, base_ids: array[int], plan: SplicePlan, steps: list[SpliceStep], base_in_own: bool
    ) -> tuple[int, Reason | None, str | None, CacheReply | None]:
        """Take steps from the left until one is refused; return how many were taken, why not the rest, what is cached.

        R goes to where the base is, as a prefix of the base stands left of it; the next one to the conversation's
        namespace, where the step before it has put everything by then.
        """
        limit = len(self.new_ids) if self.last_position is None else self.last_position
        look: CacheReply | None = None
        first_new = 0
        for idx, step in enumerate(steps):
            head_salt = self._salt(base_in_own or idx > 0)
            head_tokens = step.kept.dst.start
            # Directives without a run between them are one as far as rows go: their R's stand in a row.
            replacements = [other.replacement for other in plan.steps[first_new : step.directive_idx + 1]]
            first_new = step.directive_idx + 1
            if any(map(len, replacements)):
                try:
                    self._prefilled += await self.prefill(self.new_ids[:head_tokens], head_salt)
                except PlanError as error:
                    return idx, Reason(error.reason), str(error), look
            look = await self.ask(
                self._request(
                    base_ids,
                    move=True,
                    base_salt=self._salt(base_in_own),
                    head_salt=head_salt,
                    src_start=step.kept.src.start,
                    src_end=step.kept.src.start + min(len(step.kept.src), limit - head_tokens),
                    dst_start=head_tokens,
                )
            )
            if look.reason:
                return idx, Reason(look.reason), look.message, look
            self.conversation.has_namespace = True
            self._moved += look.moved
        return len(steps), None, None, look

    def _salt(self, own: bool) -> str | None:
        return self.own_salt if own else self.conversation.scope[1]

    async def _forget(self, note: Note, base: RememberedTurn | None) -> Served:
        """Serve the request from rows that no forgotten edit has touched: those left of the leftmost of them.

        An edit that the base's log does not know may have been anywhere, as may those that "all" stands for beside the
        base's own, so nothing of the namespace is kept then.
        """
        keep_tokens = 0
        edits: tuple[Edit, ...] = ()
        if base is not None and note.forget != "all":
            positions = {edit.edit_id: edit.position for edit in base.edits}
            if all(edit_id in positions for edit_id in note.forget):
                first_difference = max(_common_prefix(s, self.new_ids) for s in base.sequences())
                keep_tokens = min([first_difference, *(positions[edit_id] for edit_id in note.forget)])
                edits = tuple(edit for edit in base.edits if edit.position < keep_tokens)
        await self._close_namespace(keep_tokens=keep_tokens)
        return await self._serve(Status.REPREFILL, edits=edits)

    async def _close_namespace(self, *, keep_tokens: int) -> None:
        """Leave the conversation's namespace for a new one that holds the first `keep_tokens` of the prompt.

        Nobody can name the old one any more; its rows age out. Rows of the shared namespace are clean anyway.
        """
        had_namespace, closed_salt = self.conversation.has_namespace, self.own_salt
        self.memory.close_namespace(self.conversation)
        if not had_namespace or not keep_tokens:
            return
        kept = await self.ask(
            CacheRequest(
                base=pack(self.new_ids[:keep_tokens]),
                new=pack(self.new_ids[:keep_tokens]),
                extra_key=self.conversation.scope[0],
                shared_salt=self.conversation.scope[1],
                own_salt=self.own_salt,
                move=True,
                base_salt=closed_salt,
                src_end=keep_tokens,
            )
        )
        self.conversation.has_namespace = kept.new_own > 0

    async def look(self, base_ids: array[int] | None = None) -> CacheReply:
        """Return how much is cached of the base and of the new ids, in both namespaces."""
        return await self.ask(self._request(base_ids or array("i")))

    def _request(
        self,
        base_ids: array[int],
        *,
        move: bool = False,
        base_salt: str | None = None,
        head_salt: str | None = None,
        src_start: int = 0,
        src_end: int = 0,
        dst_start: int = 0,
    ) -> CacheRequest:
        extra_key, caller_salt = self.conversation.scope
        return CacheRequest(
            base=pack(base_ids),
            new=pack(self.new_ids),
            extra_key=extra_key,
            shared_salt=caller_salt,
            own_salt=self.own_salt if move or self.conversation.has_namespace else None,
            move=move,
            base_salt=base_salt,
            head_salt=head_salt,
            src_start=src_start,
            src_end=src_end,
            dst_start=dst_start,
        )

    async def _serve(
        self,
        status: Status,
        *,
        reason: Reason | None = None,
        message: str | None = None,
        directives: tuple[DirectiveOutcome, ...] = (),
        num_directives: int = 0,
        kept_tokens: int = 0,
        edits: tuple[Edit, ...] = (),
        look: CacheReply | None = None,
    ) -> Served:
        """Choose the namespace with the longer match, the conversation's on a tie, and state the outcome.

        `edits` are the turn's log; `look` is what is cached now, where the caller knows it.
        """
        in_own = self.conversation.has_namespace
        if in_own:
            look = look or await self.look()
            in_own = look.new_own >= look.new_shared
        outcome = Outcome(
            status=status,
            reason=reason,
            message=message,
            turn=self.turn_id,
            directives=directives,
            num_directives=num_directives,
            kept_tokens=kept_tokens,
            moved_tokens=self._moved,
            prefilled_tokens=self._prefilled,
            ms=round((time.perf_counter() - self._started) * 1e3, 3),
        )
        return Served(outcome, self._salt(in_own), self.conversation.nonce, edits[-_MAX_EDITS:], in_own)


def _shown(directives: list[Directive], steps: list[SpliceStep], first_forget: int | None) -> list[DirectiveOutcome]:
    """Return the directives worth showing: those right of the last kept run only cut off the base's end."""
    count = steps[-1].directive_idx + 1 if steps else 0
    if first_forget is not None:
        count = len(directives)
    return [
        DirectiveOutcome(start=d.start, end=d.end, replacement_tokens=len(d.replacement_ids), mode=d.mode)
        for d in directives[:count]
    ]


def _carry_over(edits: tuple[Edit, ...], plan: SplicePlan) -> list[Edit]:
    """Return earlier edits at their positions in the new prompt; inside a removed span, at its left end."""
    return [Edit(edit.edit_id, _new_position(edit.position, plan)) for edit in edits]


def _new_position(position: int, plan: SplicePlan) -> int:
    for step in reversed(plan.steps):
        if position >= step.kept.src.start:
            return position + step.kept.position_delta
        if position >= step.removed.start:
            return step.replacement.start
    return position


def _made(edit_ids: list[str], plan: SplicePlan) -> list[Edit]:
    return [Edit(edit_id, step.replacement.start) for edit_id, step in zip(edit_ids, plan.steps, strict=False)]


def _common_prefix(left: array[int], right: array[int]) -> int:
    """Return the length of the common prefix, by halving: slices of arrays compare at memory speed."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
