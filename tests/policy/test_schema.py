from __future__ import annotations

import pydantic
import pytest

from leyline_agent.errors import PolicyError
from leyline_agent.policy import explain_policy, load_policy, parse_policy

_TWO_AGES = """\
version: 1
name: two ages
rules:
  - {name: a, select: {role: tool, older_than: {turns: 2}}, replace: "[x]"}
  - {name: b, select: {role: tool, tool: think}, drop: true}
  - {name: c, select: {role: tool, older_than: {turns: 9}}, drop: true}
"""


def test_with_turns_sets_the_age_in_a_copy() -> None:
    policy = load_policy("keep_last_tool_outputs")

    changed = policy.with_turns(8)

    ages = [rule.select.older_than.turns for p in (policy, changed) for rule in p.rules if rule.select.older_than]
    assert ages == [2, 8]
    assert changed.rules[0].model_copy(update={"select": policy.rules[0].select}) == policy.rules[0]


def test_with_turns_leaves_rules_without_an_age_alone() -> None:
    policy = parse_policy("\n".join(_TWO_AGES.splitlines()[:-1]))

    assert [rule.select.older_than is None for rule in policy.with_turns(5).rules] == [False, True]


@pytest.mark.parametrize("turns", [-1, True, 2.0, "2"])
def test_with_turns_refuses_what_is_no_number_of_turns(turns: object) -> None:
    with pytest.raises(PolicyError, match="whole number of 0 or more"):
        load_policy("keep_last_tool_outputs").with_turns(turns)  # type: ignore[arg-type]


def test_with_turns_refuses_a_policy_that_it_would_not_change() -> None:
    with pytest.raises(PolicyError, match="'none': it has no rule that selects by age"):
        load_policy("none").with_turns(2)


def test_with_turns_refuses_to_make_different_ages_one() -> None:
    with pytest.raises(PolicyError, match=r"different ages \[2, 9\]"):
        parse_policy(_TWO_AGES).with_turns(4)


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(pydantic.ValidationError):
        load_policy("none").rules = ()  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    import ast
    import inspect

    from leyline_agent.policy import conditions, schema, selecting

    undocumented = [
        f"{node.name}.{ast.unparse(field.target)}"
        for module in (conditions, schema, selecting)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef)
        for field, after in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(field, ast.AnnAssign)
        and not ast.unparse(field.target).startswith("_")
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert undocumented == []


def test_explain_says_each_rule_as_a_sentence() -> None:
    policy = parse_policy(
        """\
version: 1
name: mine
rules:
  - {name: a, select: {role: tool, tool: [bash, "read_*"], older_than: {turns: 1}}, replace: "[{tool}]"}
  - {name: b, select: {role: tool, older_than: {turns: 3}}, collapse: "[{turns}]", mode: forget}
  - {name: c, select: {role: tool, tool: think}, drop: true}
  - {name: d, select: {role: assistant, older_than: {turns: 9}}, drop: true}
  - {name: e, select: {role: user}, drop: true}
  - {name: f, select: {role: user, opening: true}, replace: "[x]"}
keep: {last: 4}
"""
    )

    text = explain_policy(policy)

    for part in (
        "mine\n",
        "1. a: put '[{tool}]' in the place of the content of every tool output of bash or read_* older than 1 turn,",
        "2. b: put one message '[{turns}]' in the place of consecutive turns",
        "a tool output older than 3 turns. What follows is prefilled again",
        "3. c: drop every tool output of think together with its call. What follows keeps its KV",
        "4. d: drop every assistant message older than 9 turns together with the results of its calls.",
        "5. e: drop every user message (except the task).",
        "every user message (the task included),",
        "the last 4 results",
    ):
        assert part in text


def test_explain_says_that_a_policy_without_rules_edits_nothing() -> None:
    assert explain_policy(parse_policy("version: 1\nrules: []")).endswith("It edits nothing.")
