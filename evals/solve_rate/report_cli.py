"""The commands `report` and `power` of `leyline-eval`. Results go to stdout."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from evals.solve_rate import power as planning
from evals.solve_rate.page import report_as_page
from evals.solve_rate.report import make_report
from evals.solve_rate.report_json import report_as_json
from evals.solve_rate.report_text import print_report
from evals.solve_rate.rows import SolveRateError, read_rows

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_PIPED_WIDTH = 120


def add_commands(subparsers: Subparsers) -> None:
    """Add both commands; each sets `run`, which takes the arguments and returns the exit code."""
    report_words = "say what a run shows: solve rates, paired differences, costs, errors"
    command = subparsers.add_parser("report", help=report_words, description=f"{_sentence(report_words)}.")
    command.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="what `leyline-eval run` wrote")
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    command.set_defaults(run=report)

    power_words = "say how many pairs of episodes it takes to see a difference"
    command = subparsers.add_parser("power", help=power_words, description=f"{_sentence(power_words)}.")
    command.add_argument("--base", type=float, required=True, metavar="PERCENT", help="the base arm's solve rate")
    command.add_argument(
        "--difference", type=float, required=True, metavar="POINTS", help="the other arm's rate less the base's"
    )
    command.add_argument(
        "--discordance",
        type=float,
        metavar="PERCENT",
        help="of pairs that one arm solves and the other does not (default: as if the arms were independent)",
    )
    command.add_argument("--pairs", type=_positive, metavar="N", help="also say how often N pairs show it")
    command.add_argument("--alpha", type=_probability, default=0.05, help="of the two-sided test (default: 0.05)")
    command.add_argument("--power", type=_probability, default=0.8, help="how often it is to be seen (default: 0.8)")
    command.add_argument("--json", action="store_true", help="print JSON instead of words")
    command.set_defaults(run=power)


def report(args: argparse.Namespace) -> int:
    """Print the report of a run folder, and write the page if one is asked for."""
    made = make_report(read_rows(args.folder))
    if args.html is not None:
        try:
            args.html.write_text(report_as_page(made), encoding="utf-8")
        except OSError as error:
            raise SolveRateError(f"{args.html}: cannot be written ({error.strerror}); name another file") from error
    if args.json:
        print(json.dumps(report_as_json(made), indent=2))
        return 0
    # In a pipe rich assumes 80 columns, and would cut the names of arms.
    print_report(made, Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH))
    if args.html is not None:
        print(f"\n{args.html}")
    return 0


def power(args: argparse.Namespace) -> int:
    """Print how many pairs a difference takes, at the discordance given and at the least and the independent one."""
    base, difference = args.base / 100, args.difference / 100
    independent = planning.independent_discordance(base, difference)
    asked = independent if args.discordance is None else args.discordance / 100
    planning.check_rates(base, difference, asked)
    given = {"difference": difference, "alpha": args.alpha}
    pairs = planning.pairs_needed(**given, discordance=asked, power=args.power)
    least = planning.pairs_needed(**given, discordance=abs(difference), power=args.power)
    most = None
    # More than is computed is no reason to keep back what was asked for.
    with contextlib.suppress(SolveRateError):
        most = planning.pairs_needed(**given, discordance=independent, power=args.power)
    answer = {
        "base_rate": base,
        "difference": difference,
        "discordance": asked,
        "alpha": args.alpha,
        "power": args.power,
        "pairs": pairs,
        "episodes": 2 * pairs,
        "pairs_at_least_discordance": least,
        "pairs_if_arms_are_independent": most,
    }
    if args.pairs is not None:
        answer["given_pairs"] = args.pairs
        answer["power_of_given_pairs"] = planning.mcnemar_power(args.pairs, **given, discordance=asked)
    print(json.dumps(answer, indent=2) if args.json else _power_in_words(answer))
    return 0


def _power_in_words(answer: dict[str, Any]) -> str:
    independent = answer["pairs_if_arms_are_independent"]
    most = f"more than {planning.MAX_PAIRS:,}" if independent is None else f"{independent:,}"
    lines = [
        f"{answer['base_rate']:.1%} against {answer['base_rate'] + answer['difference']:.1%}, one arm alone solving "
        f"{answer['discordance']:.1%} of the pairs: {answer['pairs']:,} pairs, {answer['episodes']:,} episodes, so "
        f"that McNemar's exact test says p ≤ {answer['alpha']:g} in {answer['power']:.0%} of such runs.",
        f"With the least possible discordance: {answer['pairs_at_least_discordance']:,} pairs. With arms that are "
        f"independent: {most}.",
    ]
    if "given_pairs" in answer:
        lines.append(f"{answer['given_pairs']:,} pairs show it in {answer['power_of_given_pairs']:.1%} of runs.")
    lines.append("Pairs count as independent. Seeds of one task are not: plan for more pairs, and for many tasks.")
    return "\n".join(lines)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 0 < number <= planning.MAX_PAIRS:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 to {planning.MAX_PAIRS}")
    return number


def _probability(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number between 0 and 1")
    return number
