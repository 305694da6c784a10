"""A rule with `mode: forget`, through the client and a real server: what it newly fires on is purged by itself."""

from __future__ import annotations

from typing import Any

import pytest

from evals.serving import SERVED_MODEL_NAME
from leyline_agent import Conversation
from leyline_agent.core.protocol import CONVERSATION_HEADER, Outcome
from leyline_agent.policy.loader import parse_policy

from .live import Live

pytestmark = pytest.mark.sglang

POLICY = """
version: 1
rules:
  - name: stale
    select: {role: tool, older_than: {turns: 1}}
    replace: "[stale]"
  - name: gone for good
    select: {role: tool, tool: read_secret, older_than: {turns: 3}}
    replace: "[forgotten]"
    mode: forget
"""


def _answer_and_output(idx: int, tool: str) -> list[dict[str, Any]]:
    call = {"id": f"call{idx}", "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call{idx}", "content": f"output {idx}: " + "a line of text " * 20},
    ]


def test_a_message_amortized_before_is_purged_when_a_forgetting_rule_fires(live: Live) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "find the code in the files " * 5}]
    conversation = Conversation(parse_policy(POLICY), scrub=True)
    said = []
    for idx, tool in enumerate(["read_secret", "read_file", "read_file", "read_file", "read_file", "read_file"]):
        body = {"model": SERVED_MODEL_NAME, "messages": history, "max_tokens": 1, "temperature": 0}
        prepared = conversation.prepare(body)
        response = live.http.post("/v1/chat/completions", json=prepared.body)
        outcome = Outcome.model_validate_json(response.headers["x-leyline"])
        answer, output = _answer_and_output(idx, tool)
        # The random model calls no tools: what it "answered" is scripted, as its one token is no message.
        conversation.commit(prepared, answer, outcome)
        history += [answer, output]
        said.append(outcome)
    assert [outcome.status.value for outcome in said] == [
        "unchanged",
        "unchanged",
        "spliced",
        "spliced",
        "reprefill",
        "spliced",
    ]
    purge = said[4].purge
    assert purge is not None
    assert purge.dropped_tokens > 0
    assert purge.scrubbed_tokens > 0
    # What is known now are the edits since.
    state = live.http.get("/leyline/conversation", headers={CONVERSATION_HEADER: conversation.id}).json()
    assert {edit["turn"] for turn in state["turns"] for edit in turn["edits"]} == {said[5].turn}
