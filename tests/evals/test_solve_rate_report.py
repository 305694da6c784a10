"""What the report says of synthetic rows: in words, as JSON, and on the command line."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals.solve_rate.report import Comparison, Report, make_report
from evals.solve_rate.report_cli import add_commands
from evals.solve_rate.report_json import report_as_json
from evals.solve_rate.report_text import print_report
from evals.solve_rate.rows import SolveRateError
from evals.solve_rate.statistics import Interval
from tests.evals.synthetic_runs import KEEP, RUN, paired_rows, row, three_arms, write_run

SPLICE, REPREFILL = f"{KEEP}/splice", f"{KEEP}/reprefill"


def _text(report: Report) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=140))
    return out.getvalue()


def _only_comparison(report: Report) -> Comparison:
    ((comparison,),) = (group.comparisons for group in report.groups)
    return comparison


def _run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


def _eight_tasks(pairs: str, num_seeds: int, order: str) -> list[list[str]]:
    """Spread pairs over eight tasks: like ones together, or in turn."""
    each = pairs.split()
    assert len(each) == 8 * num_seeds
    return [each[idx * num_seeds : (idx + 1) * num_seeds] if order == "together" else each[idx::8] for idx in range(8)]


@pytest.mark.parametrize("order", ["together", "in turn"])
@pytest.mark.parametrize(
    ("num_seeds", "pairs"),
    [
        pytest.param(2, "++ " * 3 + "+- " * 2 + "-+ " * 4 + "-- " * 7, id="2 seeds"),
        pytest.param(2, "++ " * 5 + "-+ " * 2 + "-- " * 9, id="2 seeds, and the policy loses nothing"),
        pytest.param(2, "++ " * 5 + "-- " * 6 + "-x " * 5, id="2 seeds, the same 5 solved, 5 errors left out"),
        pytest.param(5, "++ " * 8 + "+- " * 5 + "-+ " * 10 + "-- " * 17, id="5 seeds"),
        pytest.param(5, "++ " * 13 + "-+ " * 5 + "-- " * 22, id="5 seeds, and the policy loses nothing"),
        pytest.param(5, "+- " * 13 + "-+ " * 18 + "-- " * 9, id="5 seeds, and no pair agrees"),
    ],
)
def test_the_papers_sample_sizes_are_not_distinguishable(num_seeds: int, pairs: str, order: str) -> None:
    """Eight tasks, about 31.2% against 45.5%."""
    report = make_report(paired_rows("none", REPREFILL, _eight_tasks(pairs, num_seeds, order)))
    (group,) = report.groups
    base, other = (arm.rate.value for arm in group.arms)
    # The nearest that 16 or 40 episodes can come.
    assert base == pytest.approx(0.312, abs=0.015)
    assert other == pytest.approx(0.455, abs=0.02)
    assert _only_comparison(report).verdict == "not distinguishable"
    assert f"{REPREFILL} against none: not distinguishable." in _text(report)
    assert report_as_json(report)["groups"][0]["comparisons"][0]["verdict"] == "not distinguishable"


def test_a_clear_difference_is_called_one_and_in_which_direction() -> None:
    better = make_report(paired_rows("none", SPLICE, [["-+", "--", "++"]] * 20))
    worse = make_report(paired_rows("none", SPLICE, [["+-", "--", "++"]] * 20))
    assert _only_comparison(better).verdict == "higher than none"
    assert _only_comparison(worse).verdict == "lower than none"
    assert (
        "+33.3 points (33.3% and 66.7%), interval +33.3 to +33.3; p below 0.0001, adjusted below 0.0001, by signs "
        in _text(better)
    )


def test_errors_and_skipped_episodes_stand_apart() -> None:
    report = make_report(paired_rows("none", SPLICE, [["++", "-x", "x+"], ["--", "s+", "-s"]]))
    (group,) = report.groups
    none, splice = group.arms
    assert report.statuses == {"solved": 4, "failed": 4, "error": 2, "skipped": 2}
    assert (none.rate.solved, none.rate.ended, none.errors, none.skipped) == (1, 4, 1, 1)
    assert (splice.rate.solved, splice.rate.ended, splice.errors, splice.skipped) == (3, 4, 1, 1)
    assert (none.rate_with_errors.solved, none.rate_with_errors.ended) == (1, 5)
    comparison = _only_comparison(report)
    assert comparison.difference is not None
    assert (comparison.difference.num_pairs, comparison.left_out) == (2, 4)

    text = _text(report)
    assert "12 episodes: 4 solved, 4 failed; apart from these 2 errors, 2 skipped" in text
    assert "none: 1 error; were it a failure, the rate would be 20.0%" in text
    assert "4 pairs left out: an episode of theirs is missing, an error or skipped." in text
    assert "error × 1 (mini_nightmare, none): the server was gone" in text
    assert "skipped × 1 (mini_nightmare, none): the server was not there" in text


def test_an_arm_of_errors_alone_has_no_rate() -> None:
    report = make_report(paired_rows("none", SPLICE, [["+x", "-x"], ["-x", "+x"]]))
    splice = report_as_json(report)["groups"][0]["arms"][1]
    assert (splice["rate"], splice["wilson_95"], splice["errors"], splice["hit_rate"]) == (None, None, 4, None)
    assert splice["turn_ms_p20_p50_p80"] is None
    assert _only_comparison(report).verdict == "no pairs"
    assert f"{SPLICE} against none: no pairs. 4 pairs left out" in _text(report)


def test_rates_have_wilson_intervals_by_arm_and_by_task() -> None:
    report = report_as_json(make_report(paired_rows("none", SPLICE, [["++"] * 5, ["--"] * 11])))
    arm = report["groups"][0]["arms"][0]
    task = report["groups"][0]["tasks"]["task-01"][SPLICE]
    assert (arm["solved"], arm["ended"], arm["rate"]) == (5, 16, 0.3125)
    assert arm["wilson_95"] == pytest.approx([0.1416464385, 0.5559564417])
    assert (task["solved"], task["ended"]) == (5, 5)
    assert task["wilson_95"] == pytest.approx([0.5655175, 1.0])


def test_pairs_are_of_the_same_task_seed_and_repeat() -> None:
    rows = [
        row("none", "a", 0, "solved"),
        row("none", "a", 0, "failed", repeat=1),
        row("none", "b", 0, "solved"),
        row(SPLICE, "a", 0, "failed", repeat=1),
        row(SPLICE, "a", 1, "solved"),
        row(SPLICE, "a", 0, "solved"),
    ]
    comparison = _only_comparison(make_report(rows))
    found = comparison.difference
    assert found is not None
    assert (found.both, found.neither, found.only_base, found.only_other, comparison.left_out) == (1, 1, 0, 0, 2)


def test_costs_are_means_of_episodes_that_ended() -> None:
    rows = [
        row(SPLICE, "a", 0, "solved", prompt_tokens=1000, cached_tokens=600, turns=4, turn_ms=(10.0, 20.0, 30.0, 40.0)),
        row(
            SPLICE, "a", 1, "failed", prompt_tokens=3000, cached_tokens=2000, turns=6, turn_ms=(50.0,), ended="context"
        ),
        row(SPLICE, "a", 2, "error", prompt_tokens=9999, cached_tokens=9999, turns=9, turn_ms=(9999.0,), splices=9),
    ]
    (group,) = make_report(rows).groups
    (arm,) = group.arms
    assert (arm.prompt_tokens, arm.cached_tokens, arm.turns, arm.hit_rate) == (2000, 1300, 5, 0.65)
    assert arm.turn_ms == pytest.approx((18.0, 30.0, 42.0))
    assert (arm.splices, arm.fallbacks, arm.failures_ended) == (8, {"evicted": 1}, {"context": 1})
    text = _text(make_report(rows))
    assert "1,300 (65.0%)" in text
    assert "30 (18 to 42)" in text
    assert "failed episodes were ended by a prompt too long for the model (1)" in text
    assert "one arm: nothing to compare" in text


def test_each_policy_is_compared_with_none_and_its_executions_with_each_other() -> None:
    arms = ["b/splice", "none", "a/splice", "a/reprefill"]
    rows = [row(arm, "t", seed, "solved") for arm in arms for seed in range(2)]
    (group,) = make_report(rows).groups
    assert [arm.arm for arm in group.arms] == ["none", "b/splice", "a/reprefill", "a/splice"]
    assert [each.name for each in group.comparisons] == [
        "b/splice − none",
        "a/reprefill − none",
        "a/splice − none",
        "a: splice − reprefill",
    ]
    (without_none,) = make_report([each for each in rows if each.arm in ("b/splice", "a/splice")]).groups
    assert [each.name for each in without_none.comparisons] == ["a/splice − b/splice"]


def test_p_values_are_adjusted_for_the_comparisons_of_a_group() -> None:
    outcomes = [["-+"]] * 7 + [["--"]] * 5
    alone = make_report(paired_rows("none", SPLICE, outcomes))
    assert _only_comparison(alone).adjusted_p_value == 2 / 2**7
    assert _only_comparison(alone).distinguishable
    others = [
        each for idx in range(3) for each in paired_rows("none", f"p{idx}/splice", [["--"]] * 12) if each.arm != "none"
    ]
    (group,) = make_report([*paired_rows("none", SPLICE, outcomes), *others]).groups
    first = next(each for each in group.comparisons if each.other == SPLICE)
    assert first.adjusted_p_value == 8 / 2**7
    assert first.verdict == "not distinguishable"


def test_the_papers_tasks_have_a_group_of_their_own_where_others_ran_too() -> None:
    paper = paired_rows("none", SPLICE, [["++", "--"]] * 2, paper_subset=True)
    more = [each.model_copy(update={"task": "other"}) for each in paired_rows("none", SPLICE, [["--", "--"]])]
    report = make_report([*paper, *more])
    assert [(group.name, group.arms[0].rate.ended) for group in report.groups] == [
        ("mini_nightmare", 6),
        ("mini_nightmare, the paper's tasks", 4),
    ]
    assert [group.name for group in make_report(paper).groups] == ["mini_nightmare"]


def test_each_seed_of_a_generated_task_is_a_task() -> None:
    def compared(suite: str) -> Comparison:
        return _only_comparison(make_report(paired_rows("none", SPLICE, [["-+"] * 12], suite=suite)))

    generated, fixed = compared("mini_tasks").difference, compared("mini_nightmare").difference
    assert generated is not None
    assert fixed is not None
    assert (generated.num_tasks, fixed.num_tasks) == (12, 1)
    assert compared("mini_tasks").distinguishable
    assert not compared("mini_nightmare").distinguishable


def test_suites_are_not_mixed() -> None:
    rows = [row("none", "a", 0, "solved"), row("none", "a", 0, "failed", suite="mini_tasks")]
    assert [(group.name, group.arms[0].rate.value) for group in make_report(rows).groups] == [
        ("mini_nightmare", 1.0),
        ("mini_tasks", 0.0),
    ]


def test_what_is_missing_for_a_difference_of_this_size_is_said() -> None:
    outcomes = [["+-", "-+", "-+", "--"], ["--", "--", "-+", "++"]] * 4
    comparison = _only_comparison(make_report(paired_rows("none", SPLICE, outcomes)))
    assert comparison.difference is not None
    assert comparison.pairs_needed is not None
    assert comparison.pairs_needed > comparison.difference.num_pairs
    text = _text(make_report(paired_rows("none", SPLICE, outcomes)))
    assert f"takes {comparison.pairs_needed} independent pairs" in text
    assert _only_comparison(make_report(paired_rows("none", SPLICE, [["+-", "-+"]] * 2))).pairs_needed is None


def test_the_seeds_are_named() -> None:
    assert make_report(three_arms()).facts["seeds"] == "0, 1, 2, 3, 4"
    many = [row("none", "a", 3 * seed, "solved", started="2026-01-01T00:00:00Z") for seed in range(20)]
    assert make_report(many).facts["seeds"] == "20, from 0 to 57"


def test_the_title_says_what_was_run() -> None:
    assert make_report(three_arms()).title == f"Solve rates of {RUN}: a made-up model"
    assert "not measured" in RUN


@pytest.mark.parametrize(
    ("scripted", "title"),
    [
        (
            {"none": "solver", SPLICE: "solver"},
            f"SCRIPTED, NO MODEL: solve rates of {RUN} (a script, solver, stands for the model)",
        ),
        (
            {"none": "solver", SPLICE: "quitter"},
            f"SCRIPTED, NO MODEL: solve rates of {RUN} (a script, quitter, solver, stands for the model)",
        ),
        (
            {SPLICE: "solver"},
            f"PARTLY SCRIPTED: solve rates of {RUN}: a made-up model (but in {SPLICE} a script, solver, stands for the "
            "model)",
        ),
    ],
    ids=["all", "two scripts", "one arm"],
)
def test_no_number_of_a_script_stands_under_a_title_that_does_not_say_so(scripted: Any, title: str) -> None:
    rows = [
        each.model_copy(update={"scripted": scripted.get(each.arm)})
        for each in paired_rows("none", SPLICE, [["++", "--"]] * 2)
    ]
    report = make_report(rows)
    assert report.title == title
    assert _text(report).startswith(title)
    written = report_as_json(report)
    assert next(iter(written)) == "title"
    assert (written["title"], written["scripted"]) == (title, True)
    assert [arm["scripts"] for arm in written["groups"][0]["arms"]] == [
        [scripted[arm]] if arm in scripted else [] for arm in ("none", SPLICE)
    ]


def test_one_scripted_episode_among_many_is_enough() -> None:
    rows = paired_rows("none", SPLICE, [["++", "--"]] * 2)
    rows[3] = rows[3].model_copy(update={"scripted": "solver"})
    report = make_report(rows)
    assert report.title.startswith("PARTLY SCRIPTED")
    assert f"(but in {SPLICE} (some episodes) a script, solver, stands" in report.title
    # An episode without a result counts too: what it stands beside may be one.
    rows[3] = rows[3].model_copy(update={"status": "error", "reason": "r"})
    assert make_report(rows).title.startswith("PARTLY SCRIPTED")


def test_commands_that_ran_without_a_sandbox_are_told() -> None:
    rows = [row("none", "a", 0, "solved", sandboxed=False)]
    assert "sandbox: none: commands of the agent could reach" in _text(make_report(rows))
    assert "sandbox" not in _text(make_report([row("none", "a", 0, "solved", sandboxed=True)]))


def test_the_interval_is_of_the_bootstrap_over_tasks() -> None:
    comparison = _only_comparison(make_report(paired_rows("none", SPLICE, [["-+"] * 2, ["--"] * 2, ["+-"] * 2])))
    assert comparison.difference is not None
    assert comparison.difference.interval == Interval(-1, 1)


def test_the_command_prints_tables_or_json_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = write_run(tmp_path / "run", three_arms()), tmp_path / "page.html"
    assert _run("report", str(folder), "--html", str(page)) == 0
    printed = capsys.readouterr().out
    assert "120 episodes: 38 solved, 64 failed; apart from these 3 errors, 15 skipped" in printed
    assert printed.rstrip().endswith(str(page))
    assert f"{KEEP}/reprefill against none: not distinguishable" in printed
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")

    assert _run("report", str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out) == report_as_json(make_report(three_arms()))


def test_an_episode_that_was_run_again_counts_once(tmp_path: Path) -> None:
    again = [row("none", "a", 0, "error"), row("none", "a", 0, "solved")]
    page = tmp_path / "page.html"
    assert _run("report", str(write_run(tmp_path / "run", again)), "--html", str(page)) == 0
    assert "<div><b>0</b>errors, apart</div>" in page.read_text()


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda folder: None, "cannot be read"),
        (lambda folder: write_run(folder, []), "the run has no episodes yet"),
        (lambda folder: (write_run(folder, []) / "rows.jsonl").write_text("{}\n"), "rows.jsonl:1: no row of a run"),
    ],
    ids=["no folder", "no rows", "not a row"],
)
def test_a_folder_that_is_no_run_is_refused(prepare: Any, said: str, tmp_path: Path) -> None:
    prepare(tmp_path / "run")
    with pytest.raises(SolveRateError, match=said):
        _run("report", str(tmp_path / "run"))


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", three_arms())
    with pytest.raises(SolveRateError, match=r"page.html: cannot be written \(No such file or directory\)"):
        _run("report", str(folder), "--html", str(tmp_path / "none" / "page.html"))


def test_the_power_command(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("power", "--base", "31.2", "--difference", "14.3")
    assert _run(*wanted, "--pairs", "16", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["pairs"], answer["episodes"], answer["pairs_if_arms_are_independent"]) == (195, 390, 195)
    assert answer["pairs_at_least_discordance"] == 54
    assert answer["power_of_given_pairs"] < 0.07

    assert _run(*wanted, "--discordance", "25", "--pairs", "40") == 0
    words = capsys.readouterr().out
    assert "31.2% against 45.5%, one arm alone solving 25.0% of the pairs: " in words
    assert "40 pairs show it in " in words
    assert "Seeds of one task are not: plan for more pairs" in words


def test_pairs_of_independent_arms_that_are_too_many_do_not_hide_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("power", "--base", "50", "--difference", "0.5", "--discordance", "2")
    assert _run(*wanted) == 0
    assert "With arms that are independent: more than 100,000." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--base", "95", "--difference", "14"), "expected both between 0% and 100%"),
        (("--base", "30", "--difference", "14", "--discordance", "5"), "it is at least 14.0% and at most 74.0%"),
        (("--base", "30", "--difference", "0"), "a difference of 0 cannot be seen"),
    ],
)
def test_a_power_that_cannot_be_is_refused(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(SolveRateError, match=said):
        _run("power", *given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--pairs", "0"), "got '0', expected a whole number from 1 to 100000"),
        (("--pairs", "1e9"), "got '1e9', expected a whole number"),
        (("--alpha", "5"), "got '5', expected a number between 0 and 1"),
        (("--power", "nan"), "got 'nan', expected a number between 0 and 1"),
        (("--power", "much"), "got 'much', expected a number between 0 and 1"),
    ],
)
def test_options_of_power_are_checked(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _run("power", "--base", "30", "--difference", "14", *given)
    assert said in capsys.readouterr().err
