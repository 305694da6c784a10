"""Counts what a prompt reuses: estimated, message by message, or exactly, from the token ids that a tokenizer gives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.messages import Message
from leyline_agent.core.plan import make_plan
from leyline_agent.core.protocol import Directive, Mode
from leyline_agent.errors import PlanError, RenderError
from leyline_agent.explain.conversation_file import RecordedConversation
from leyline_agent.explain.reuse import Change, Piece, Reuse, reuse, states
from leyline_agent.policy import EstimatedTokens

if TYPE_CHECKING:
    # Its module imports httpx, which an estimate does not need.
    from leyline_agent.tokenizers import Tokenizer


class Meter(Protocol):
    """What counts the tokens of one conversation's prompts."""

    @property
    def name(self) -> str:
        """By what is counted, as a report says it."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether the numbers are those of token ids."""
        ...

    def count_given(self, num_messages: int) -> int:
        """Count the prompt of the first messages, unedited."""
        ...

    def measure(self, base: Sequence[Piece] | None, new: Sequence[Piece], *, forget: bool) -> Reuse:
        """Compare a prompt with its base, None where it has none. With `forget` nothing may be moved."""
        ...


class EstimatedMeter:
    """Estimates: the policies' own counter, and whole messages. Without a tokenizer there is nothing finer."""

    name = "estimate"
    is_exact = False

    def __init__(self, conversation: RecordedConversation) -> None:
        self._counter = EstimatedTokens()
        self._tools_tokens = self._counter.count_tools(conversation.tools)
        # By identity, since a message stands in many prompts; held, so that no other one takes its place.
        self._counted: dict[int, tuple[Message, int]] = {}
        self._given = [self._tools_tokens]
        for message in conversation.messages:
            self._given.append(self._given[-1] + self._tokens(message))

    def count_given(self, num_messages: int) -> int:
        """Count the prompt of the first messages, unedited."""
        return self._given[num_messages]

    def measure(self, base: Sequence[Piece] | None, new: Sequence[Piece], *, forget: bool) -> Reuse:
        """Compare a prompt with its base, message by message."""
        sizes = [self._tokens(piece.message) for piece in new]
        prompt_tokens = self._tools_tokens + sum(sizes)
        if base is None:
            return reuse(prompt_tokens, 0, 0)
        found = states(base, new, forget=False)
        kept = self._tools_tokens + sum(size for size, state in zip(sizes, found, strict=True) if state == "kept")
        moved = sum(size for size, state in zip(sizes, found, strict=True) if state == "moved")
        num_kept = found.count("kept")
        runs = [state == "moved" for state in found[num_kept:]]
        changes = self._changes(base[num_kept:], new[num_kept:], runs, kept, Mode.FORGET if forget else Mode.AMORTIZE)
        return reuse(prompt_tokens, kept, 0 if forget else moved, changes)

    def _changes(
        self, base: Sequence[Piece], new: Sequence[Piece], is_moved: Sequence[bool], at: int, mode: Mode
    ) -> list[Change]:
        """Return the directives between what stays; what follows the last of it is prefilled with the prompt's end."""
        changes: list[Change] = []
        start, replacement_tokens, base_idx = at, 0, 0
        for piece, stays in zip(new, is_moved, strict=True):
            if not stays:
                replacement_tokens += self._tokens(piece.message)
                continue
            while base[base_idx] != piece:
                at += self._tokens(base[base_idx].message)
                base_idx += 1
            if at > start or replacement_tokens:
                changes.append(Change(start, at, replacement_tokens, mode))
            at += self._tokens(piece.message)
            base_idx += 1
            start, replacement_tokens = at, 0
        at += sum(self._tokens(piece.message) for piece in base[base_idx:])
        if at > start:
            changes.append(Change(start, at, 0, mode))
        return changes

    def _tokens(self, message: Message) -> int:
        found = self._counted.get(id(message))
        if found is None:
            found = self._counted[id(message)] = (message, self._counter.count_message(message.raw))
        return found[1]


class ExactMeter:
    """Counts the ids of rendered prompts, and diffs them as client and server do.

    What a chat template puts behind an answer counts as cached with it: a token or so a turn.
    """

    is_exact = True

    def __init__(self, conversation: RecordedConversation, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._given: dict[int, int] = {}

    def count_given(self, num_messages: int) -> int:
        """Count the prompt of the first messages, unedited."""
        if num_messages not in self._given:
            self._given[num_messages] = len(self._render(self._conversation.messages[:num_messages]))
        return self._given[num_messages]

    def measure(self, base: Sequence[Piece] | None, new: Sequence[Piece], *, forget: bool) -> Reuse:
        """Compare the ids of a prompt with those of its base."""
        new_ids = self.prompt_ids(new)
        if base is None:
            return reuse(len(new_ids), 0, 0)
        base_ids = self.base_ids(base)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(base_ids, new_ids, strict=False)))
        try:
            directives = diff(base_ids, new_ids, forget=forget)
        except PlanError as error:
            return reuse(len(new_ids), kept, 0, problem=str(error))
        changes = [Change(each.start, each.end, len(each.replacement_ids), each.mode) for each in directives]
        moved = 0
        if not forget:
            steps = make_plan(directives, base_tokens=len(base_ids)).steps
            moved = sum(step.kept.src.end - step.kept.src.start for step in steps)
        return reuse(len(new_ids), kept, moved, changes)

    def prompt_ids(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the ids of a prompt."""
        return self._render([piece.message for piece in pieces])

    def base_ids(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the ids of a base, which ends with an answer."""
        return self._render([piece.message for piece in pieces], add_generation_prompt=False)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        try:
            return self._tokenizer.render(
                [message.to_openai() for message in messages],
                self._conversation.tools,
                add_generation_prompt=add_generation_prompt,
            )
        except ValueError as error:
            raise RenderError(
                f"the prompt of the first {len(messages)} messages cannot be rendered by {self.name}: {error}"
            ) from error


def diff(base_ids: Sequence[int], new_ids: Sequence[int], *, forget: bool) -> list[Directive]:
    """Return the directives of a turn; all forget where one has to, since the client then asks for a prefill.

    Raises:
        PlanError: as `diff_token_ids`.
    """
    directives = diff_token_ids(base_ids, new_ids)
    return [each.model_copy(update={"mode": Mode.FORGET}) for each in directives] if forget else directives
