"""The note of a request: taken off it, read, and turned into directives."""

from __future__ import annotations

from array import array
from typing import Any

from pydantic import ValidationError

from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.plan import apply_directives, check_directives
from leyline_agent.core.protocol import NOTE_KEY, Directive, Note, Reason, hash_token_ids
from leyline_agent.errors import PlanError


def take_note(obj: Any) -> Any:
    """Take the note off a request, so that it never travels to the scheduler; None where there is none.

    A batch may have one in each of its sampling parameters; the last is returned.
    """
    taken, found = None, False
    batch = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    without: list[Any] = []
    for params in batch:
        custom = params.get("custom_params") if isinstance(params, dict) else None
        if isinstance(custom, dict) and NOTE_KEY in custom:
            rest = {key: value for key, value in custom.items() if key != NOTE_KEY}
            taken, found = custom[NOTE_KEY], True
            without.append({**params, "custom_params": rest or None})
        else:
            without.append(params)
    if found:
        obj.sampling_params = without if isinstance(obj.sampling_params, list) else without[0]
    return taken


def tag_request(obj: Any, tag: str) -> None:
    """Put the conversation's tag where the note was, so that the scheduler knows whose rows the request makes."""
    if isinstance(obj.sampling_params, list):
        obj.sampling_params = [_tagged(params, tag) for params in obj.sampling_params]
    else:
        obj.sampling_params = _tagged(obj.sampling_params or {}, tag)


def _tagged(params: Any, tag: str) -> Any:
    custom = params.get("custom_params") or {} if isinstance(params, dict) else None
    # What is no object the engine answers itself.
    return {**params, "custom_params": {**custom, NOTE_KEY: tag}} if isinstance(custom, dict) else params


def parse_note(text: Any, *, max_bytes: int) -> Note:
    """Read a note.

    Raises:
        PlanError: with reason `bad_note`, `note_too_large`, `unsupported_version`, `weak_conversation_id` or
            `bad_directives`.
    """
    if not isinstance(text, str):
        raise PlanError(
            f"custom_params[{NOTE_KEY!r}] must be a JSON string, got {type(text).__name__}", reason=Reason.BAD_NOTE
        )
    # A character is at least one byte, so this needs no encoding of what is far too long.
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        raise PlanError(f"the note has more than {max_bytes} bytes", reason=Reason.NOTE_TOO_LARGE)
    try:
        return Note.model_validate_json(text)
    except ValidationError as error:
        raise PlanError(f"the note is not valid: {first_problem(error)}", reason=reason_of(error)) from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem pydantic found, with its place and without the input (it may hold a secret)."""
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])


def reason_of(error: ValidationError) -> Reason:
    """Return the reason for a note or body that is not valid."""
    problem = error.errors(include_url=False, include_input=False)[0]
    place = str(problem["loc"][0]) if problem["loc"] else ""
    if place == "conversation" and problem["type"] == "value_error":
        return Reason.WEAK_CONVERSATION_ID
    return {"v": Reason.UNSUPPORTED_VERSION, "directives": Reason.BAD_DIRECTIVES}.get(place, Reason.BAD_NOTE)


def directives_from_diff(
    sequences: list[array[int]], new_ids: array[int], *, budget: int
) -> tuple[array[int], list[Directive]]:
    """Return the sequence of the base that the prompt continues (a choice of `n`), and how it was edited.

    Raises:
        PlanError: with reason `diff_budget`.
    """
    # The budget is one turn's, however many choices its base has.
    share = budget // len(sequences)
    diffs = [(sequence, diff_token_ids(sequence, new_ids, budget=share)) for sequence in sequences]
    return max(diffs, key=lambda pair: len(pair[0]) - sum(d.end - d.start for d in pair[1]))


def check_explicit(
    note: Note, sequences: list[array[int]], new_ids: array[int], *, vocab_size: int
) -> tuple[array[int], list[Directive]]:
    """Check explicit directives against what the server remembers and against the prompt itself.

    Raises:
        PlanError: with reason `stale_base`, `bad_directives` or `token_out_of_vocabulary`.
    """
    assert note.directives is not None
    assert note.base_len is not None
    fitting = [s for s in sequences if len(s) >= note.base_len and hash_token_ids(s[: note.base_len]) == note.base_hash]
    if not fitting:
        longest = max(map(len, sequences))
        raise PlanError(
            f"the base's first {note.base_len} tokens are not the ones the client saw (the server holds {longest}); "
            "the template does not render it as it was generated, leave the diff to the server",
            reason=Reason.STALE_BASE,
        )
    base_ids = fitting[0][: note.base_len]
    check_directives(note.directives, base_tokens=len(base_ids), vocab_size=vocab_size)
    applied = array("i", apply_directives(base_ids, note.directives))
    if new_ids[: len(applied)] != applied:
        raise PlanError(
            "applied to the base, the directives do not give a prefix of this prompt", reason=Reason.STALE_BASE
        )
    return base_ids, list(note.directives)


def first_in_answer(base_ids: array[int], directives: list[Directive], *, answer_start: int) -> int | None:
    """Return which directive is the first that differs from the base within its answer, or right before it.

    Right before it, as a template may begin an answer otherwise in the history than in the prompt that asks for one.
    Where what follows a removed span begins as the span did, the diff finds the span further right than it was taken
    out, maybe across the start of the answer. So it is looked at as far left as it can have been.
    """
    floor = 0
    for idx, directive in enumerate(directives):
        if directive.end >= answer_start and directive.end - _slack(base_ids, directive, floor) >= answer_start:
            return idx
        floor = directive.end
    return None


def _slack(base_ids: array[int], directive: Directive, floor: int) -> int:
    """Return by how many tokens a directive may be moved to the left and come to the same."""
    start, inserted = directive.start, directive.replacement_ids
    if inserted and start < directive.end:
        # It ends where base and prompt do not agree any more.
        return 0
    sequence = base_ids[:start] + array("i", inserted) if inserted else base_ids
    length = len(inserted) or directive.end - start
    at = start
    while at > floor and sequence[at - 1] == sequence[at - 1 + length]:
        at -= 1
    return start - at
