from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evals.micro.conversations import MARK_TOKENS, Conversation, Renderer, make_conversation
from evals.micro.recorded_steps import WorkloadError, read_recordings
from evals.models.random_mla import train_tokenizer
from evals.replay.ideal import SpanReader, ideal_turn
from evals.replay.local_renderer import LocalRenderer
from leyline_agent.core.edits import apply_edits
from leyline_agent.core.messages import Message
from leyline_agent.core.token_ids import common_prefix
from leyline_agent.policy import load_policy, policy_edits
from leyline_agent.tokenizers import LocalTokenizer
from tests.evals.recorded_agent import write_recording

DEMO = Path(__file__).parents[2] / "evals" / "replay" / "demo_trajectory.json"
TURNS = 4
MARK = [201, 202]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


def conversation(renderer: Renderer, file: Path, *, keep: int = 2, tokens: int = 4000, number: int = 0) -> Conversation:
    return make_conversation(
        read_recordings([file]),
        renderer,
        load_policy("keep_last_tool_outputs").with_turns(keep),
        number=number,
        seed=0,
        prompt_tokens=tokens,
        turns=TURNS,
    )


def sent(conversation: Conversation, turn: int, *, keep: int, edited_at: int | None = None) -> list[Message]:
    """Return the messages of a turn, edited by the policy; `edited_at` has only the edits of an earlier turn."""
    extra = len(conversation.messages) - len(conversation.segments)
    policy = load_policy("keep_last_tool_outputs").with_turns(keep)
    end = conversation.ends[turn] + extra
    seen = conversation.messages[: conversation.ends[turn if edited_at is None else edited_at] + extra]
    edits = policy_edits(policy, seen, tools=conversation.tools)
    return apply_edits(conversation.messages[:end], edits)


def recorded_answers(conversation: Conversation) -> list[tuple[int, ...]]:
    """Return what was recorded in the place of what a server generates, to the base and to all turns but the last."""
    cut = slice(len(conversation.header), -len(conversation.footer))
    return [conversation.segments[end].ids[cut] for end in conversation.ends[:-1]]


def rendered(tokenizer: Any, conversation: Conversation, messages: list[Message]) -> list[int]:
    return LocalTokenizer(tokenizer).render([m.to_openai() for m in messages], conversation.tools)


@pytest.fixture(params=["demo", "parallel_calls"])
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return DEMO if request.param == "demo" else write_recording(tmp_path / "agent.json", calls=2)


@pytest.mark.parametrize("keep", [2, 8])
def test_a_prompt_is_the_edited_history_rendered_whole(
    tokenizer: Any, renderer: Renderer, recording: Path, keep: int
) -> None:
    made = conversation(renderer, recording, keep=keep, tokens=6000)
    answers = recorded_answers(made)
    edits = 0
    for turn in range(TURNS + 1):
        prompt = made.prompt(turn, answers, edits=True)
        edits += prompt.num_edits
        assert prompt.ids == rendered(tokenizer, made, sent(made, turn, keep=keep))
    assert edits


def test_without_edits_the_history_stays_as_the_base_has_it(tokenizer: Any, renderer: Renderer) -> None:
    made = conversation(renderer, DEMO)
    for turn in range(TURNS + 1):
        messages = sent(made, turn, keep=2, edited_at=0)
        assert made.prompt(turn, recorded_answers(made), edits=False).ids == rendered(tokenizer, made, messages)


def test_the_history_has_what_was_generated(renderer: Renderer) -> None:
    made = conversation(renderer, DEMO)
    base = made.prompt(0, [], edits=False).ids
    grown = made.prompt(2, [[7, 8, 9], [11]], edits=False).ids
    assert grown[: len(base) + 3 + len(made.footer)] == [*base, 7, 8, 9, *made.footer]
    second = len(made.prompt(1, [[7, 8, 9]], edits=False).ids)
    assert grown[second : second + 1 + len(made.footer)] == [11, *made.footer]


@pytest.mark.parametrize("tokens", [3000, 6000])
def test_the_first_measured_prompt_is_as_long_as_asked_for(renderer: Renderer, tokens: int) -> None:
    made = conversation(renderer, DEMO, tokens=tokens)
    length = len(made.prompt(1, [[0]], MARK, edits=True).ids)
    assert tokens - 400 < length <= tokens


