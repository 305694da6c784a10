from __future__ import annotations

from typing import Any

import pytest

from leyline_agent.policy import EstimatedTokens, TextTokens
from leyline_agent.policy.counting import MESSAGE_TOKENS, PART_TOKENS, estimate_tokens

_CALL = {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}
_USE = {"type": "tool_use", "id": "a", "name": "read", "input": {"path": "x"}}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("a", 1),
        ("a" * 400, 100),
        ("文" * 400, 400),
        ("ひらがな" * 100, 400),
        ("한국어" * 100, 300),
        ("я" * 400, 200),
        ("文" * 100 + "a" * 400 + "я" * 100, 250),
        ("\ud800", 1),
    ],
    ids=["nothing", "one", "ascii", "chinese", "japanese", "korean", "cyrillic", "mixed", "surrogate"],
)
def test_an_estimate_is_fair_to_scripts(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


@pytest.mark.parametrize(
    ("message", "texts"),
    [
        pytest.param({"role": "user", "content": "abc"}, ["abc"], id="text"),
        pytest.param(
            {"role": "assistant", "content": None, "tool_calls": [_CALL]}, ["read", '{"path": "x"}'], id="call"
        ),
        pytest.param({"role": "assistant", "content": [_USE]}, ["read", '{"path": "x"}'], id="call as a block"),
        pytest.param({"role": "assistant", "content": "a", "reasoning_content": "b"}, ["a", "b"], id="reasoning"),
        pytest.param(
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "long"}]},
            ["t"],
            id="thinking without its signature",
        ),
        pytest.param(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "abc"}]},
            ["abc"],
            id="result as a block",
        ),
        pytest.param({"role": "tool", "content": ["a", {"type": "text", "text": "b"}]}, ["a", "b"], id="parts"),
        pytest.param({"role": "tool"}, [], id="no content"),
    ],
)
def test_every_text_that_is_sent_counts_once(message: dict[str, Any], texts: list[str]) -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return 0

    assert TextTokens(count).count_message(message) == MESSAGE_TOKENS
    assert counted == texts


def test_an_image_counts_and_its_address_does_not() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10_000}}

    assert EstimatedTokens().count_message({"role": "user", "content": [image]}) == MESSAGE_TOKENS + PART_TOKENS


def test_tools_count_with_their_schemas() -> None:
    tools = [{"type": "function", "function": {"name": "read", "description": "d" * 400}}]

    assert 100 < EstimatedTokens().count_tools(tools) < 130


def test_any_tokenizer_counts_by_its_texts() -> None:
    counter = TextTokens(lambda text: len(text.split()), "words", per_message=0)

    assert counter.count_message({"role": "user", "content": "one two three"}) == 3
    assert counter.name == "words"
