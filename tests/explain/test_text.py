from __future__ import annotations

import json

import pytest

from leyline_agent.explain import EstimatedMeter, ExactMeter, Preview, preview, read_conversation
from leyline_agent.explain.text import WIDTH, comparison_as_text, preview_as_text
from leyline_agent.policy import load_policy, parse_policy, shipped_policies
from tests.explain.conversations import WordTokenizer, agent, recorded
from tests.explain.goldens import DEMO

_RULES = """\
version: 1
rules:
  - {name: old, select: {role: tool, older_than: {turns: 1}}, replace: "[x]", when: {turns: 2}}
  - {name: none of these, select: {role: tool, tool: python}, drop: true}
"""


def _preview(policy: str = _RULES, num_turns: int = 4, *, exact: bool = False) -> Preview:
    conversation = recorded(agent(num_turns))
    meter = ExactMeter(conversation, WordTokenizer(), "words") if exact else EstimatedMeter(conversation)
    return preview(parse_policy(policy), conversation, meter, name="mine")


def test_each_edit_is_told_with_its_reason() -> None:
    text = " ".join(preview_as_text(_preview()).split())

    assert "+ old: replaced message 2 (about 53 -> 5 tokens): tool output of bash, 1 turn old" in text


def test_a_rule_that_does_nothing_says_why_once_for_as_long_as_that_holds() -> None:
    text = preview_as_text(_preview())

    assert text.count("- old: nothing: trigger not met") == 1
    assert text.count("- none of these: nothing:") == 1


def test_a_turn_has_its_numbers() -> None:
    previewed = _preview()
    reuse = previewed.turns[3].reuse
    row = next(line for line in preview_as_text(previewed).splitlines() if line.startswith("   4"))

    assert row.split() == [
        *("4", "7", f"{previewed.turns[3].tokens_before}", f"{reuse.prompt_tokens}", f"{reuse.kept_tokens}"),
        *(f"{reuse.moved_tokens}", f"{reuse.recomputed_tokens}", f"{reuse.recomputed_tokens_without_splice}", "1"),
    ]


@pytest.mark.parametrize(
    ("exact", "words"), [(False, "Tokens: an estimate"), (True, "Tokens: exact, counted by words")]
)
def test_it_says_how_tokens_are_counted(exact: bool, words: str) -> None:
    previewed = _preview(exact=exact)

    assert words in " ".join(preview_as_text(previewed).split())
    assert words in " ".join(comparison_as_text([previewed]).split())


def test_directives_are_listed_on_demand() -> None:
    previewed = _preview()
    (change,) = previewed.turns[2].reuse.changes

    assert f"directive [{change.start}, {change.end}) -> 5 tokens, amortize" in preview_as_text(
        previewed, directives=True
    )
    assert "> directive" not in preview_as_text(previewed)


def test_a_turn_that_forgets_says_so() -> None:
    policy = 'version: 1\nrules: [{name: s, select: {role: assistant, matches: step}, redact: "[k]", mode: forget}]'

    assert preview_as_text(_preview(policy)).count("! forgets what was sent before") == 4


def test_more_directives_than_a_server_takes_are_told() -> None:
    policy = 'version: 1\nrules: [{name: r, select: {role: tool}, replace: "[x]", when: {turns: %d}}]'

    assert "! a server carries out the first 256 of them" in preview_as_text(_preview(policy % 259, 260))
    assert "! a server" not in preview_as_text(_preview(policy % 250, 251))


def test_policies_stand_side_by_side() -> None:
    conversation = recorded(agent(6))
    previews = [
        preview(load_policy(name), conversation, EstimatedMeter(conversation), name=name)
        for name in ("none", "keep_last_tool_outputs")
    ]
    none, keep = (line.split() for line in comparison_as_text(previews).splitlines()[-2:])

    assert (none[:3], keep[:3]) == (["none", "0", "0"], ["keep_last_tool_outputs", "4", "4"])
    assert none[5] == none[6]


def test_of_a_long_path_the_comparison_shows_the_end() -> None:
    conversation = recorded(agent(2))
    name = "../../policies/of/the/team/evict_old_outputs.yaml"
    previewed = preview(parse_policy(_RULES), conversation, EstimatedMeter(conversation), name=name)

    row = comparison_as_text([previewed]).splitlines()[-1]

    assert row.split()[0] == "…e/team/evict_old_outputs.yaml"


@pytest.mark.parametrize("policy", shipped_policies())
def test_everything_fits_a_terminal(policy: str) -> None:
    conversation = read_conversation(DEMO)
    previewed = preview(load_policy(policy), conversation, EstimatedMeter(conversation), name=policy)
    text = "\n".join([preview_as_text(previewed, directives=True), comparison_as_text([previewed])])

    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_text_is_that_of_the_json() -> None:
    # Both come from one preview; this holds them together where one of them is changed.
    previewed = _preview()
    row = json.loads(json.dumps(previewed.as_json()))["totals"]

    assert f"{row['edits']} edits in {row['turns_with_edits']} of {row['turns']} turns" in preview_as_text(previewed)
