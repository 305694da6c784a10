"""The benchmark of the engine measures what it says; what it measures are its rows, not a test."""

from __future__ import annotations

import json

import pytest

from evals.micro import policy as benchmark
from evals.micro.policy import POLICIES, agent_history, measure
from leyline_agent.core.messages import Message
from leyline_agent.policy import Applied, EstimatedTokens, PolicyRun, apply_policy, load_policy, policy_library


def test_a_row_is_about_500_messages_of_32_000_tokens_and_hundreds_of_edits() -> None:
    row = measure("keep_last_tool_outputs", 500, repeats=4)

    assert abs(row["tokens"] - 32_000) < 320
    assert row["edits"] > 200
    assert min(row["prepare_ms"]["p50"], row["edit_ms"]["p50"]) > 0
    assert row["replay_ms"] > 0
    json.dumps(row)


def test_edits_that_differ_from_those_of_a_replay_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_last(policy: object, messages: list[Message]) -> Applied:
        return apply_policy(load_policy("none"), messages)

    monkeypatch.setattr(benchmark, "apply_policy", without_the_last)

    with pytest.raises(AssertionError, match="different edits"):
        measure("keep_last_tool_outputs", 60, repeats=4)


def test_it_measures_shipped_policies_on_histories_of_the_length_asked_for() -> None:
    assert set(POLICIES) <= {entry.name for entry in policy_library()}
    assert [len(agent_history(num_messages)) for num_messages in (500, 501)] == [500, 501]


class _Counted(EstimatedTokens):
    """Counts how often it counts."""

    num_counted = 0

    def count_message(self, message: object) -> int:
        self.num_counted += 1
        return super().count_message(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_messages", [100, 500, 2000])
def test_a_turn_reads_what_is_new_however_long_the_conversation(name: str, num_messages: int) -> None:
    counter = _Counted()
    # Batches, budgets and searches come at some turns: one of each is within twenty.
    history = agent_history(num_messages + 39)
    run = PolicyRun(load_policy(name), counter=counter)
    run.apply(history[:num_messages])
    edits = counted = 0
    for end in range(num_messages + 2, num_messages + 40, 2):
        before, counter.num_counted = len(run.apply(history[: end - 2]).made), 0
        edits += len(run.apply(history[:end]).made) - before
        counted += counter.num_counted

    # A call and its result are counted as they come, a stub as it is made, and an output once more for {tokens}. A rule
    # that waits until enough can go tries with what is there, here at most 25 outputs.
    assert counted <= 19 * 30 + 5 * edits
