"""A report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from evals.solve_rate.report import ArmReport, Comparison, Group, Rate, Report
from evals.solve_rate.statistics import Interval

HOW_TO_READ = (
    "A rate is of episodes: a task that is repeated, such as a race, weighs as much as its repeats.",
    "Intervals are 95%: Wilson's for a rate, which takes episodes for independent, so with several seeds of a task it "
    "is too narrow; for a difference a bootstrap over tasks, which keeps the seeds of a task together (each seed of "
    "mini_tasks is a task of its own). One without width says that the tasks agree, not that the difference is known.",
    "p: McNemar's exact test on pairs of episodes with the same task and seed; adjusted after Holm for the comparisons "
    "of one table. p by signs: how often the tasks' gains would add up to as much if a coin's toss gave each its sign.",
    "Two arms are called different only where the adjusted p and that by signs are at most 0.05 and the interval is on "
    "one side of 0, which takes six tasks or more. Not distinguishable does not mean equal.",
    "Errors and skipped episodes count neither as solved nor as failed. Tokens, turns and times are of episodes that "
    "ended.",
)


_ENDS = {
    "done": "the agent itself",
    "turns": "the number of turns",
    "time": "the time",
    "context": "a prompt too long for the model",
    "no_call": "answers without a call",
}


def print_report(report: Report, console: Console) -> None:
    """Write the report."""
    console.print(report.title, style="bold", markup=False, highlight=False, soft_wrap=True)
    for name, value in report.facts.items():
        console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
    console.print(statuses(report), markup=False, highlight=False)
    for group in report.groups:
        for table in (_rates(group), _costs(group), _tasks(group)):
            console.print(table)
        console.print(f"{group.name}: paired differences", style="italic", markup=False, highlight=False)
        for comparison in group.comparisons or ():
            console.print(f"- {sentence(comparison)}", markup=False, highlight=False, soft_wrap=True)
        if not group.comparisons:
            console.print("- one arm: nothing to compare", markup=False)
        for line in remarks(group):
            console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    for problem in report.problems:
        line = f"{problem.status} × {problem.count} ({problem.suite}, {problem.arm}): {problem.reason}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    for line in HOW_TO_READ:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def statuses(report: Report) -> str:
    """Return how many episodes there are of each kind."""
    counts = report.statuses
    return (
        f"{sum(counts.values())} episodes: {counts['solved']} solved, {counts['failed']} failed; apart from these "
        f"{counts['error']} errors, {counts['skipped']} skipped"
    )


def sentence(comparison: Comparison) -> str:
    """Return one comparison in words."""
    start = f"{comparison.other} against {comparison.base}: {comparison.verdict}"
    left_out = (
        f" {comparison.left_out} pairs left out: an episode of theirs is missing, an error or skipped."
        if comparison.left_out
        else ""
    )
    found = comparison.difference
    if found is None:
        return f"{start}.{left_out}"
    interval = "none with one task" if found.interval is None else points(found.interval)
    needed = (
        f" To see a difference of this size four times out of five takes {comparison.pairs_needed:,} independent pairs."
        if comparison.pairs_needed is not None and not comparison.distinguishable
        else ""
    )
    return (
        f"{start}. {100 * found.difference:+.1f} points ({found.base_rate:.1%} and {found.other_rate:.1%}), interval "
        f"{interval}; p {p_value(found.p_value)}, adjusted {p_value(comparison.adjusted_p_value)}, by signs "
        f"{p_value(found.p_value_of_tasks)}; "
        f"{found.num_pairs} pairs of {found.num_tasks} tasks, {found.only_other} solved by {comparison.other} alone, "
        f"{found.only_base} by {comparison.base} alone.{needed}{left_out}"
    )


def remarks(group: Group) -> Iterator[str]:
    """Yield what an arm's errors may hide, and how its failed episodes ended."""
    for arm in group.arms:
        if arm.errors:
            errors = "1 error; were it a failure" if arm.errors == 1 else f"{arm.errors} errors; were they failures"
            yield f"{arm.arm}: {errors}, the rate would be {percent(arm.rate_with_errors)}"
        if arm.failures_ended:
            ends = {_ENDS.get(end, end): count for end, count in arm.failures_ended.items()}
            yield f"{arm.arm}: failed episodes were ended by {counted(ends)}"


def percent(rate: Rate) -> str:
    """Return a rate."""
    return "none" if rate.value is None else f"{rate.value:.1%}"


def percent_range(interval: Interval | None) -> str:
    """Return the interval of a rate."""
    return "" if interval is None else f"{100 * interval.low:.1f} to {100 * interval.high:.1f}%"


def points(interval: Interval) -> str:
    """Return the interval of a difference."""
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def p_value(value: float | None) -> str:
    """Return a p-value as one reads it."""
    if value is None:
        return "none"
    return "below 0.0001" if value < 0.0001 else f"{value:.2g}"


def counted(counts: Mapping[str, int]) -> str:
    """Return names with their numbers, the most frequent first."""
    return ", ".join(
        f"{name} ({count})" for name, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    )


def cached(arm: ArmReport) -> str:
    """Return the cached tokens of an episode, and their share."""
    return f"{arm.cached_tokens:,.0f}" + ("" if arm.hit_rate is None else f" ({arm.hit_rate:.1%})")


def turn_ms(arm: ArmReport) -> str:
    """Return the median time of a turn with the 20th and 80th percentile."""
    return "" if arm.turn_ms is None else "{1:,.0f} ({0:,.0f} to {2:,.0f})".format(*arm.turn_ms)


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for head in heads:
        left = head in ("arm", "task", "fallbacks")
        table.add_column(head, justify="left" if left else "right", overflow="fold")
    return table


def _rates(group: Group) -> Table:
    table = _table(f"{group.name}: solve rates", "arm", "solved", "rate", "95%", "errors", "skipped")
    for arm in group.arms:
        solved = f"{arm.rate.solved} of {arm.rate.ended}"
        interval = percent_range(arm.rate.interval)
        table.add_row(arm.arm, solved, percent(arm.rate), interval, str(arm.errors), str(arm.skipped))
    return table


def _costs(group: Group) -> Table:
    heads = ("arm", "turns", "prompt tokens", "cached", "ms a turn", "splices", "fallbacks")
    table = _table(f"{group.name}: costs of an episode", *heads)
    for arm in group.arms:
        fallbacks = counted(arm.fallbacks) or "none"
        prompt = f"{arm.prompt_tokens:,.0f}"
        table.add_row(arm.arm, f"{arm.turns:.1f}", prompt, cached(arm), turn_ms(arm), str(arm.splices), fallbacks)
    return table


def _tasks(group: Group) -> Table:
    table = _table(f"{group.name}: tasks", "task", "arm", "solved", "rate", "95%")
    for task, by_arm in group.tasks.items():
        for idx, (arm, rate) in enumerate(by_arm.items()):
            row = (arm, f"{rate.solved} of {rate.ended}", percent(rate), percent_range(rate.interval))
            table.add_row("" if idx else task, *row)
    return table
