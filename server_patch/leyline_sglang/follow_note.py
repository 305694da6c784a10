"""What a note asks of a turn: growing, edits, a re-prefill, or forgetting.

Edits are found by `find_directives.py` and carried out by `turn_splice.py`; the other three are done here.
"""

from __future__ import annotations

from leyline_agent.core.protocol import Directive, Note, Reason, Status
from leyline_agent.core.token_ids import common_prefix
from leyline_agent.errors import PlanError
from leyline_sglang.find_directives import find_directives
from leyline_sglang.sequences import Edit, RememberedTurn
from leyline_sglang.turn import Served, Turn
from leyline_sglang.turn_splice import splice


async def follow_note(turn: Turn, note: Note) -> Served:
    """Do what the note asks for and choose the namespace that the request is served from.

    Hold `turn.conversation.lock`.

    Raises:
        PlanError: it could not be done, and the request is to be served plain.
    """
    turns = turn.conversation.turns
    base = turns.get(note.base) if note.base is not None else None
    if note.forget or note.mode == "forget":
        return await _forget(turn, note, base)
    if note.base is None and note.mode == "amortize":
        return await turn.serve(Status.UNCHANGED)
    if note.base is not None and base is None:
        message = f"turn {note.base!r} is not remembered here: it never came, is too old, or was flushed"
        if note.mode == "reprefill":
            # What the conversation's rows have in common with the unknown base is as unknown.
            return await _reprefill(turn, None, reason=Reason.UNKNOWN_BASE, message=message)
        return await turn.serve(Status.REFUSED, reason=Reason.UNKNOWN_BASE, message=message)
    if note.base is not None:
        # Its retries and branches come back to it, so it is not the oldest any more.
        turns.move_to_end(note.base)
    if note.mode == "reprefill" or base is None:
        return await _reprefill(turn, base)
    try:
        base_ids, directives, first_in_answer = await find_directives(turn, note, base)
        turn.count({"diff": turn.elapsed_ms()})
    except PlanError as error:
        _, edits = _left_of_difference(turn, base)
        return await turn.serve(Status.REFUSED, reason=Reason(error.reason), message=str(error), edits=edits)
    # What is explicit was asked for.
    cut = note.template_changes == "reprefill" and note.directives is None
    first = first_in_answer if cut else None
    # The end of a base, which nothing is kept behind, is prefilled in any case.
    if first is not None and directives[first].end < len(base_ids):
        if not first:
            return await _reprefill(turn, base)
        directives = [*directives[:first], Directive(start=directives[first].start, end=len(base_ids))]
    return await splice(
        turn,
        base_ids,
        directives,
        base_in_own=base.in_own,
        edits=base.edits,
        first_in_answer=first_in_answer,
        scrub=note.scrub,
        # What is explicit was asked for, here too.
        gated=note.gate == "auto" and note.directives is None and turn.config.gate,
    )


async def _reprefill(
    turn: Turn, base: RememberedTurn | None, *, reason: Reason | None = None, message: str | None = None
) -> Served:
    """Serve nothing of the conversation's own rows right of the first difference from the base, whoever left them.

    What lies left of it saw nothing of the changed text.
    """
    kept_tokens, edits = _left_of_difference(turn, base) if base is not None else (0, ())
    look = None
    if turn.conversation.has_namespace:
        look = await turn.look()
        # On a tie too, where the own namespace would be preferred.
        if look.new_own > kept_tokens and look.new_own >= look.new_shared:
            await turn.close_namespace(keep_tokens=kept_tokens)
            look = None
    # Decided by the same look: were the shared rows evicted meanwhile, another one would prefer the own.
    status = Status.REPREFILL if reason is None else Status.REFUSED
    return await turn.serve(status, reason=reason, message=message, edits=edits, look=look)


def _left_of_difference(turn: Turn, base: RememberedTurn) -> tuple[int, tuple[Edit, ...]]:
    """Return how far the prompt is the base, and the base's edits as far as there, where positions are the same."""
    tokens = max(common_prefix(sequence, turn.new_ids) for sequence in base.sequences())
    return tokens, tuple(edit for edit in base.edits if edit.position < tokens)


async def _forget(turn: Turn, note: Note, base: RememberedTurn | None) -> Served:
    """Serve the request from rows that nothing forgotten has touched, and drop all others of this conversation.

    Kept is what lies left of the first difference from the base and of every forgotten edit. An edit that the base's
    log does not know may have been anywhere, as may those that "all" stands for beside the base's own, so nothing of
    the namespace is kept then.
    """
    keep_tokens = 0
    edits: tuple[Edit, ...] = ()
    if base is not None and note.forget != "all":
        positions = {edit.edit_id: edit.position for edit in base.edits}
        if all(edit_id in positions for edit_id in note.forget):
            first_difference, _ = _left_of_difference(turn, base)
            keep_tokens = min([first_difference, *(positions[edit_id] for edit_id in note.forget)])
            edits = tuple(edit for edit in base.edits if edit.position < keep_tokens)
    await turn.close_namespace(keep_tokens=keep_tokens, forget=True, scrub=note.scrub)
    return await turn.serve(Status.REPREFILL, edits=edits)
