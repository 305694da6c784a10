"""The benchmark of the engine measures what it says, and what it is held to."""

from __future__ import annotations

from evals.micro.policy import POLICIES, agent_history, measure
from leyline_agent.policy import policy_library


def test_a_turn_of_500_messages_and_32_000_tokens_is_edited_in_two_milliseconds() -> None:
    row = measure("keep_last_tool_outputs", 500, repeats=12)

    assert abs(row["tokens"] - 32_000) < 320
    assert row["edits"] > 200
    # The fastest fifth: on a busy machine the others measure the machine.
    assert row["edit_ms"]["p20"] < 2
    assert row["count_ms"] < 1


def test_it_measures_shipped_policies_on_histories_of_the_length_asked_for() -> None:
    assert set(POLICIES) <= {entry.name for entry in policy_library()}
    assert [len(agent_history(num_messages)) for num_messages in (500, 501)] == [500, 501]
