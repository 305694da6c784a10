"""By what a conversation's triggers count: the estimate, a tokenizer, or what the server said of its last prompt."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from leyline_agent import Conversation, Policy, Usage
from leyline_agent.core.messages import messages_from_openai
from leyline_agent.policy import EstimatedTokens, PolicyRun, TextTokens, parse_policy, request_points
from leyline_agent.tokenizers import LocalTokenizer

Chat = dict[str, Any]


def _policy(tokens: int) -> Policy:
    return parse_policy(
        f'version: 1\nwhen: {{tokens: {tokens}}}\nrules: [{{name: r, select: {{role: tool}}, replace: "[gone]"}}]'
    )


def _turn(number: int) -> list[Chat]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": f"look {number}", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"output {number} " * 20},
    ]


_OPENING: list[Chat] = [{"role": "user", "content": "The task."}]


def _send(conversation: Conversation, messages: list[Chat], usage: tuple[int, int] | None, **body: Any) -> int:
    """Send messages but the last answer and its output; return how many edits were made."""
    prepared = conversation.prepare({"messages": messages[:-2], **body})
    counted = None if usage is None else Usage(*usage, cached_tokens=None)
    conversation.commit(prepared, messages[-2], usage=counted)
    return len(prepared.edits)


def _history(num_turns: int) -> list[Chat]:
    return [*_OPENING, *(message for number in range(num_turns) for message in _turn(number))]


@pytest.mark.parametrize(("tokens", "num_edits"), [(1003, 1), (1004, 0)])
def test_the_last_answers_usage_and_the_estimate_of_what_is_new_decide(tokens: int, num_edits: int) -> None:
    output = EstimatedTokens().count_message(_turn(0)[1])
    conversation = Conversation(_policy(tokens + output), counter="server")

    assert _send(conversation, _history(1), (1000, 3)) == 0

    assert _send(conversation, _history(2), (5, 3)) == num_edits


def test_without_usage_it_goes_on_from_the_last_that_was_known() -> None:
    new = sum(EstimatedTokens().count_message(message) for message in (*_turn(0)[1:], *_turn(1)))
    for tokens, num_edits in ((1003 + new, 2), (1004 + new, 0)):
        conversation = Conversation(_policy(tokens), counter="server")
        _send(conversation, _history(1), (1000, 3))
        _send(conversation, _history(2), None)

        assert _send(conversation, _history(3), None) == num_edits


def test_what_several_choices_took_is_not_the_size_of_one() -> None:
    conversation = Conversation(_policy(900), counter="server")

    _send(conversation, _history(1), (1000, 3), n=2)

    assert _send(conversation, _history(2), None) == 0


def test_an_edit_stays_made_when_a_later_count_is_small_and_when_another_branch_came_between() -> None:
    conversation = Conversation(_policy(900), counter="server")
    _send(conversation, _history(1), (1000, 3))
    assert _send(conversation, _history(2), (50, 3)) == 1
    before = conversation.prepare({"messages": _history(2)}).edits

    other = [*_history(1), {"role": "user", "content": "Something else."}]
    conversation.prepare({"messages": other})

    assert conversation.prepare({"messages": _history(2)}).edits == before
    assert before[0].start == 2


def test_a_count_that_comes_when_rules_have_decided_without_it_is_not_used() -> None:
    conversation = Conversation(_policy(900), counter="server")
    prepared = conversation.prepare({"messages": _OPENING})
    before = conversation.prepare({"messages": _history(1)}).edits

    conversation.commit(prepared, _history(1)[1], usage=Usage(1000, 3, cached_tokens=None))

    assert conversation.prepare({"messages": _history(1)}).edits == before == ()
    conversation.prepare({"messages": [{"role": "user", "content": "Another list."}]})
    assert conversation.prepare({"messages": _history(1)}).edits == before


def test_an_answer_is_known_again_as_clients_send_it_back() -> None:
    conversation = Conversation(_policy(900), counter="server")
    messages = _history(1)
    received = {**copy.deepcopy(messages[1]), "refusal": None, "reasoning_content": "I thought."}
    conversation.commit(
        conversation.prepare({"messages": messages[:1]}), received, usage=Usage(1000, 3, cached_tokens=None)
    )

    assert len(conversation.prepare({"messages": messages}).edits) == 1


def test_the_same_input_and_the_same_counts_give_the_same_edits_however_they_come() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        history = messages_from_openai(_history(8))
        points = request_points(history)
        sizes = {point + 1: rng.randrange(10, 900) for point in points[:-1] if rng.random() < 0.7}
        policy = _policy(rng.randrange(50, 500))
        run = PolicyRun(policy)
        for point in points:
            seen = {num: size for num, size in sizes.items() if num <= point}
            grown = run.apply(history[:point], sizes=seen)
            assert grown == PolicyRun(policy).apply(history[:point], sizes=seen)
            assert grown.tokens_before >= grown.tokens_after
            if rng.random() < 0.3:
                run.apply(history[: rng.randrange(1, len(history))])


@pytest.mark.parametrize("counter", [TextTokens(lambda text: 1000, "loud")], ids=["a counter"])
def test_a_counter_of_ones_own_decides(counter: TextTokens) -> None:
    assert Conversation(_policy(900), counter=counter).prepare({"messages": _history(1)}).edits
    assert not Conversation(_policy(900)).prepare({"messages": _history(1)}).edits


def test_a_local_tokenizer_counts_texts_exactly() -> None:
    class Words:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [1] * len(text.split())

    counter = LocalTokenizer(Words()).counter(per_message=2)

    assert counter.count_message({"role": "user", "content": "three small words"}) == 5
    assert counter.name == "tokenizer"


def test_another_word_is_no_counter() -> None:
    with pytest.raises(ValueError, match="counter: got 'tokenizer', expected 'estimate', 'server' or a TokenCounter"):
        Conversation("none", counter="tokenizer")  # type: ignore[arg-type]
