from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import leyline_agent
from leyline_agent.errors import PolicyError
from leyline_agent.policy import load_policy, parse_policy
from leyline_agent.policy.loader import MAX_POLICY_BYTES

_GOOD = """\
version: 1
rules:
  - name: old
    select: {role: tool, older_than: {turns: 2}}
    replace: "[{tool}]"
"""


def _with(old: str, new: str) -> str:
    assert old in _GOOD
    return _GOOD.replace(old, new)


_TURNS = "rules[0].select.older_than.turns"
_MISTAKES = [
    pytest.param(
        _with("role:", "rol:"), 4, 14, "rules[0].select.rol", ["unknown key", "did you mean 'role'?"], id="unknown key"
    ),
    pytest.param(_with("turns:", "trns:"), 4, 39, "rules[0].select.older_than.trns", ["'turns'?"], id="nested key"),
    pytest.param("versoin: 1\nrules: []", 1, 1, "versoin", ["did you mean 'version'?"], id="unknown key at the top"),
    pytest.param(
        _with("role: tool", "role: tol"),
        4,
        20,
        "rules[0].select.role",
        ["got the text 'tol'", "'tool', 'user', 'assistant' or 'system'", "did you mean 'tool'?"],
        id="unknown value",
    ),
    pytest.param(
        _GOOD + "    mode: amortise\n", 6, 11, "rules[0].mode", ["did you mean 'amortize'?"], id="unknown mode"
    ),
    pytest.param(_with("turns: 2", "turns: '2'"), 4, 46, _TURNS, ["the text '2'"], id="type"),
    pytest.param(
        _with("{turns: 2}", "2"),
        4,
        38,
        "rules[0].select.older_than",
        ["got 2", "such as {turns: 2}"],
        id="number for mapping",
    ),
    pytest.param(
        _with("role: tool", "role: tool, keep: 3"),
        4,
        26,
        "rules[0].select.keep",
        ["'keep' is a key of the policy or of a rule"],
        id="key of another place",
    ),
    pytest.param(
        _with('"[{tool}]"', "[{tool}]"),
        5,
        14,
        "rules[0].replace",
        ["got a list", "needs quotes"],
        id="stub without quotes",
    ),
    pytest.param("version: 1\nrules:\n  name: old\n", 3, 3, "rules", ["a mapping", "'- '"], id="rules as a mapping"),
    pytest.param("rules: []\n", 1, 1, "version", ["missing; add 'version: 1'"], id="no version"),
    pytest.param(_with("turns: 2", "turns: -1"), 4, 46, _TURNS, ["0 or more"], id="negative"),
    pytest.param(_with("turns: 2", "turns: yes"), 4, 46, _TURNS, ["got true"], id="bool"),
    pytest.param(_with("role: tool", "role: tool, tool: 3"), 4, 32, "rules[0].select.tool", ["a list"], id="tool type"),
    pytest.param(
        _with("role: tool", "role: tool, tool: [a, 3]"), 4, 36, "rules[0].select.tool[1]", ["text"], id="tool in a list"
    ),
    pytest.param(
        _with("role: tool", "role: user, tool: bash"),
        4,
        26,
        "rules[0].select.tool",
        ["'role: tool'"],
        id="tool of user",
    ),
    pytest.param(
        _with("role: tool", "role: tool, opening: true"),
        4,
        26,
        "rules[0].select.opening",
        ["'role: user'"],
        id="opening",
    ),
    pytest.param(_GOOD + "    drop: true\n", 6, 5, "rules[0].drop", ["2 actions, replace and drop"], id="two actions"),
    pytest.param(
        "version: 1\nrules:\n  - name: old\n    select: {role: tool}\n",
        3,
        5,
        "rules[0]",
        ["'old' does nothing", "replace, drop, collapse, truncate"],
        id="no action",
    ),
    pytest.param(_with('replace: "[{tool}]"', "drop: false"), 5, 11, "rules[0].drop", ["expected true"], id="false"),
    pytest.param(_with('"[{tool}]"', "''"), 5, 14, "rules[0].replace", ["not empty"], id="empty stub"),
    pytest.param(
        _with("{tool}]", "{tol}]"), 5, 5, "rules[0].replace", ["{tol}", "did you mean {tool}?"], id="placeholder"
    ),
    pytest.param(
        _with("replace:", "collapse:"), 5, 5, "rules[0].collapse", ["{tool}", "{turns}"], id="placeholder of replace"
    ),
    pytest.param(_with("{tool}]", "{tool!r}]"), 5, 5, "rules[0].replace", ["more than a name"], id="conversion"),
    pytest.param(_with("{tool}]", "{tool.x}]"), 5, 5, "rules[0].replace", ["more than a name"], id="attribute"),
    pytest.param(_with("{tool}]", "}"), 5, 5, "rules[0].replace", ["literal brace"], id="single brace"),
    pytest.param(
        _with("role: tool, older", "role: user, older"),
        5,
        5,
        "rules[0].replace",
        ["{tool}", "{lines}"],
        id="tool of user",
    ),
    pytest.param(
        _with("role: tool", "role: user").replace("replace", "collapse"),
        5,
        5,
        "rules[0].collapse",
        ["'role: tool'"],
        id="collapse of user",
    ),
    pytest.param(
        _GOOD + "  - {name: old, select: {role: tool}, drop: true}\n", 6, 6, "rules[1].name", ["second"], id="names"
    ),
    pytest.param(
        _GOOD + "    when: {every: 5}\n", 6, 19, "rules[0].when.every", ["got 5", "'5 turns'"], id="every as a number"
    ),
    pytest.param(_GOOD + "when: {}\n", 6, 7, "when", ["says nothing", "tokens, messages"], id="empty trigger"),
    pytest.param(
        _GOOD + "when: {any_of: [{tokens: 1}, {token: 2}]}\n",
        6,
        31,
        "when.any_of[1].token",
        ["did you mean 'tokens'?"],
        id="key in a nested trigger",
    ),
    pytest.param(_GOOD + "when: {context: 70}\n", 6, 17, "when.context", ["got 70", "0.7"], id="share in percent"),
    pytest.param(_GOOD + "when: {context: half}\n", 6, 17, "when.context", ["'half'", "a number"], id="share in words"),
    pytest.param(_GOOD + "when: {tokens: 0}\n", 6, 16, "when.tokens", ["got 0", "1 or more"], id="trigger at nothing"),
    pytest.param(
        _with('replace: "[{tool}]"', "truncate: {head: 20 line s}"),
        5,
        22,
        "rules[0].truncate.head",
        ["'20 line s'", "'20 lines' or '2000 chars'"],
        id="amount",
    ),
    pytest.param(
        _with('replace: "[{tool}]"', "truncate: {head: 20 char, tail: 3 lnes}"),
        5,
        37,
        "rules[0].truncate.tail",
        ["did you mean '3 lines'?"],
        id="misspelt unit",
    ),
    pytest.param(
        _with('replace: "[{tool}]"', "truncate: {tail: 0 lines}"),
        5,
        15,
        "rules[0].truncate",
        ["keeps nothing", "replace"],
        id="truncate to nothing",
    ),
    pytest.param(
        _with('replace: "[{tool}]"', "clear_arguments: {longer: 5 chars}"),
        5,
        23,
        "rules[0].clear_arguments.longer",
        ["unknown key", "longer_than"],
        id="key of one form of a value",
    ),
    pytest.param(
        _with('replace: "[{tool}]"', "clear_arguments: no"),
        5,
        22,
        "rules[0].clear_arguments",
        ["expected true"],
        id="neither form of a value",
    ),
    pytest.param(
        _with("role: tool", "role: tool, index: {from: 3, to: 1}"),
        4,
        34,
        "rules[0].select.index.from",
        ["no message lies from 3 to 1"],
        id="empty range",
    ),
    pytest.param(
        _with("role: tool", "role: tool, index: first"), 4, 33, "rules[0].select.index", ["'first'"], id="place"
    ),
    pytest.param(
        _with("role: tool", "role: tool, matches: '(a'"), 4, 26, "rules[0].select.matches", ["no regular"], id="pattern"
    ),
    pytest.param(
        _with("role: tool", "role: [tool, tol]"), 4, 27, "rules[0].select.role[1]", ["'tool'?"], id="one of the roles"
    ),
    pytest.param(_with("role: tool", "role: system"), 4, 14, "rules[0].select.role", ["only be redacted"], id="system"),
    pytest.param(
        _with("role: tool", "role: user, is_error: true"),
        4,
        26,
        "rules[0].select.is_error",
        ["tool"],
        id="error of user",
    ),
    pytest.param(
        _with("role: tool", "role: tool, tool: bash, exclude_tool: bash"),
        4,
        38,
        "rules[0].select.exclude_tool",
        ["can never fire"],
        id="all tools are excluded",
    ),
    pytest.param(
        _with("role: tool", "role: tool, is_error: true") + "keep: {errors: true}\n",
        4,
        26,
        "rules[0].select.is_error",
        ["can never fire", "a 'keep' of its own"],
        id="errors are kept",
    ),
    pytest.param(
        _GOOD + "    keep: {min_reclaim_tokens: 9, stop_after_tokens: 5}\n",
        6,
        35,
        "rules[0].keep.stop_after_tokens",
        ["may never edit"],
        id="stops before it begins",
    ),
    pytest.param(
        _GOOD + "context_window: 100\nwhen: {tokens: 200}\n",
        7,
        8,
        "when.tokens",
        ["the context window has 100", "can never fire"],
        id="trigger beyond the window",
    ),
    pytest.param(
        _GOOD.replace('replace: "[{tool}]"', "drop: true")
        + "  - {name: b, select: {role: tool, older_than: {turns: 3}}"
        ", drop: true}\n",
        6,
        6,
        "rules[1].name",
        ["can never fire", "'old'"],
        id="rule behind one that drops everything",
    ),
    pytest.param(
        _with('replace: "[{tool}]"', "redact: x"), 5, 5, "rules[0].redact", ["add 'matches'"], id="redact what?"
    ),
    pytest.param(
        _with('replace: "[{tool}]"', "redact: '[sk-1]'").replace("role: tool", "role: tool, matches: 'sk-[0-9]+'"),
        5,
        5,
        "rules[0].redact",
        ["finds again"],
        id="redacted text that matches",
    ),
    pytest.param(
        _with("role: tool", "role: tool, python: os.system"),
        4,
        34,
        "rules[0].select.python",
        ["'package.module:function'"],
        id="detector",
    ),
    pytest.param(_with("name: old", "name:"), 3, 10, "rules[0].name", ["got nothing"], id="empty value"),
    pytest.param(_with("version: 1", "version: 2"), 1, 10, "version", ["expected 1, got 2"], id="version"),
    pytest.param(_with("version: 1", "version: '1'"), 1, 10, "version", ["expected 1, got '1'"], id="version as text"),
    pytest.param(_with("version: 1", "version: true"), 1, 10, "version", ["got True"], id="version as bool"),
    pytest.param("rules: []\n", 1, 1, "version", ["missing"], id="no version"),
    pytest.param("version: 1\n", 1, 1, "rules", ["missing"], id="no rules"),
    pytest.param("version: 1\nrules: {}\n", 2, 8, "rules", ["a mapping", "a list"], id="rules as mapping"),
    pytest.param("version: 1\nrules: [x]\n", 2, 9, "rules[0]", ["'x'", "name, select"], id="rule as text"),
    pytest.param(_GOOD + "keep: {last: -2}\n", 6, 14, "keep.last", ["got -2", "0 or more"], id="negative guard"),
    pytest.param(_GOOD + "rules: []\n", 6, 1, "rules", ["twice", "line 2"], id="duplicate key"),
    pytest.param(_with("role: tool", "role: tool, role: user"), 4, 26, "rules[0].select.role", ["twice"], id="nested"),
    pytest.param("version: 1\non: 2\nrules: []", 2, 1, None, ["'on'"], id="key that YAML reads as a bool"),
    pytest.param("version: 1\n? [a]\n: 2\n", 2, 3, None, ["a list or mapping"], id="key that is a list"),
    pytest.param("version: 1\nrules:\n\t- name: x\n", 3, 1, None, ["not valid YAML", "tab"], id="tab"),
    pytest.param("version: 1\nrules: [\n", 3, 1, None, ["not valid YAML"], id="open bracket"),
    pytest.param("version: 1\nrules: []]\n", 2, 10, None, ["not valid YAML", "rules: []]"], id="bracket too many"),
    pytest.param("version: 1\n---\nversion: 1\n", 2, 1, None, ["not valid YAML", "document"], id="two documents"),
    pytest.param("version: 1\nrules: !!python/name:os.system []", 2, 8, None, ["tag"], id="python tag"),
    pytest.param("version: 1\nname: 2020-13-13\nrules: []", 2, 7, None, ["month", "quote it"], id="no such month"),
    pytest.param("version: " + "9" * 5000, 1, 10, None, ["digits"], id="number without end"),
    pytest.param("version: 1\nname: a\x07b\n", 2, 8, None, ["'\\x07'"], id="control character"),
    pytest.param("", 1, 1, None, ["empty", "version: 1"], id="empty"),
    pytest.param("# only a comment\n", 1, 1, None, ["empty"], id="comment"),
    pytest.param("- version: 1\n", 1, 1, None, ["a list", "mapping"], id="list at the top"),
    pytest.param("hello", 1, 1, None, ["the text 'hello'"], id="text at the top"),
    pytest.param("a: &a [x]\nb: [*a, *a]\n", 2, 5, None, ["alias '*a'"], id="alias"),
    pytest.param("a: " + "[" * 100_000, 1, 35, None, ["deep"], id="nested without end"),
    pytest.param(
        _GOOD + "when: {any_of: [{tokenz: 1}]}\n",
        6,
        18,
        "when.any_of[0].tokenz",
        ["did you mean 'tokens'?"],
        id="key of the only entry of a list",
    ),
    pytest.param(
        _with("role: tool", "role: [tol]"), 4, 21, "rules[0].select.role[0]", ["'tool'?"], id="only entry of a list"
    ),
    pytest.param(
        _with('replace: "[{tool}]"', "clear_arguments: {longer_than: 500}"),
        5,
        36,
        "rules[0].clear_arguments.longer_than",
        ["got 500", "'2000 chars'"],
        id="value in one form of a value",
    ),
    pytest.param(
        _with("role: tool", "role: tool, superseded: path"),
        4,
        38,
        "rules[0].select.superseded",
        ["got the text 'path', expected true or a mapping such as {argument: path}"],
        id="text for a mapping",
    ),
    pytest.param(
        _with("role: tool", "role: tool, index: [0, 5]"),
        4,
        33,
        "rules[0].select.index",
        ["got a list, expected a whole number or a mapping with the keys from, to"],
        id="range as a list",
    ),
    pytest.param(
        _with("{turns: 2}", "2 turns"),
        4,
        38,
        "rules[0].select.older_than",
        ["got the text '2 turns', expected a mapping such as {turns: 2}"],
        id="number with its unit",
    ),
    pytest.param(
        "version: 1\nrules:\n  - name: old\n    select:\n    role: tool\n    drop: true\n",
        4,
        12,
        "rules[0].select",
        ["got nothing", "is what belongs to it indented?"],
        id="mapping that is not indented",
    ),
    pytest.param(
        _with("name: old", "name: 2024-01-01"),
        3,
        11,
        "rules[0].name",
        ["got 2024-01-01, expected text; put it in quotes"],
        id="date for text",
    ),
    pytest.param(
        _with("role: tool", 'role: tool, matches: "\\bC-[0-9]"'),
        4,
        26,
        "rules[0].select.matches",
        ["backspace", "single quotes"],
        id="backspace for the edge of a word",
    ),
    pytest.param(
        _with("role: tool", 'role: tool, matches: "\\d"'), 4, 37, None, ["not valid YAML", "single quotes"], id="escape"
    ),
    pytest.param(
        _with('"[{tool}]"', "[evicted: {tool}, {lines} lines]"),
        5,
        40,
        None,
        ["not valid YAML", "in quotes"],
        id="stub of two placeholders without quotes",
    ),
    pytest.param(_with('"[{tool}]"', "`x`"), 5, 14, None, ["not valid YAML", "needs quotes"], id="backtick"),
    pytest.param(
        _with("role: tool", "role: tool, tool: *"), 4, 33, None, ["not valid YAML", "needs quotes"], id="star"
    ),
    pytest.param(
        _with("name: old", "name: a: b"), 3, 12, None, ["not valid YAML", "needs quotes"], id="colon in a text"
    ),
    pytest.param(_with("    select", "   select"), 4, 4, None, ["not valid YAML", "indented"], id="indentation"),
    pytest.param(_with('"[{tool}]"', '"[{tool}]'), 5, 14, None, ["not valid YAML", "opened here"], id="open quotes"),
    pytest.param(
        _with("role: tool", 'role: tool, tool: read_file, exclude_tool: "read_*"'),
        4,
        43,
        "rules[0].select.exclude_tool",
        ["can never fire"],
        id="the tool is excluded by a glob",
    ),
    pytest.param(
        _with("role: tool", 'role: tool, exclude_tool: "**"'),
        4,
        26,
        "rules[0].select.exclude_tool",
        ["can never fire"],
        id="all tools are excluded by another glob",
    ),
    pytest.param(
        _with("role: tool", "role: tool, index: {from: -2}"),
        4,
        26,
        "rules[0].select.index",
        ["the last 2 messages", "can never fire"],
        id="place that is never so old",
    ),
    pytest.param(
        _with("role: tool", "role: tool, index: -1"), 4, 26, "rules[0].select.index", ["never fire"], id="last and old"
    ),
    pytest.param(
        _with("role: tool", "role: tool, tag: old_1") + "keep: {tagged: 'old*'}\n",
        4,
        26,
        "rules[0].select.tag",
        ["can never fire", "a 'keep' of its own"],
        id="the tag is kept by the policy",
    ),
    pytest.param(
        _with("role: tool", "role: tool, tag: old_1") + "    keep: {tagged: 'old*'}\n",
        6,
        12,
        "rules[0].keep.tagged",
        ["can never fire"],
        id="the tag is kept by a glob",
    ),
    pytest.param(
        _GOOD + "context_window: 100\nwhen: {any_of: [{tokens: 200}, {all_of: [{turns: 3}, {tokens: 300}]}]}\n",
        7,
        18,
        "when.any_of[0].tokens",
        ["waits for 200 tokens", "can never fire"],
        id="nested triggers beyond the window",
    ),
    pytest.param(
        "version: 1\nwhen: {tokens: 9}\nrules:\n  - {name: old, select: {role: tool, tool: 'read_*'}, drop: true}\n"
        "  - {name: b, select: {role: tool, tool: read_file}, replace: x}\n",
        5,
        6,
        "rules[1].name",
        ["can never fire", "'old'"],
        id="rule behind one with the same trigger and a wider glob",
    ),
]


