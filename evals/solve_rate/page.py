"""The page of a report. It loads nothing: style and plots are in it, and it has no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from evals.replay.charts import legend, nice_ceiling
from evals.solve_rate.plots import Bar, Line, Mark, bar_plot, interval_plot
from evals.solve_rate.report import ArmReport, Comparison, Group, Rate, Report
from evals.solve_rate.report_text import (
    HOW_TO_READ,
    cached,
    counted,
    p_value,
    percent,
    percent_range,
    points,
    remarks,
    sentence,
    turn_ms,
)
from leyline_agent.explain.page_style import STYLE

_COLORS = {"none": "--before", "reprefill": "--recomputed", "splice": "--moved", "forget": "--removed"}
_MEANING = {
    "none": "no policy",
    "reprefill": "edited, prefilled again",
    "splice": "edited on the cached KV",
    "forget": "edited and forgotten",
}
_STYLE = f"""{STYLE}
.warning {{ border: 2px solid var(--removed); border-radius: 8px; padding: 10px 14px; font-weight: 600; }}
.chart .zero {{ stroke: var(--soft); stroke-width: 1.6; }} .chart .mark line {{ stroke-width: 2.4; opacity: .65; }}
{" ".join(f".chart .{kind} {{ stroke: var({color}); fill: var({color}); }}" for kind, color in _COLORS.items())}
figure {{ margin: 0 0 14px; }} figcaption {{ font-weight: 600; margin-bottom: 6px; }}
th:first-child, td:first-child {{ text-align: left; }} details summary {{ color: var(--soft); margin-bottom: 8px; }}
td {{ white-space: nowrap; }} td:first-child, td:last-child {{ white-space: normal; }}
.scroll, ul {{ margin: 0 0 14px; }} li {{ max-width: 100ch; }}
"""


def report_as_page(report: Report) -> str:
    """Return the page as HTML."""
    title = escape(report.title)
    facts = "".join(f"<div><b>{count}</b>{escape(name)}</div>" for name, count in _counts(report))
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            '<p class="warning">A script stood for the model. These numbers show that the harness works, and nothing '
            "about any model.</p>"
            if report.is_scripted
            else "",
            f'<p class="soft">{escape("; ".join(f"{name}: {value}" for name, value in report.facts.items()))}</p>',
            f'<div class="cards">{facts}</div>',
            *(_group(group) for group in report.groups),
            _problems(report),
            "<h2>How to read this</h2>",
            _list(HOW_TO_READ),
            "</body></html>\n",
        ]
    )


def _counts(report: Report) -> list[tuple[str, int]]:
    names = {"solved": "solved", "failed": "failed", "error": "errors, apart", "skipped": "skipped, apart"}
    return [(name, report.statuses[status]) for status, name in names.items()]


def _group(group: Group) -> str:
    kinds = list(dict.fromkeys(arm.execution for arm in group.arms))
    key = legend({_MEANING[kind]: f"var({_COLORS[kind]})" for kind in kinds})
    return "\n".join(
        [
            f"<h2>{escape(group.name)}: solve rates</h2>",
            _figure("Solved, with Wilson's interval", _rate_plot(group) + key),
            _rate_table(group.arms),
            _list(remarks(group)),
            f"<h2>{escape(group.name)}: paired differences</h2>",
            _figure("The second arm less the first, with a bootstrap over tasks", _difference_plot(group))
            if any(each.difference for each in group.comparisons)
            else "",
            _comparison_table(group.comparisons),
            _in_words(group.comparisons),
            f"<h2>{escape(group.name)}: costs of an episode</h2>",
            _figure(
                "Prompt tokens",
                _token_plot(group.arms) + legend({"cached": "var(--kept)", "computed": "var(--recomputed)"}),
            ),
            _figure("Milliseconds a turn: the median, from the 20th to the 80th percentile", _time_plot(group) + key),
            _cost_table(group.arms),
            f"<h2>{escape(group.name)}: tasks</h2>",
            _figure(
                "Solved, with Wilson's interval; the arms of a task from top to bottom as above",
                _task_plot(group) + key,
            ),
            _task_table(group),
        ]
    )


def _figure(caption: str, content: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{content}</figure>"


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _rate_plot(group: Group) -> str:
    lines = [Line(arm.arm, _rate_marks([(arm, arm.rate)])) for arm in group.arms]
    return interval_plot(lines, low=0, high=1, show=_percent, title=f"{group.name}: solve rate of each arm")


def _task_plot(group: Group) -> str:
    lines = [
        Line(task, _rate_marks([(arm, by_arm[arm.arm]) for arm in group.arms])) for task, by_arm in group.tasks.items()
    ]
    return interval_plot(lines, low=0, high=1, show=_percent, title=f"{group.name}: solve rate of each task, by arm")


def _rate_marks(rates: Iterable[tuple[ArmReport, Rate]]) -> list[Mark | None]:
    """Return a mark for each rate, None for one without episodes."""
    marks: list[Mark | None] = []
    for arm, rate in rates:
        if rate.value is None or rate.interval is None:
            marks.append(None)
        else:
            words = f"{arm.arm}: {rate.solved} of {rate.ended}, {percent(rate)} ({percent_range(rate.interval)})"
            marks.append(Mark(rate.value, rate.interval.low, rate.interval.high, arm.execution, words))
    return marks


def _difference_plot(group: Group) -> str:
    executions = {arm.arm: arm.execution for arm in group.arms}
    lines = []
    reach = 0.0
    for each in group.comparisons:
        found = each.difference
        if found is None:
            continue
        low, high = (
            (found.difference, found.difference)
            if found.interval is None
            else (found.interval.low, found.interval.high)
        )
        reach = max(reach, -low, high)
        mark = Mark(found.difference, low, high, executions[each.other], sentence(each))
        lines.append(Line(each.name, [mark]))
    reach = nice_ceiling(reach)
    title = f"{group.name}: paired differences of solve rates"
    return interval_plot(
        lines, low=-reach, high=reach, show=lambda value: f"{100 * value:+.4g}" if value else "0", title=title
    )


def _token_plot(arms: Sequence[ArmReport]) -> str:
    bars = [
        Bar(
            arm.arm,
            [("kept", arm.cached_tokens), ("recomputed", max(0.0, arm.prompt_tokens - arm.cached_tokens))],
            f"{arm.arm}: {arm.prompt_tokens:,.0f} prompt tokens an episode, {cached(arm)} of them cached",
        )
        for arm in arms
    ]
    high = nice_ceiling(max((arm.prompt_tokens for arm in arms), default=0))
    return bar_plot(bars, high=high, show=lambda value: f"{value:,.0f}", title="Prompt tokens of an episode, by arm")


def _time_plot(group: Group) -> str:
    lines = []
    most = 0.0
    for arm in group.arms:
        if arm.turn_ms is not None:
            low, middle, high = arm.turn_ms
            most = max(most, high)
            lines.append(Line(arm.arm, [Mark(middle, low, high, arm.execution, f"{arm.arm}: {turn_ms(arm)} ms")]))
    high = nice_ceiling(most)
    title = f"{group.name}: milliseconds a turn, by arm"
    return interval_plot(lines, low=0, high=high, show=lambda value: f"{value:,.0f} ms", title=title)


def _rate_table(arms: Sequence[ArmReport]) -> str:
    heads = ("arm", "solved", "ended", "rate", "95% (Wilson)", "errors, apart", "skipped, apart", "the model")
    return _table(
        heads,
        (
            (
                arm.arm,
                str(arm.rate.solved),
                str(arm.rate.ended),
                percent(arm.rate),
                percent_range(arm.rate.interval),
                str(arm.errors),
                str(arm.skipped),
                f"a script: {', '.join(arm.scripts)}" if arm.scripts else "as in the title",
            )
            for arm in arms
        ),
    )


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    heads = (
        "arms",
        "verdict",
        "points",
        "95% (tasks)",
        "McNemar p",
        "adjusted",
        "p by signs",
        "pairs (tasks)",
        "left out",
    )
    rows = []
    for each in comparisons:
        found = each.difference
        numbers = ("",) * 6
        if found is not None:
            numbers = (
                f"{100 * found.difference:+.1f}",
                "" if found.interval is None else points(found.interval),
                p_value(found.p_value),
                p_value(each.adjusted_p_value),
                p_value(found.p_value_of_tasks),
                f"{found.num_pairs} ({found.num_tasks})",
            )
        rows.append((each.name, each.verdict, *numbers, str(each.left_out)))
    return _table(heads, rows) if rows else ""


def _in_words(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return "<p>One arm: nothing to compare.</p>"
    return f"<details><summary>The same in words</summary>{_list(map(sentence, comparisons))}</details>"


def _cost_table(arms: Sequence[ArmReport]) -> str:
    heads = ("arm", "turns", "prompt tokens", "cached", "completion", "ms a turn", "splices in all", "fallbacks in all")
    return _table(
        heads,
        (
            (
                arm.arm,
                f"{arm.turns:.1f}",
                f"{arm.prompt_tokens:,.0f}",
                cached(arm),
                f"{arm.completion_tokens:,.0f}",
                turn_ms(arm),
                str(arm.splices),
                counted(arm.fallbacks) or "none",
            )
            for arm in arms
        ),
    )


def _task_table(group: Group) -> str:
    rows = [
        (task if idx == 0 else "", arm, f"{rate.solved} of {rate.ended}", percent(rate), percent_range(rate.interval))
        for task, by_arm in group.tasks.items()
        for idx, (arm, rate) in enumerate(by_arm.items())
    ]
    heads = ("task", "arm", "solved", "rate", "95% (Wilson)")
    return f"<details><summary>The same as a table</summary>{_table(heads, rows)}</details>"


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    rows = [(each.suite, each.arm, each.status, str(each.count), each.reason) for each in report.problems]
    return "<h2>Errors and skipped episodes</h2>" + _table(("suite", "arm", "what", "episodes", "why"), rows)


def _percent(value: float) -> str:
    return f"{value:.0%}"
