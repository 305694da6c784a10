"""What a turn's prompt was made of, as digests, and what the next prompt changed about it.

Owns the question on which a note's mode rests: is each difference from the last answered turn an edit of ours, or
did somebody else change the history? Keeps no text. Knows nothing of HTTP, ids of edits or servers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from leyline_agent.core.edits import Edit
from leyline_agent.core.messages import Message, ToolCall
from leyline_agent.core.protocol import Mode
from leyline_agent.telemetry import ByTemplate

PROMPT_ARGUMENTS = (
    "model",
    "tools",
    "functions",
    "tool_choice",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "reasoning",
    "reasoning_effort",
    "response_format",
    "task",
    "thinking",
    # These change the rows or where they are kept, not the text.
    "lora_path",
    "extra_key",
    "cache_salt",
)
"""Fields of a chat request, besides its messages, on which the prompt's ids or their KV may depend."""


class Cover(NamedTuple):
    """The edit that stands in a message's place."""

    mode: Mode
    replacement: tuple[str, ...]
    """Digests of what it put there."""


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """Everything that a prompt was rendered from."""

    originals: tuple[str, ...]
    """The messages of the caller's list as they were."""
    covers: Mapping[int, Cover]
    """By index: of those that were not sent as they were."""
    insertions: frozenset[Cover]
    """Edits that put messages between others and cover none."""
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AnswerDigest:
    """An answer as received, recognized in the form in which clients send it back.

    They drop nulls, turn a null content into "" (debug-gym, beside calls, into "None"), serialize the arguments of
    calls anew and leave out the reasoning; none of it changes what was said.
    """

    said: str
    reasoning: str | None

    @classmethod
    def of(cls, answer: Message) -> AnswerDigest:
        """Take the digests of an answer."""
        calls = [(call.id, call.name, _canonical_arguments(call)) for call in answer.tool_calls]
        text = "" if calls and answer.text == "None" else answer.text
        reasoning = answer.raw.get("reasoning_content")
        return cls(_digest([answer.role, text, calls]), _digest(reasoning) if reasoning else None)

    def matches(self, message: Message) -> bool:
        """Tell whether a message of the next prompt is this answer, unchanged."""
        other = AnswerDigest.of(message)
        return self.said == other.said and other.reasoning in (None, self.reasoning)


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """The turn that the next prompt is compared with."""

    turn: str
    noted: bool
    """Whether its request carried a note, so that the server can know it."""
    prompt: PromptDigest
    answer: AnswerDigest


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """A prompt whose caller keeps edits in its own history: as the next one will have it."""

    prompt: PromptDigest
    renamed: Mapping[str, str]
    """Original digests of messages that are kept edited, and the digests that these have now."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a prompt differs from the last answered turn. Messages are named by their original digests."""

    unexplained: tuple[str, ...]
    """For people: each difference that no edit accounts for."""
    lost: frozenset[str]
    """Earlier messages that are changed, gone or no longer edited."""
    edited: frozenset[str]
    """Messages on which an edit is new, or is another one than before."""
    newly_forgotten: frozenset[str]
    """Those of them that the server has seen and whose edit is to leave no influence."""
    by_template: ByTemplate


def digest_prompt(messages: Sequence[Message], edits: Sequence[Edit], body: Mapping[str, Any]) -> PromptDigest:
    """Take the digests of a chat request: `messages` as the caller has them, `edits` as they are carried out."""
    originals = tuple([message.digest() for message in messages])
    covers: dict[int, Cover] = {}
    insertions: set[Cover] = set()
    for edit in edits:
        replacement = tuple([message.digest() for message in edit.replacement])
        if replacement == originals[edit.start : edit.end]:
            continue
        cover = Cover(edit.mode, replacement)
        if edit.start == edit.end:
            insertions.add(cover)
        for idx in range(edit.start, edit.end):
            covers[idx] = cover
    return PromptDigest(
        originals,
        covers,
        frozenset(insertions),
        {name: _digest(body[name]) for name in PROMPT_ARGUMENTS if body.get(name) is not None},
    )


def compare(base: AnsweredTurn, prompt: PromptDigest, messages: Sequence[Message]) -> Comparison:
    """Find out what a prompt changed about the last answered turn; `messages` are the prompt's, before edits.

    The caller's list is expected to go on as the base's did, then the answer, then what is new. Messages at the end
    of the base that are gone while the answer follows (a reminder, a clock) count as dropped by an edit.
    """
    old, new = base.prompt, prompt
    unexplained = [f"{name} changed" for name in PROMPT_ARGUMENTS if old.arguments.get(name) != new.arguments.get(name)]
    common = _num_common(old.originals, new.originals)
    answered = common < len(new.originals) and base.answer.matches(messages[common])
    lost: set[str] = set()
    if not answered:
        what = f"message {common}" if common < len(old.originals) else "the answer"
        unexplained.append(f"{what} changed, or is gone")
        lost.update(Counter(old.originals) - Counter(new.originals))
    for idx in sorted(old.covers.keys() - new.covers.keys()):
        if idx < common:
            unexplained.append(f"the edit of message {idx} was undone")
            lost.add(old.originals[idx])
    if old.insertions - new.insertions:
        unexplained.append("an inserted message is gone")
    edited = {idx for idx, cover in new.covers.items() if idx >= common or old.covers.get(idx) != cover}
    num_known = common + 1 if answered else common
    changed = (
        bool(unexplained)
        or common < len(old.originals)
        or old.insertions != new.insertions
        or any(idx < num_known for idx in edited)
    )
    answer_is_kept = answered and common not in edited
    return Comparison(
        unexplained=tuple(unexplained),
        lost=frozenset(lost),
        edited=frozenset(new.originals[idx] for idx in edited),
        newly_forgotten=frozenset(
            new.originals[idx] for idx in edited if idx < num_known and new.covers[idx].mode is Mode.FORGET
        ),
        by_template="all" if not changed else "answer" if answer_is_kept else "none",
    )


def goes_on(base: AnsweredTurn, messages: Sequence[Message], digests: tuple[str, ...] | None = None) -> bool:
    """Tell whether a message list has the base's messages, less some at their end, then its answer.

    `digests` are those of the messages, for who asks of many bases.
    """
    common = _num_common(base.prompt.originals, digests or tuple(message.digest() for message in messages))
    return 0 < common < len(messages) and base.answer.matches(messages[common])


def _num_common(old: tuple[str, ...], new: tuple[str, ...]) -> int:
    if new[: len(old)] == old:
        return len(old)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _canonical_arguments(call: ToolCall) -> str:
    try:
        return json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
    except ValueError:
        return call.arguments


def _digest(value: object) -> str:
    return hashlib.sha256(_SORTED.encode(value).encode()).hexdigest()


# `json.dumps` would make one each time.
_SORTED = json.JSONEncoder(sort_keys=True, default=str)
