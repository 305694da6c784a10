"""Chat templates that render an answer otherwise than it was generated: four as published, on one server.

The model says what the test has it say, token by token, so that its answers are such as the template does not write:
other spaces in a call's JSON, reasoning. `tests/templates` has the templates and where they are from.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from leyline_agent import Conversation
from leyline_agent.answers import read_reply
from leyline_agent.core.protocol import Outcome, Status
from leyline_agent.core.token_ids import common_prefix

from .live import Live
from .test_splice import _key_bound, _relative_l2

pytestmark = pytest.mark.sglang

TEMPLATES = Path(__file__).parent.parent / "templates"
STYLES = ("qwen3", "hermes", "deepseek_r1", "glm45")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "description": "Write a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
]
WORDS = ("def", "return", "self", "import", "value", "index", "path", "error", "open", "read", "close", "list", "test")


class Recite(CustomLogitProcessor):
    """Have the model say given tokens."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list):
            # Kept with the request. Its own list of output ids lags behind by a token while batches overlap.
            said = params["said"] = params.get("said", -1) + 1
            logits[row] = -float("inf")
            logits[row, int(params["recite"].split()[said])] = 0.0
        return logits


# So that it is sent with its code: the server has no module of this name.
Recite.__module__ = "__main__"


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def talking(
    serve_probed: Callable[..., AbstractContextManager[Live]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """One server for all templates: `chat_template_kwargs` choose."""
    branches = [
        f"{{%- {'if' if idx == 0 else 'elif'} style == '{name}' -%}}\n{(TEMPLATES / f'{name}.jinja').read_text()}"
        for idx, name in enumerate(STYLES)
    ]
    template = tmp_path_factory.mktemp("templates") / "all.jinja"
    template.write_text("".join([*branches, "{%- endif -%}"]))
    arguments = ("--chat-template", str(template), "--reasoning-parser", "deepseek-r1")
    with serve_probed(*arguments, "--enable-custom-logit-processor") as live:
        yield live
        live.assert_conserved()


@pytest.fixture
def talk(talking: Live, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Agent]:
    talking.flush()
    return lambda style, **options: Agent(talking, tokenizer, style, Conversation(None, **options))


@cache
def words(seed: int, count: int = 26) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


@dataclass
class Agent:
    """An agent whose model reasons and writes a file in each turn, or, where the template is for text, says so."""

    live: Live
    tokenizer: PreTrainedTokenizerBase
    style: str
    conversation: Conversation
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": "You fix."}, {"role": "user", "content": words(0)}]
    )
    last_sent: list[dict[str, Any]] = field(default_factory=list)
    cached: int = 0
    """Tokens of the last prompt that the response counts as cached."""
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def step(self, seed: int) -> Outcome:
        """Let the model answer and take the next observation."""
        call = f'<tool_call>\n{{"name":"write","arguments":{{"path":"a","text":"{words(seed)}"}}}}\n</tool_call>'
        reasoning = words(seed + 1000, 8)
        outcome = self.say(
            {
                "qwen3": f"<think>\n{reasoning}\n</think>\n\n{call}",
                "hermes": call,
                # The prompt has opened the reasoning already.
                "deepseek_r1": f"{reasoning}\n</think>\n\n{words(seed)}",
                "glm45": f"\n<think>{reasoning}</think>\n{words(seed)}",
            }[self.style]
        )
        calls = self.messages[-1].get("tool_calls")
        observation = {"role": "tool", "tool_call_id": calls[0]["id"], "name": "write"} if calls else {"role": "user"}
        self.messages.append({**observation, "content": words(seed + 2000)})
        return outcome

    def say(self, text: str) -> Outcome:
        """Let the model answer with a text."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        prepared = self.conversation.prepare({"messages": self.messages, **self.body(ids)})
        self.last_sent = prepared.body["messages"]
        response = self.live.http.post("/v1/chat/completions", json=prepared.body)
        reply = read_reply(response.headers, response.json())
        self.conversation.commit(prepared, reply.message, reply.outcome, reply.usage)
        self.prompts.append(reply.raw["choices"][0]["prompt_token_ids"])
        self.answers.append(ids)
        self.cached = (reply.usage and reply.usage.cached_tokens) or 0
        self.messages.append({name: value for name, value in reply.message.items() if value is not None})
        assert reply.outcome is not None
        return reply.outcome

    def body(self, ids: list[int]) -> dict[str, Any]:
        return {
            "model": "m",
            "temperature": 0,
            "max_tokens": len(ids),
            "ignore_eos": True,
            "custom_logit_processor": Recite.to_str(),
            "custom_params": {"recite": " ".join(map(str, ids))},
            "chat_template_kwargs": {"style": self.style},
            "separate_reasoning": self.style != "hermes",
            "return_prompt_token_ids": True,
            "tools": TOOLS if self.style in ("qwen3", "hermes") else None,
        }

    @property
    def base(self) -> list[int]:
        """What was cached of the turn before the last: the last generated token has no row."""
        return self.prompts[-2] + self.answers[-2][:-1]

    @property
    def same(self) -> int:
        """How far the last prompt is the base."""
        return common_prefix(array("i", self.base), array("i", self.prompts[-1]))


def _assert_as_on_a_plain_server(agent: Agent) -> None:
    """Compare the last prompt's ids, and its rows in layer 0, which depend on token and position alone."""
    body = {**agent.body([11]), "messages": agent.last_sent, "cache_salt": "plain"}
    plain = agent.live.http.post("/v1/chat/completions", json=body).json()
    prompt = agent.prompts[-1]
    assert plain["choices"][0]["prompt_token_ids"] == prompt
    ours = agent.live.rows(prompt, conversation=agent.conversation.id)
    theirs = agent.live.rows(prompt, cache_salt="plain")
    assert len(ours["rows"][0]) == len(theirs["rows"][0]) == len(prompt)
    rank, found, fresh = ours["rank"], torch.tensor(ours["rows"][0]), torch.tensor(theirs["rows"][0])
    assert _relative_l2(found[:, :rank], fresh[:, :rank]).max() <= 1e-6
    # As in test_splice: each turn of a key rounds once more, and a row was turned in each turn of the agent at most.
    bound = _key_bound(torch.arange(len(prompt))) + len(agent.prompts) * 1.2e-7
    assert (_relative_l2(found[:, rank:], fresh[:, rank:]) <= bound).all()


def _counts(agent: Agent) -> tuple[int, int, int]:
    telemetry = agent.conversation.telemetry
    return telemetry.template_changes, telemetry.template_moved_tokens, telemetry.moved_tokens


@pytest.mark.parametrize("style", STYLES)
def test_what_a_template_changes_is_spliced_and_counted(talk: Callable[..., Agent], style: str) -> None:
    agent = talk(style)
    assert agent.step(1).status is Status.UNCHANGED
    moved_tokens = 0
    for turn in (2, 3):
        outcome = agent.step(turn)
        assert outcome.status is Status.SPLICED
        assert [directive.in_answer for directive in outcome.directives] == [True]
        assert (outcome.num_directives, outcome.answer_directives) == (1, 1)
        # The file's text, or what was said, stood in the answer as it does in the prompt.
        assert outcome.moved_tokens == outcome.answer_moved_tokens > 22
        assert outcome.kept_tokens == agent.same
        assert agent.cached == agent.same + outcome.moved_tokens + outcome.prefilled_tokens
        moved_tokens += outcome.moved_tokens
        assert _counts(agent) == (turn - 1, moved_tokens, moved_tokens)
    _assert_as_on_a_plain_server(agent)


@pytest.mark.parametrize("style", STYLES)
def test_reprefill_keeps_nothing_right_of_it(talk: Callable[..., Agent], style: str) -> None:
    agent = talk(style, template_changes="reprefill")
    agent.step(1)
    outcome = agent.step(2)
    assert outcome.status is Status.REPREFILL
    assert (outcome.moved_tokens, outcome.num_directives) == (0, 0)
    assert agent.cached == agent.same
    assert _counts(agent) == (0, 0, 0)


@pytest.mark.parametrize("style", STYLES)
def test_beside_an_edit_the_two_are_told_apart(talk: Callable[..., Agent], style: str) -> None:
    agent = talk(style)
    agent.step(1)
    agent.step(2)
    before = _counts(agent)
    agent.conversation.edit(agent.messages[1], "[stale]")
    outcome = agent.step(3)
    assert outcome.status is Status.SPLICED
    assert [directive.in_answer for directive in outcome.directives] == [False, True]
    edit, change = outcome.directives
    assert outcome.answer_directives == 1
    assert 22 < outcome.answer_moved_tokens <= len(agent.base) - change.end
    assert outcome.moved_tokens == outcome.answer_moved_tokens + change.start - edit.end
    changes, template_moved, moved = (now - then for now, then in zip(_counts(agent), before, strict=True))
    assert (changes, template_moved, moved) == (1, outcome.answer_moved_tokens, outcome.moved_tokens)
    _assert_as_on_a_plain_server(agent)


@pytest.mark.parametrize("style", STYLES)
def test_beside_an_edit_reprefill_keeps_what_the_edit_leaves(talk: Callable[..., Agent], style: str) -> None:
    agent = talk(style, template_changes="reprefill")
    for turn in (1, 2):
        agent.step(turn)
    agent.conversation.edit(agent.messages[1], "[stale]")
    outcome = agent.step(3)
    assert outcome.status is Status.SPLICED
    (edit,) = outcome.directives
    assert not edit.in_answer
    assert outcome.answer_directives == outcome.answer_moved_tokens == 0
    # As far as the base's answer, or where the prompt of it began otherwise than the history does.
    kept = edit.end + outcome.moved_tokens
    assert len(agent.prompts[-2]) - 10 < kept < len(agent.base) - 22
    assert agent.cached == edit.start + edit.replacement_tokens + outcome.moved_tokens
    _assert_as_on_a_plain_server(agent)
    # And goes on from there: with no edit that is new, nothing is spliced.
    assert agent.step(4).status is Status.REPREFILL
    assert agent.cached == agent.same
    assert _counts(agent)[:2] == (0, 0)


def test_an_edit_right_before_an_answer_that_begins_otherwise_is_one_difference_with_it(
    talk: Callable[..., Agent],
) -> None:
    """DeepSeek-R1: nothing worth keeping stands between an output and the reasoning that the history leaves out."""
    agent = talk("deepseek_r1")
    agent.step(1)
    agent.step(2)
    before = _counts(agent)
    agent.conversation.edit(agent.messages[3], "[stale]")
    outcome = agent.step(3)
    assert [directive.in_answer for directive in outcome.directives] == [True]
    changes, template_moved, moved = (now - then for now, then in zip(_counts(agent), before, strict=True))
    assert (changes, template_moved) == (1, moved)
    _assert_as_on_a_plain_server(agent)


@pytest.mark.parametrize("edited", [False, True], ids=["alone", "beside_an_edit"])
def test_the_reasoning_of_a_finished_loop(talk: Callable[..., Agent], edited: bool) -> None:
    """Qwen3 shows the reasoning of all calls until the user says something: then it is gone from every answer."""
    agent = talk("qwen3")
    for turn in (1, 2, 3):
        agent.step(turn)
    agent.say(f"<think>\n{words(7)}\n</think>\n\n{words(8)}")
    before = _counts(agent)
    agent.messages.append({"role": "user", "content": "And now?"})
    if edited:
        agent.conversation.edit(agent.messages[3], "[stale]")
    outcome = agent.say("<think>\nwell\n</think>\n\ndone")
    assert outcome.status is Status.SPLICED
    assert [directive.in_answer for directive in outcome.directives] == [False] * (3 + edited) + [True]
    # Three files, two or three outputs, what was said last, and the templates' own words.
    assert outcome.moved_tokens > (6 if edited else 7) * 26
    changes, template_moved, moved = (now - then for now, then in zip(_counts(agent), before, strict=True))
    assert (changes, moved) == (1, outcome.moved_tokens)
    # Beside the edit, what goes from earlier answers counts as the edit's.
    assert template_moved == (outcome.answer_moved_tokens if edited else outcome.moved_tokens)
    _assert_as_on_a_plain_server(agent)
