"""What a turn's prompt was made of, as digests, and what the next prompt changed about it.

Owns the question on which a note's mode rests: is each difference from the last answered turn an edit of ours, or
did somebody else change the history? Keeps no text. Knows nothing of HTTP, ids of edits or servers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class MessageDigest:
    """One message of the caller's list: as it was, and what an edit made of it."""

    original: str
    cover: str | None
    """Digest of the edit that stands in its place; None where it was sent as it was."""
    forgets: bool


@dataclass(frozen=True, slots=True)
class PromptDigest:
    """Everything that a prompt was rendered from."""

    messages: tuple[MessageDigest, ...]
    insertions: frozenset[str]
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
    originals = [message.digest() for message in messages]
    covers: dict[int, tuple[str, bool]] = {}
    insertions: set[str] = set()
    for edit in edits:
        replacement = [message.digest() for message in edit.replacement]
        if replacement == originals[edit.start : edit.end]:
            continue
        cover = _digest([edit.mode, replacement])
        if edit.start == edit.end:
            insertions.add(cover)
        for idx in range(edit.start, edit.end):
            covers[idx] = (cover, edit.mode is Mode.FORGET)
    return PromptDigest(
        tuple(MessageDigest(original, *covers.get(idx, (None, False))) for idx, original in enumerate(originals)),
        frozenset(insertions),
        {name: _digest(body[name]) for name in PROMPT_ARGUMENTS if body.get(name) is not None},
    )


def compare(base: AnsweredTurn, prompt: PromptDigest, messages: Sequence[Message]) -> Comparison:
    """Find out what a prompt changed about the last answered turn; `messages` are the prompt's, before edits.

    The caller's list is expected to go on as the base's did, then the answer, then what is new. Messages at the end
    of the base that are gone while the answer follows (a reminder, a clock) count as dropped by an edit.
    """
    old, new = base.prompt.messages, prompt.messages
    unexplained = [
        f"{name} changed" for name in PROMPT_ARGUMENTS if base.prompt.arguments.get(name) != prompt.arguments.get(name)
    ]
    common = _num_common(old, [message.original for message in new])
    answered = common < len(new) and base.answer.matches(messages[common])
    lost: set[str] = set()
    if not answered:
        what = f"message {common}" if common < len(old) else "the answer"
        unexplained.append(f"{what} changed, or is gone")
        lost.update(Counter(m.original for m in old) - Counter(m.original for m in new))
    for idx in range(common):
        if old[idx].cover is not None and new[idx].cover is None:
            unexplained.append(f"the edit of message {idx} was undone")
            lost.add(old[idx].original)
    if base.prompt.insertions - prompt.insertions:
        unexplained.append("an inserted message is gone")
    edited = {
        idx
        for idx, message in enumerate(new)
        if message.cover is not None and not (idx < common and old[idx].cover == message.cover)
    }
    num_known = common + 1 if answered else common
    changed = (
        bool(unexplained)
        or common < len(old)
        or base.prompt.insertions != prompt.insertions
        or any(idx < num_known for idx in edited)
    )
    answer_is_kept = answered and common not in edited
    return Comparison(
        unexplained=tuple(unexplained),
        lost=frozenset(lost),
        edited=frozenset(new[idx].original for idx in edited),
        newly_forgotten=frozenset(new[idx].original for idx in edited if idx < num_known and new[idx].forgets),
        by_template="all" if not changed else "answer" if answer_is_kept else "none",
    )


def goes_on(base: AnsweredTurn, messages: Sequence[Message], digests: Sequence[str] | None = None) -> bool:
    """Tell whether a message list has the base's messages, less some at their end, then its answer.

    `digests` are those of the messages, for who asks of many bases.
    """
    common = _num_common(base.prompt.messages, digests or (message.digest() for message in messages))
    return 0 < common < len(messages) and base.answer.matches(messages[common])


def _num_common(old: Sequence[MessageDigest], new: Iterable[str]) -> int:
    common = 0
    for message, original in zip(old, new, strict=False):
        if message.original != original:
            break
        common += 1
    return common


def _canonical_arguments(call: ToolCall) -> str:
    try:
        return json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
    except ValueError:
        return call.arguments


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