@pytest.mark.parametrize(("text", "line", "column", "key", "words"), _MISTAKES)
def test_a_mistake_is_reported_with_its_place(
    text: str, line: int, column: int, key: str | None, words: list[str]
) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, file="policy.yaml")

    error = caught.value
    assert (error.file, error.line, error.column, error.key) == ("policy.yaml", line, column, key)
    assert [word for word in words if word not in str(error)] == []
    assert str(error).startswith(f"policy.yaml:{line}:{column}: ")
    # What only follows from it is no mistake of its own, but for a key that is not indented: it is unknown there.
    assert [other.key for other in error.others] == (["rules[0].role"] if "indented?" in str(error) else [])


def test_all_mistakes_of_a_file_are_told_in_order() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(
            _GOOD.replace("turns: 2", "turns: two").replace("role:", "rol:") + "    mode: forge\nkeep: {lst: 2}\n",
            file="policy.yaml",
        )

    first, others = caught.value, caught.value.others
    assert [(each.line, each.column, each.key) for each in (first, *others)] == [
        (4, 14, "rules[0].select.rol"),
        (4, 45, _TURNS),
        (6, 11, "rules[0].mode"),
        (7, 8, "keep.lst"),
    ]
    assert all(str(other).startswith(f"policy.yaml:{other.line}:{other.column}: ") for other in others)
    # A traceback shows notes.
    assert first.__notes__ == [str(other) for other in others]


