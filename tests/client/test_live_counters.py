"""What `counter="server"` counts is what the server counts."""

from __future__ import annotations

from typing import Any

import pytest

from evals.serving import SERVED_MODEL_NAME, RunningServer
from leyline_agent import Client, Conversation
from leyline_agent.policy import EstimatedTokens, parse_policy
from leyline_agent.tokenizers import LocalTokenizer

from .test_live_tokenizers import MESSAGES, TOOLS

pytestmark = pytest.mark.sglang

_ASKED: dict[str, Any] = {"model": SERVED_MODEL_NAME, "temperature": 0, "max_tokens": 4, "tools": TOOLS}


def _edits_of_second_turn(server: RunningServer, tokens: int) -> tuple[int, int, int]:
    """Return how many edits the second of two requests has, and its prompt tokens and those of the first with its
    answer, as the server counts them."""
    policy = parse_policy(
        f'version: 1\nwhen: {{tokens: {tokens}}}\nrules: [{{name: r, select: {{role: tool}}, replace: "[gone]"}}]'
    )
    conversation = Conversation(policy, counter="server")
    with Client(server.url, timeout=120) as client:
        first = client.chat(conversation, MESSAGES[:4], **_ASKED)
        assert first.usage is not None
        messages = [*MESSAGES[:4], first.message, {"role": "user", "content": "Go on."}]
        prepared = conversation.prepare({"messages": messages, **_ASKED})
        second = client.chat(conversation, messages, **_ASKED)
        assert second.usage is not None
    return len(prepared.edits), second.usage.prompt_tokens, first.usage.prompt_tokens + first.usage.completion_tokens


def test_a_trigger_fires_at_exactly_the_tokens_that_the_server_counted(cpu_server: RunningServer) -> None:
    _, prompt_tokens, first_tokens = _edits_of_second_turn(cpu_server, 100_000)
    new = EstimatedTokens().count_message({"role": "user", "content": "Go on."})

    assert _edits_of_second_turn(cpu_server, first_tokens + new)[0] == 1
    assert _edits_of_second_turn(cpu_server, first_tokens + new + 1)[0] == 0
    # The next prompt has the answer as its template writes it, the new message and the start of an answer.
    assert abs(first_tokens + new - prompt_tokens) < 20


def test_a_local_tokenizer_counts_the_texts_as_the_server_does(cpu_server: RunningServer, model_dir: Any) -> None:
    local = LocalTokenizer.from_pretrained(str(model_dir))
    text = "How many tokens are these, 出力, and {this}?"
    with Client(cpu_server.url, timeout=120) as client:
        sizes = []
        for content in (text, text * 3):
            reply = client.chat(Conversation("none"), [{"role": "user", "content": content}], **_ASKED)
            assert reply.usage is not None
            sizes.append(reply.usage.prompt_tokens)
    counter = local.counter()

    counted = [counter.count_message({"role": "user", "content": content}) for content in (text, text * 3)]

    assert counted[1] - counted[0] == sizes[1] - sizes[0]
