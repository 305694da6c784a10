"""`report.html`: one page that explains itself, without anything to load."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from evals.replay.charts import Series, legend, line_chart
from evals.replay.turn_rows import ARMS, Arm, TurnRow

_COLORS: dict[Arm, str] = {"none": "#8a8f98", "reprefill": "#c2571a", "splice": "#0b7a75"}
_LIGHT: dict[Arm, str] = {"none": "#e3e5e8", "reprefill": "#f6dfd0", "splice": "#d0e9e6"}
_MEANING: dict[Arm, str] = {
    "none": "no policy: the prompt only grows",
    "reprefill": "the policy edits, the server prefills again what follows an edit",
    "splice": "the same edits, carried out on the cached KV",
}

_STYLE = """
:root { color: #1c2024; background: #fbfbf9; font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
body { max-width: 1020px; margin: 0 auto; padding: 40px 28px 64px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3em; letter-spacing: -.01em; }
h2 { font-size: 1.12rem; margin: 2.4em 0 .5em; }
.lead, .note { color: #4d545c; max-width: 84ch; margin: 0 0 1em; }
.scroll + .note { margin-top: .9em; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px; margin: 26px 0 8px; }
.card { background: #fff; border: 1px solid #e4e5e1; border-radius: 10px; padding: 14px 18px; }
.card b { display: block; font-size: 1.75rem; font-variant-numeric: tabular-nums; letter-spacing: -.02em; }
.card span { color: #4d545c; font-size: .88rem; line-height: 1.35; display: block; }
figure { background: #fff; border: 1px solid #e4e5e1; border-radius: 10px; padding: 14px 18px 8px; margin: 0 0 14px; }
figcaption { font-size: .92rem; line-height: 1.4; color: #4d545c; margin: 0 0 6px; }
.arms figcaption { min-height: 2.8em; }
figcaption b { color: #1c2024; }
.arms { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px; }
.arms figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11.5px system-ui, "DejaVu Sans", sans-serif; fill: #5c636b; }
svg .grid { stroke: #ecedea; }
svg .hover { fill: transparent; }
svg .hover:hover { fill: rgba(28, 32, 36, .07); }
.legend { margin: 4px 0 6px; font-size: .88rem; color: #4d545c; }
.legend span { margin-right: 18px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; background: #fff; font-size: .93rem; }
table { font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; border-bottom: 1px solid #e4e5e1; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: #4d545c; font-weight: 600; }
code { font-size: .92em; background: #f0f0ec; padding: 1px 5px; border-radius: 4px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; font-size: .88rem; color: #4d545c; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def render_report(summary: Mapping[str, Any], rows: Sequence[TurnRow]) -> str:
    """Return the page as HTML."""
    arms = [arm for arm in ARMS if arm in summary["arms"]]
    by_arm = {arm: [row for row in rows if row.arm == arm] for arm in arms}
    trajectory, policy = summary["trajectory"], summary["policy"]
    title = "One trajectory, " + {1: "one arm", 2: "two arms", 3: "three arms"}[len(arms)]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Leyline replay: {escape(trajectory['source'])}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f'<p class="lead">{escape(trajectory["source"])}: {trajectory["turns"]} model calls, each sent to the '
            f"server as a LangGraph agent sends it. Policy: <code>{escape(str(policy['name']))}</code>"
            f"{_ages(policy)}.</p>",
            _cards(summary),
            "<h2>Tokens of each prompt</h2>",
            '<div class="arms">',
            *(_tokens_figure(arm, by_arm[arm], by_arm) for arm in arms),
            "</div>",
            "<h2>Time</h2>",
            _time_figure(by_arm),
            "<h2>Totals</h2>",
            _table(summary),
            "<h2>What this shows, and what it does not</h2>",
            _honest_paragraph(summary),
            "<h2>Measured with</h2>",
            _facts(summary),
            "</body></html>\n",
        ]
    )


def _cards(summary: Mapping[str, Any]) -> str:
    arms = summary["arms"]
    cards: list[tuple[str, str]] = []
    if "splice" in arms:
        cards.append((f"{arms['splice']['hit_rate']:.1%}", "of prompt tokens came from the cache with splices"))
    if "reprefill" in arms:
        cards.append((f"{arms['reprefill']['hit_rate']:.1%}", "with the same edits and no splices"))
    if {"splice", "reprefill"} <= arms.keys() and arms["reprefill"]["ms_total"]:
        ratio = arms["splice"]["ms_total"] / arms["reprefill"]["ms_total"]
        cards.append((f"{ratio:.2f}×", "the time that the re-prefilling arm took, on this machine"))
    if "splice" in arms:
        splice = arms["splice"]
        cards.append((f"{splice['splices']}", f"turns with a splice, {splice['fallbacks']} fallbacks"))
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{value}</b><span>{escape(text)}</span></div>' for value, text in cards)
        + "</div>"
    )


def _tokens_figure(arm: Arm, rows: Sequence[TurnRow], by_arm: Mapping[Arm, Sequence[TurnRow]]) -> str:
    every = [row for arm_rows in by_arm.values() for row in arm_rows]
    prompt = Series("prompt", _LIGHT[arm], [row.prompt_tokens for row in rows], filled=True)
    cached = Series("cached", _COLORS[arm], [row.cached_tokens for row in rows], filled=True)
    chart = line_chart(
        [prompt, cached],
        width=330,
        height=230,
        x_max=max((row.turn for row in every), default=1),
        y_max=max((row.prompt_tokens for row in every), default=1),
        y_label="tokens",
        show=_tokens,
        title=f"Prompt and cached tokens per turn, arm {arm}",
    )
    colors = {"from the cache": _COLORS[arm], "computed": _LIGHT[arm]}
    return f"<figure><figcaption><b>{arm}</b>: {_MEANING[arm]}</figcaption>{chart}{legend(colors)}</figure>"


def _time_figure(by_arm: Mapping[Arm, Sequence[TurnRow]]) -> str:
    series = [
        Series(arm, _COLORS[arm], list(itertools.accumulate(row.ms / 1000 for row in rows)), dashed=arm == "none")
        for arm, rows in by_arm.items()
    ]
    chart = line_chart(
        series,
        width=960,
        height=300,
        x_max=max((len(each.values) for each in series), default=1),
        y_max=max((each.values[-1] for each in series if each.values), default=1.0),
        y_label="seconds since the first request",
        show=lambda value: f"{value:,.0f} s" if value >= 10 or value == 0 else f"{value:.1f} s",
        title="Cumulative time of the model calls, by arm",
    )
    colors = {str(arm): _COLORS[arm] for arm in by_arm}
    return f"<figure><figcaption>Cumulative time of the model calls</figcaption>{chart}{legend(colors)}</figure>"


def _table(summary: Mapping[str, Any]) -> str:
    heads = (
        "arm",
        "turns",
        "prompt",
        "cached",
        "computed",
        "hit rate",
        "ideal",
        "seconds",
        "splices",
        "fallbacks",
        "/metrics",
    )
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for arm, totals in summary["arms"].items():
        ideal = totals.get("hit_rate_ideal")
        agrees = totals["crosscheck"]["agrees"]
        cells = (
            arm,
            f"{totals['turns']}",
            f"{totals['prompt_tokens']:,}",
            f"{totals['cached_tokens']:,}",
            f"{totals['computed_tokens']:,}",
            f"{totals['hit_rate']:.1%}",
            "" if ideal is None else f"{ideal:.1%}",
            f"{totals['ms_total'] / 1000:,.1f}",
            f"{totals.get('splices', '')}",
            f"{totals.get('fallbacks', '')}",
            {True: "agrees", False: "disagrees", None: "not served"}[agrees],
        )
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    stopped = [
        f"<b>{arm}</b> stopped at {escape(totals['stopped_at'])}."
        for arm, totals in summary["arms"].items()
        if "stopped_at" in totals
    ]
    notes = f'<p class="note">{" ".join(stopped)}</p>' if stopped else ""
    explained = (
        '<p class="note">Tokens and hit rate count from the second request on. What a splice itself prefilled is not '
        "counted as cached. <i>Ideal</i>: every token whose message stood unchanged in the prompt before, computed "
        "from message spans. <i>/metrics</i>: whether the server's own counters agree with what its responses said.</p>"
    )
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>{notes}{explained}'


def _honest_paragraph(summary: Mapping[str, Any]) -> str:
    arms = summary["arms"]
    same = (
        " Both edited arms sent the same messages in every turn."
        if summary.get("same_prompts")
        else " The edited arms did not send the same messages in every turn, so compare them with care."
        if summary.get("same_prompts") is False
        else ""
    )
    none = " The arm <b>none</b> sends longer prompts, and ended early." if "stopped_at" in arms.get("none", {}) else ""
    return (
        '<p class="note">The trajectory was recorded beforehand: in each turn the server generates one token, and the '
        "agent goes on with the recorded answer. So this shows what the cache does and what prefilling costs, not how "
        "well a model answers after an edit. With the project's own test model, whose weights are random, answers mean "
        "nothing at all. On a CPU prefilling is slow in proportion, so read times as ratios of one run on one machine, "
        f"not as what a GPU would take.{same}{none} A splice keeps KV that was computed while the removed text was "
        "still there: downstream values go on reflecting it, which is its point and its cost.</p>"
    )


def _facts(summary: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    facts = {
        "model": summary["model"],
        "server": f"SGLang {summary['server_version']}" if summary["server_version"] else "unknown",
        "versions here": versions,
        "limit of arm none": f"{summary['max_prompt_tokens']:,} prompt tokens",
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()) + "</dl>"


def _ages(policy: Mapping[str, Any]) -> str:
    ages = {
        rule["select"]["older_than"]["turns"]
        for rule in policy.get("rules", ())
        if rule.get("select", {}).get("older_than")
    }
    return f", which stubs what is older than {ages.pop()} turns" if len(ages) == 1 else ""


def _tokens(value: float) -> str:
    return f"{value / 1000:,.1f}k".replace(".0k", "k") if value >= 1000 else f"{value:,.0f}"