def test_conversations_share_the_system_prompt_and_nothing_else(renderer: Renderer) -> None:
    made = [conversation(renderer, DEMO, number=number).prompt(0, [], edits=True).ids for number in range(6)]
    system = len(conversation(renderer, DEMO).segments[0].ids)
    for number, first in enumerate(made):
        for other in made[:number]:
            # The role, and maybe a digit of the id that follows.
            assert system <= common_prefix(first, other) <= system + 3


def test_conversations_begin_at_different_steps(renderer: Renderer) -> None:
    firsts = {conversation(renderer, DEMO, number=number).messages[2].digest() for number in range(6)}
    assert len(firsts) == 6


@pytest.mark.parametrize("turn", range(1, TURNS + 1))
def test_the_ideal_is_that_of_the_replay_and_the_answer(tokenizer: Any, renderer: Renderer, turn: int) -> None:
    made = conversation(renderer, DEMO)
    answers = recorded_answers(made)
    reader = SpanReader(LocalRenderer(tokenizer))
    before, after = (
        reader.spans([m.to_openai() for m in sent(made, at, keep=2)], made.tools) for at in (turn - 1, turn)
    )
    prompt = made.prompt(turn, answers, edits=True)
    # There the recorded answer takes the place of what was generated; here all of that but its last token is cached.
    assert prompt.ideal_tokens == ideal_turn(before, after).cached_tokens + len(answers[turn - 1]) - 1
    assert ideal_turn(before, after).edited_messages == prompt.num_edits


def test_a_prefix_cache_has_what_stands_left_of_the_first_stub(renderer: Renderer) -> None:
    made = conversation(renderer, DEMO)
    answers = recorded_answers(made)
    for turn in range(1, TURNS + 1):
        before, prompt = (made.prompt(at, answers, MARK, edits=True) for at in (turn - 1, turn))
        same = common_prefix(before.ids, prompt.ids)
        if prompt.num_edits:
            # The stub begins with the role, as the output did, and with the mark if that had one.
            assert same - prompt.left_tokens in (1, 1 + MARK_TOKENS)
            assert prompt.removed_tokens > 0
        else:
            assert same == len(before.ids)


def test_runs_have_ids_of_their_own_in_all_that_they_add(renderer: Renderer) -> None:
    made = conversation(renderer, DEMO)
    answers = recorded_answers(made)
    assert made.prompt(0, [], [1, 2], edits=True) == made.prompt(0, [], [3, 4], edits=True)
    for turn in range(1, TURNS + 1):
        one, other = (made.prompt(turn, answers, mark, edits=True) for mark in ([1, 2], [3, 4]))
        differ = sum(a != b for a, b in zip(one.ids, other.ids, strict=True))
        stubs = len(made.stubbed[turn] - made.stubbed[0])
        added = made.segments[made.ends[0] : made.ends[turn]]
        outputs = sum(
            segment.role == "tool" and idx not in made.stubbed[turn]
            for idx, segment in enumerate(added, start=made.ends[0])
        )
        assert differ == MARK_TOKENS * (stubs + outputs)


def test_calls_of_repeated_steps_have_ids_of_their_own(renderer: Renderer, tmp_path: Path) -> None:
    made = conversation(renderer, write_recording(tmp_path / "agent.json", steps=3, calls=2))
    ids = [call.id for message in made.messages for call in message.tool_calls]
    assert len(ids) == len(set(ids)) > 6
    results = [message.tool_call_id for message in made.messages if message.role == "tool"]
    assert results == ids


def test_a_tokenizer_is_had_without_the_model(tokenizer: Any) -> None:
    trained = train_tokenizer()
    text = "def read(path): return Path(path).read_text()  # <|end|>"
    assert trained.encode(text) == tokenizer.encode(text)
    assert trained.chat_template == tokenizer.chat_template


def test_trajectories_without_tools_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps([{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]))
    with pytest.raises(WorkloadError, match="0 steps of an answer and a tool's output, and a system prompt"):
        read_recordings([file])


def test_a_prompt_that_no_conversation_fits_is_refused(renderer: Renderer) -> None:
    with pytest.raises(WorkloadError, match=r"shortest prompt has \d+ tokens, more than 200; raise --prompt-tokens"):
        conversation(renderer, DEMO, tokens=200)
