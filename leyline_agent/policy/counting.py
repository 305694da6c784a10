"""How many tokens a message is: what triggers, sizes and savings are measured in.

A policy decides with these numbers, the same way each time, so a counter must be a pure function of the message. What
the server then really kept and prefilled is in the outcome of each turn; nothing here is billed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from leyline_agent.policy.content import texts_of

MESSAGE_TOKENS = 4
"""What a chat template puts around a message: its role and the markers of its start and end."""
PART_TOKENS = 1000
"""An image or another part that is no text; what it costs depends on the model and its size."""

# Scripts whose characters are mostly a token each: kana, CJK ideographs, hangul, and what is full width.
_DENSE = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")


class TokenCounter(Protocol):
    """What counts."""

    @property
    def name(self) -> str:
        """What a report calls the numbers."""
        ...

    def count_message(self, message: Mapping[str, Any]) -> int:
        """Count one chat message, its calls and what the template puts around it included."""
        ...

    def count_tools(self, tools: Sequence[Mapping[str, Any]]) -> int:
        """Count the schemas of the tools, which stand in every prompt."""
        ...


class TextTokens:
    """A counter that knows how many tokens a text is, and adds what a chat template puts around messages.

    Everything that is sent is counted once: contents of every form, calls (also where a message holds them twice, as
    `tool_calls` and as content blocks), reasoning and tools.

    Args:
        count_text: tokens of a text, such as `lambda text: len(tokenizer.encode(text))`.
        name: what a report calls the numbers.
        per_message: tokens that the template puts around each message.
    """

    def __init__(
        self, count_text: Callable[[str], int], name: str = "tokenizer", *, per_message: int = MESSAGE_TOKENS
    ) -> None:
        self._count_text = count_text
        self._name = name
        self._per_message = per_message

    @property
    def name(self) -> str:
        """What a report calls the numbers."""
        return self._name

    def count_message(self, message: Mapping[str, Any]) -> int:
        """Count one chat message, its calls and what the template puts around it included."""
        texts, num_other_parts = texts_of(message)
        num_tokens = self._per_message + PART_TOKENS * num_other_parts
        for text in texts:
            num_tokens += self._count_text(text)
        return num_tokens

    def count_tools(self, tools: Sequence[Mapping[str, Any]]) -> int:
        """Count the schemas of the tools, which stand in every prompt."""
        return sum(self._count_text(json.dumps(tool, ensure_ascii=False, default=str)) for tool in tools)


class EstimatedTokens(TextTokens):
    """An estimate without a tokenizer.

    A token for four ASCII characters, one for a Chinese, Japanese or Korean one, and one for two of any other script.
    """

    def __init__(self) -> None:
        super().__init__(estimate_tokens, "estimate")


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text."""
    return (len(text) + 3) // 4 if text.isascii() else _estimate_beyond_ascii(text)


@lru_cache(maxsize=4096)
def _estimate_beyond_ascii(text: str) -> int:
    num_dense = len(_DENSE.findall(text))
    num_ascii = len(text.encode("ascii", "ignore"))
    num_wide = len(text) - num_dense - num_ascii
    return num_dense + (num_ascii + 3) // 4 + (num_wide + 1) // 2