def test_a_mistake_shows_the_line_and_marks_the_place() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(_with("role:", "rol:"))

    assert str(caught.value).splitlines()[-2:] == [
        "  4 |     select: {rol: tool, older_than: {turns: 2}}",
        "    |              ^",
    ]


def test_a_long_list_of_keys_fits_the_width_of_a_page() -> None:
    with pytest.raises(PolicyError, match="older_than") as caught:
        parse_policy(_with("role:", "rol:"), file="policy.yaml")

    assert max(map(len, str(caught.value).splitlines())) <= 100


@pytest.mark.parametrize(
    "change",
    [
        ("role: tool", "role: tool, tool: 'read_*', exclude_tool: read_file"),
        ("role: tool", "role: tool, tool: 'read_*', exclude_tool: 'read_f*'"),
        ("role: tool", "role: tool, index: -3"),
        ("role: tool", "role: tool, index: {to: -1}"),
        ('replace: "[{tool}]"', "replace: x\n    when: {any_of: [{tokens: 200}, {turns: 3}]}\ncontext_window: 100"),
        ("role: tool", "role: tool, matches: '\\bC-[0-9]'"),
        ("role: tool", "role: tool, tag: 'old*'"),
    ],
)
def test_a_rule_that_may_fire_is_no_mistake(change: tuple[str, str]) -> None:
    assert len(parse_policy(_with(*change) + "keep: {tagged: old_1}\n").rules) == 1


