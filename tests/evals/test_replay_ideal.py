from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from evals.replay.errors import ReplayError
from evals.replay.ideal import ChatDict, SpanReader, ideal_turn


class Words:
    """A token a word; a message is its role in brackets, its text, and a full stop."""

    def __init__(self) -> None:
        self.num_renders = 0

    def render(self, messages: Sequence[ChatDict], tools: Sequence[ChatDict], *, generation_prompt: bool) -> str:
        self.num_renders += 1
        head = "".join(f"tool {tool['name']} " for tool in tools)
        return head + "".join(self.one(message) for message in messages) + ("[assistant] " if generation_prompt else "")

    def one(self, message: ChatDict) -> str:
        return f"[{message['role']}] {message['content']} . "

    def token_starts(self, text: str) -> list[int]:
        return [found.start() for found in re.finditer(r"\S+", text)]


class Headless(Words):
    """A template without a generation prompt."""

    def render(self, messages: Sequence[ChatDict], tools: Sequence[ChatDict], *, generation_prompt: bool) -> str:
        return super().render(messages, tools, generation_prompt=False)


class Forgetful(Words):
    """A template that renders only the last message in full, as those do that strip old reasoning."""

    def render(self, messages: Sequence[ChatDict], tools: Sequence[ChatDict], *, generation_prompt: bool) -> str:
        short = [{**message, "content": "old"} for message in messages[:-1]]
        return super().render([*short, *messages[-1:]], tools, generation_prompt=generation_prompt)


def _m(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


SYSTEM, TASK = _m("system", "be good"), _m("user", "fix it")
ANSWER, OUTPUT = _m("assistant", "run tests"), _m("tool", "one two three failed")
STUB = _m("tool", "gone")
ANSWER_2, OUTPUT_2 = _m("assistant", "look"), _m("tool", "a b")


def test_spans_tile_the_prompt() -> None:
    spans = SpanReader(Words()).spans([SYSTEM, TASK, ANSWER, OUTPUT])
    assert spans.num_tokens == (4, 4, 4, 6)
    assert spans.generation_tokens == 1
    assert spans.generation_text == "[assistant] "
    assert spans.prompt_tokens == 19


def test_tools_belong_to_the_first_message() -> None:
    spans = SpanReader(Words()).spans([SYSTEM, TASK], [{"name": "cat"}])
    assert spans.num_tokens == (6, 4)


def test_the_first_prompt_has_nothing_cached() -> None:
    spans = SpanReader(Words()).spans([SYSTEM, TASK])
    assert ideal_turn(None, spans).cached_tokens == 0


def test_a_prompt_that_grows_keeps_all_of_the_last_one() -> None:
    reader = SpanReader(Words())
    before = reader.spans([SYSTEM, TASK])
    turn = ideal_turn(before, reader.spans([SYSTEM, TASK, ANSWER, OUTPUT]))
    # Both messages (8) and the header of the answer, which the last prompt ended with.
    assert turn.cached_tokens == before.prompt_tokens == 9
    assert (turn.edited_messages, turn.edited_tokens) == (0, 0)


def test_an_edited_message_is_new_and_what_follows_it_stays() -> None:
    reader = SpanReader(Words())
    before = reader.spans([SYSTEM, TASK, ANSWER, OUTPUT, ANSWER_2, OUTPUT_2])
    turn = ideal_turn(before, reader.spans([SYSTEM, TASK, ANSWER, STUB, ANSWER_2, OUTPUT_2, _m("assistant", "ok")]))
    # system 4, task 4, answer 4, not the stub, answer 3, output 4, and the header 1.
    assert turn.cached_tokens == 20
    assert (turn.edited_messages, turn.edited_tokens) == (1, 6)


def test_dropped_messages_are_edited_too() -> None:
    reader = SpanReader(Words())
    before = reader.spans([SYSTEM, TASK, ANSWER, OUTPUT, ANSWER_2, OUTPUT_2])
    turn = ideal_turn(before, reader.spans([SYSTEM, TASK, ANSWER_2, OUTPUT_2]))
    assert (turn.edited_messages, turn.edited_tokens) == (2, 10)
    assert turn.cached_tokens == 15


def test_the_last_token_is_computed_in_any_case() -> None:
    reader = SpanReader(Headless())
    spans = reader.spans([SYSTEM, TASK])
    assert ideal_turn(spans, spans).cached_tokens == 7


def test_equal_stubs_are_matched_in_order() -> None:
    reader = SpanReader(Words())
    before = reader.spans([SYSTEM, STUB, STUB, OUTPUT, STUB])
    turn = ideal_turn(before, reader.spans([SYSTEM, STUB, STUB, STUB]))
    assert (turn.edited_messages, turn.edited_tokens) == (1, 6)


def test_the_match_with_most_tokens_wins_not_the_one_with_most_messages() -> None:
    reader = SpanReader(Words())
    long = _m("tool", "a very long output of very many words indeed")
    before = reader.spans([long, STUB, OUTPUT_2])
    turn = ideal_turn(before, reader.spans([STUB, OUTPUT_2, long, ANSWER]))
    assert turn.edited_tokens == 3 + 4


def test_another_order_is_not_cached() -> None:
    reader = SpanReader(Words())
    before = reader.spans([SYSTEM, ANSWER, OUTPUT])
    turn = ideal_turn(before, reader.spans([SYSTEM, OUTPUT, ANSWER]))
    assert turn.edited_messages == 1


def test_the_header_counts_only_if_the_answer_begins_with_it() -> None:
    reader = SpanReader(Words())
    before = reader.spans([SYSTEM, TASK])
    assert ideal_turn(before, reader.spans([SYSTEM, TASK, _m("user", "wait")])).cached_tokens == 8


def test_a_message_is_rendered_once_over_many_prompts() -> None:
    words = Words()
    reader = SpanReader(words)
    messages = [SYSTEM, TASK]
    for idx in range(50):
        messages += [_m("assistant", f"step {idx}"), _m("tool", f"output {idx}")]
        reader.spans(messages)
    # Two whole renders a prompt, and one for each message that is new.
    assert words.num_renders == 2 * 50 + len(messages)


def test_a_template_that_rewrites_history_has_no_spans() -> None:
    with pytest.raises(ReplayError, match="renders message 0 differently once more follow"):
        SpanReader(Forgetful()).spans([SYSTEM, TASK])


def test_an_equal_output_of_another_call_is_a_new_message() -> None:
    """Read again after it was evicted: the text was cached, the message was not."""
    reader = SpanReader(Words())
    first, again = ({**OUTPUT_2, "tool_call_id": call} for call in ("call_1", "call_2"))
    before = reader.spans([_m("user", "go"), first])
    turn = ideal_turn(before, reader.spans([_m("user", "go"), STUB, again]))
    assert turn.edited_messages == 1
    assert turn.cached_tokens == ideal_turn(before, reader.spans([_m("user", "go"), STUB, ANSWER])).cached_tokens
