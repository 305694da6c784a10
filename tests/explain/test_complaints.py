"""Complaints about other tools that a preview answers; `shared/POLICY.md` numbers them, `tests/policy` has the rest."""

from __future__ import annotations

import pytest

from leyline_agent.explain import EstimatedMeter, preview, read_conversation
from leyline_agent.explain.text import preview_as_text
from leyline_agent.policy import EstimatedTokens, load_policy, parse_policy, shipped_policies
from tests.explain.conversations import agent, recorded
from tests.explain.goldens import DEMO


@pytest.mark.parametrize("name", shipped_policies())
def test_complaint_5_nothing_is_cleared_silently(name: str) -> None:
    conversation = read_conversation(DEMO)
    previewed = preview(load_policy(name), conversation, EstimatedMeter(conversation))
    text = " ".join(preview_as_text(previewed).split())
    for turn in previewed.turns:
        left = {piece.start for piece in turn.pieces if piece.message is conversation.messages[piece.start]}
        told = {idx for made in turn.applied.made for idx in made.message_idxs}

        assert set(range(len(turn.applied.original))) - left <= told
        assert all(made.reason in text and made.rule in text for made in turn.applied.new)


def test_complaint_5_what_would_be_cleared_is_known_before_it_is() -> None:
    conversation = recorded(agent(4))
    previewed = preview(
        parse_policy('version: 1\nrules: [{name: r, select: {role: tool}, replace: "[x]", when: {turns: 4}}]'),
        conversation,
        EstimatedMeter(conversation),
    )

    assert [len(turn.applied.new) for turn in previewed.turns] == [0, 0, 0, 0, 4]
    assert all("output 0" not in piece.message.text for piece in previewed.turns[4].pieces)
    assert "output 0" in conversation.messages[2].text


def test_complaint_10_a_message_is_counted_once_however_many_prompts_it_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = recorded(agent(30))
    meter = EstimatedMeter(conversation)
    counted: list[object] = []
    count = EstimatedTokens.count_message
    monkeypatch.setattr(EstimatedTokens, "count_message", lambda self, raw: counted.append(raw) or count(self, raw))
    for turn in preview(load_policy("none"), conversation, meter).turns:
        meter.measure(turn.base, turn.pieces, forget=False)

    # By the policy; the meter counted them when it was made.
    assert len(counted) == len(conversation.messages) - 1