def test_a_rule_with_another_trigger_may_follow_one_that_drops_everything() -> None:
    dropping = _GOOD.replace('replace: "[{tool}]"', "drop: true\n    when: {tokens: 9}")

    assert len(parse_policy(dropping + "  - {name: b, select: {role: tool}, replace: x}\n").rules) == 2


def test_of_several_mistakes_the_topmost_is_reported() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy("rulez: []\nversion: 2\nrules: {}\n")

    assert caught.value.key == "rulez"


def test_text_above_the_limit_is_refused() -> None:
    with pytest.raises(PolicyError, match="page of YAML"):
        parse_policy("#" * (MAX_POLICY_BYTES + 1))


def test_a_missing_file_names_the_shipped_policies(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"absent\.yaml: no such file.*keep_last_tool_outputs, langchain"):
        load_policy(tmp_path / "absent.yaml")


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(PolicyError, match="did you mean 'keep_last_tool_outputs'"):
        load_policy("keep_last_tool_output")


@pytest.mark.parametrize("path", ["nofile.yaml", "nofile.yml", "./keep_last_tool_output", "folder/none"])
def test_a_missing_file_is_no_misspelt_name(path: str) -> None:
    with pytest.raises(PolicyError, match="no such file") as raised:
        load_policy(path)
    assert "did you mean" not in str(raised.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="folder"):
        load_policy(tmp_path)


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"version: 1\nname: caf\xe9\nrules: []\n")

    with pytest.raises(PolicyError, match=r"0xe9.*UTF-8") as caught:
        load_policy(file)

    assert caught.value.line == 2


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "windows.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + _GOOD.replace("\n", "\r\n").encode())

    assert load_policy(file) == parse_policy(_GOOD)


def test_a_file_without_a_suffix_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text(_GOOD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    assert load_policy("mine") == parse_policy(_GOOD)


def test_a_shipped_name_is_not_shadowed_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").write_text(_GOOD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    assert load_policy("none").rules == ()


def test_shipped_policies_are_found_inside_an_installed_package(tmp_path: Path) -> None:
    package = Path(leyline_agent.__file__).parent
    shutil.copytree(package, tmp_path / "leyline_agent", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(package.parent / "policies", tmp_path / "leyline_agent" / "policies")
    program = "import leyline_agent.policy as p; print(p.__file__, p.load_policy('none').name)"

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout.split() == [str(tmp_path / "leyline_agent" / "policy" / "__init__.py"), "none"], done.stderr
