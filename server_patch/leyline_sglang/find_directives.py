"""How a prompt differs from its base: the directives of a note or of a diff, and their plan.

Made on the event loop where that is quick, else in threads of their own.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from leyline_agent.core.plan import SplicePlan, make_plan
from leyline_agent.core.protocol import Directive, Note, Reason
from leyline_agent.errors import PlanError
from leyline_sglang.note import check_explicit, directives_from_diff, first_in_answer
from leyline_sglang.sequences import RememberedTurn
from leyline_sglang.turn import Turn

Result = TypeVar("Result")

_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="leyline")
"""Of our own, so that long diffs do not take the threads in which long notes are read."""
_AT_ONCE_BUDGET = 20_000
"""Of a diff that is made on the event loop, in 5 ms at most: a thread and back costs more where the loop is busy, since
its interpreter changes threads every 5 ms. What takes longer is begun anew in a thread."""
_AT_ONCE_DIRECTIVES = 256


class Found(NamedTuple):
    """A sequence of the base, and how the prompt differs from it."""

    base_ids: array[int]
    directives: list[Directive]
    first_in_answer: int | None
    """Index of the first directive that differs from the base in its answer; None where there is none."""


async def find_directives(turn: Turn, note: Note, base: RememberedTurn) -> Found:
    """Return base ids and directives, of the note or by a diff.

    Raises:
        PlanError: there are none; with the reason.
    """
    budget = turn.config.diff_budget
    if note.directives is None and budget > _AT_ONCE_BUDGET:
        try:
            return _find(turn, note, base, _AT_ONCE_BUDGET)
        except PlanError as error:
            if error.reason != Reason.DIFF_BUDGET:
                raise
    return await _in_thread(turn.config.timeout_s, _find, turn, note, base, budget)


async def plan_directives(turn: Turn, directives: list[Directive], *, base_tokens: int) -> SplicePlan:
    """Return the plan of checked directives.

    Raises:
        PlanError: it was not made in time.
    """

    def plan() -> SplicePlan:
        return make_plan(directives, base_tokens=base_tokens)

    # Thousands take a while.
    return plan() if len(directives) <= _AT_ONCE_DIRECTIVES else await _in_thread(turn.config.timeout_s, plan)


def _find(turn: Turn, note: Note, base: RememberedTurn, budget: int) -> Found:
    sequences = base.sequences()
    if note.directives is None:
        base_ids, directives = directives_from_diff(sequences, turn.new_ids, budget=budget)
    else:
        base_ids, directives = check_explicit(note, sequences, turn.new_ids, vocab_size=turn.vocab_size)
    return Found(base_ids, directives, first_in_answer(base_ids, directives, answer_start=len(base.prompt_ids)))


async def _in_thread(timeout_s: float, work: Callable[..., Result], *arguments: Any) -> Result:
    """Run what takes milliseconds off the event loop; give up where the threads are taken for too long."""
    running = asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)
    try:
        return await asyncio.wait_for(running, timeout_s)
    except TimeoutError as error:
        message = f"the diff was not made within {timeout_s} s: too many others wait for theirs"
        raise PlanError(message, reason=Reason.TIMEOUT) from error
