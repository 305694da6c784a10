"""What a perfect cache would serve of each prompt, from message spans alone.

**Definition.** A prompt is rendered message by message, which gives each message a span of tokens. A token of turn t's
prompt is *ideally cached* if its message stood in turn t-1's prompt as well, unchanged, in the same order among those
that stayed. It is the same message, not only the same text: an output read again has another `tool_call_id` and is new.
Everything else is new or was edited. In addition:

- The generation prompt at the end of prompt t-1 (the header of the answer to come) is cached, and the recorded answer
  of turn t begins with the same text, so the tokens of that header count.
- A server always computes at least the last token, since it needs its logits: at most `prompt_tokens - 1` count.
- An edited message counts as new from its first token to its last, though a stub begins with the header of what it
  replaces. A real splice may keep that header and lie a few tokens a turn above this ideal.
- The token that the server generated itself does not count: the recorded answer takes its place.

Messages are matched by the longest (in tokens) common subsequence, on whole messages. No token id is
compared and nothing is shared with the diff or the plan that this is to judge.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evals.replay.errors import ReplayError

ChatDict = Mapping[str, Any]

_REWRITES = (
    "the chat template renders message {idx} differently once more follow, so messages have no spans of their own; "
    "the ideal needs a template that only appends"
)


class PromptRenderer(Protocol):
    """A chat template and a tokenizer."""

    def render(self, messages: Sequence[ChatDict], tools: Sequence[ChatDict], *, generation_prompt: bool) -> str:
        """Return the prompt's text."""

    def token_starts(self, text: str) -> list[int]:
        """Return the index of the character at which each token of the text starts."""


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """A prompt cut into messages."""

    keys: tuple[str, ...]
    """The JSON of each message, by which it is known again: its ids count, not only its text."""
    texts: tuple[str, ...]
    """The rendered text of each message; tool schemas belong to the first."""
    num_tokens: tuple[int, ...]
    """Tokens of each message."""
    generation_text: str
    generation_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of the whole prompt."""
        return sum(self.num_tokens) + self.generation_tokens


@dataclass(frozen=True, slots=True)
class IdealTurn:
    """What stayed from one prompt to the next."""

    prompt_tokens: int
    cached_tokens: int
    """Ideally cached tokens of the new prompt."""
    edited_messages: int
    """Messages of the previous prompt that are not in the new one."""
    edited_tokens: int
    """Their tokens."""


class SpanReader:
    """Cuts prompts into message spans; remembers the text of messages that it has rendered before."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self._known: dict[str, str] = {}

    def spans(self, messages: Sequence[ChatDict], tools: Sequence[ChatDict] = ()) -> PromptSpans:
        """Render and cut one prompt.

        Raises:
            ReplayError: the template rewrites earlier messages when later ones come, so that messages have no spans.
        """
        whole = self._renderer.render(messages, tools, generation_prompt=True)
        keys: list[str] = []
        texts: list[str] = []
        before = ""
        for idx, message in enumerate(messages):
            key = json.dumps([message, (list(tools) or None) if idx == 0 else None], sort_keys=True)
            text = self._known.get(key)
            if text is None or not whole.startswith(before + text):
                text = self._text_of(messages[: idx + 1], tools, before=before, whole=whole)
                self._known[key] = text
            keys.append(key)
            texts.append(text)
            before += text
        if before != self._renderer.render(messages, tools, generation_prompt=False):
            raise ReplayError(_REWRITES.format(idx=len(messages) - 1))
        ends = list(itertools.accumulate(map(len, texts)))
        counts = _count_between(self._renderer.token_starts(whole), ends)
        return PromptSpans(tuple(keys), tuple(texts), tuple(counts[:-1]), whole[len(before) :], counts[-1])

    def _text_of(self, so_far: Sequence[ChatDict], tools: Sequence[ChatDict], *, before: str, whole: str) -> str:
        """Render up to a message and return what it added."""
        rendered = self._renderer.render(so_far, tools, generation_prompt=False)
        if not rendered.startswith(before) or not whole.startswith(rendered):
            raise ReplayError(_REWRITES.format(idx=len(so_far) - 1))
        return rendered[len(before) :]


def ideal_turn(previous: PromptSpans | None, new: PromptSpans) -> IdealTurn:
    """Compare a prompt with the one before it."""
    if previous is None:
        return IdealTurn(new.prompt_tokens, 0, 0, 0)
    kept_old, kept_new = _common_messages(previous, new)
    cached = sum(new.num_tokens[idx] for idx in kept_new)
    answer_idx = kept_new[-1] + 1 if kept_new else 0
    head = previous.generation_text
    if head and answer_idx < len(new.texts) and new.texts[answer_idx].startswith(head):
        cached += previous.generation_tokens
    edited = set(range(len(previous.texts))) - set(kept_old)
    return IdealTurn(
        prompt_tokens=new.prompt_tokens,
        cached_tokens=min(cached, new.prompt_tokens - 1),
        edited_messages=len(edited),
        edited_tokens=sum(previous.num_tokens[idx] for idx in edited),
    )


def _count_between(token_starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Count the tokens that start in each of the pieces ending at `ends`, and after the last of them."""
    counts = [0] * (len(ends) + 1)
    piece = 0
    for start in token_starts:
        while piece < len(ends) and start >= ends[piece]:
            piece += 1
        counts[piece] += 1
    return counts


def _common_messages(old: PromptSpans, new: PromptSpans) -> tuple[list[int], list[int]]:
    """Return the indices, in both, of the common subsequence that holds most tokens."""
    same = 0
    while same < min(len(old.keys), len(new.keys)) and old.keys[same] == new.keys[same]:
        same += 1
    rows, columns = len(old.keys) - same, len(new.keys) - same
    # best[i][j]: most tokens that the messages from same+i on (old) and same+j on (new) can share.
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            skip = max(best[i + 1][j], best[i][j + 1])
            equal = old.keys[same + i] == new.keys[same + j]
            best[i][j] = max(skip, new.num_tokens[same + j] + best[i + 1][j + 1]) if equal else skip
    kept_old, kept_new = list(range(same)), list(range(same))
    i = j = 0
    while i < rows and j < columns:
        equal = old.keys[same + i] == new.keys[same + j]
        if equal and best[i][j] == new.num_tokens[same + j] + best[i + 1][j + 1]:
            kept_old.append(same + i)
            kept_new.append(same + j)
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return kept_old, kept_new
