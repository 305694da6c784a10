"""`explain` of every shipped policy on every recording, against its goldens, and the goldens against an oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leyline_agent.policy import shipped_policies
from tests.explain import content_oracle
from tests.explain.goldens import DEMO, TURN_COLUMNS, current, golden_names, read_golden, trajectory_file
from tests.explain.oracle import RULES, expected


def _file(name: str) -> Path:
    file = trajectory_file(name)
    if not file.is_file():
        pytest.skip(f"no {file.name}; set LEYLINE_TRAJECTORIES to a folder of recorded conversations")
    return file


def test_there_is_a_golden_that_needs_no_recording() -> None:
    assert "demo_trajectory" in golden_names()
    assert trajectory_file("demo_trajectory").is_file()


@pytest.mark.parametrize("name", golden_names())
def test_every_shipped_policy_is_in_the_golden(name: str) -> None:
    assert set(read_golden(name)["policies"]) == set(shipped_policies())


@pytest.mark.parametrize("policy", shipped_policies())
@pytest.mark.parametrize("name", golden_names())
def test_explain_says_what_the_golden_says(name: str, policy: str) -> None:
    assert current(_file(name), policy) == read_golden(name)["policies"].get(policy)


def test_there_is_an_oracle_for_every_shipped_policy() -> None:
    assert {*RULES, *content_oracle.NAMES} == set(shipped_policies())


@pytest.mark.parametrize("policy", [*RULES, *content_oracle.NAMES])
@pytest.mark.parametrize("name", golden_names())
def test_the_golden_is_what_the_oracle_works_out(name: str, policy: str) -> None:
    content = json.loads(_file(name).read_text(encoding="utf-8"))
    golden = read_golden(name)["policies"][policy]
    work_out = content_oracle.expected_of if policy in content_oracle.NAMES else expected
    turns = list(work_out(policy, content if isinstance(content, dict) else {"messages": content}))

    assert [row[: len(TURN_COLUMNS) - 1] for row in golden["turns"]] == [numbers for numbers, _ in turns]
    edited = {turn: sorted(idx for row in golden["edits"] if row[0] == turn for idx in row[3]) for turn, *_ in
              golden["turns"]}  # fmt: skip
    assert edited == {numbers[0]: edited for numbers, edited in turns}


@pytest.mark.parametrize("policy", RULES)
def test_explain_agrees_with_the_oracle_where_outputs_are_long(policy: str, tmp_path: Path) -> None:
    # 140,000 tokens, so that the triggers and gates that no recording reaches are reached.
    content = json.loads(DEMO.read_text(encoding="utf-8"))
    for message in content["messages"]:
        if message["role"] == "tool":
            message["content"] *= 9
    file = tmp_path / "long.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    said = current(file, policy)

    assert [row[: len(TURN_COLUMNS) - 1] for row in said["turns"]] == [
        numbers for numbers, _ in expected(policy, content)
    ]
    assert bool(said["edits"]) == (policy != "none")


@pytest.mark.parametrize("name", golden_names())
def test_a_golden_holds_no_text(name: str) -> None:
    for rows in read_golden(name)["policies"].values():
        assert all(isinstance(number, int) for row in rows["turns"] for number in row)
        assert all(len(str(part)) < 40 or isinstance(part, list) for row in rows["edits"] for part in row)
