"""A report for programs. Its keys stay; rates and differences are shares, not per cent."""

from __future__ import annotations

import dataclasses
from typing import Any

from evals.solve_rate.report import Comparison, Group, Rate, Report


def report_as_json(report: Report) -> dict[str, Any]:
    """Return the report; `title` says so where a script stood for a model."""
    return {
        "title": report.title,
        "scripted": report.is_scripted,
        "facts": dict(report.facts),
        "episodes": dict(report.statuses),
        "groups": [_group(group) for group in report.groups],
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
    }


def _rate(rate: Rate) -> dict[str, Any]:
    interval = rate.interval
    return {
        "solved": rate.solved,
        "ended": rate.ended,
        "rate": rate.value,
        "wilson_95": None if interval is None else [interval.low, interval.high],
    }


def _group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "arms": [
            {
                "arm": arm.arm,
                "scripts": list(arm.scripts),
                **_rate(arm.rate),
                "errors": arm.errors,
                "skipped": arm.skipped,
                "rate_if_errors_were_failures": arm.rate_with_errors.value,
                "failures_ended": dict(arm.failures_ended),
                "turns_per_episode": arm.turns,
                "prompt_tokens_per_episode": arm.prompt_tokens,
                "cached_tokens_per_episode": arm.cached_tokens,
                "completion_tokens_per_episode": arm.completion_tokens,
                "hit_rate": arm.hit_rate,
                "turn_ms_p20_p50_p80": None if arm.turn_ms is None else list(arm.turn_ms),
                "splices": arm.splices,
                "fallbacks": dict(arm.fallbacks),
            }
            for arm in group.arms
        ],
        "tasks": {task: {arm: _rate(rate) for arm, rate in by_arm.items()} for task, by_arm in group.tasks.items()},
        "comparisons": [_comparison(each) for each in group.comparisons],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    difference = comparison.difference
    found: dict[str, Any] = {}
    if difference is not None:
        interval = difference.interval
        found = {
            "tasks": difference.num_tasks,
            "pairs": difference.num_pairs,
            "both": difference.both,
            "only_base": difference.only_base,
            "only_other": difference.only_other,
            "neither": difference.neither,
            "base_rate": difference.base_rate,
            "other_rate": difference.other_rate,
            "difference": difference.difference,
            "bootstrap_over_tasks_95": None if interval is None else [interval.low, interval.high],
            "mcnemar_p": difference.p_value,
            "mcnemar_p_holm": comparison.adjusted_p_value,
            "signs_of_tasks_p": difference.p_value_of_tasks,
            "pairs_needed": comparison.pairs_needed,
        }
    return {
        "base": comparison.base,
        "other": comparison.other,
        "verdict": comparison.verdict,
        "distinguishable": comparison.distinguishable,
        "left_out": comparison.left_out,
        **found,
    }
