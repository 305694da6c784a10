"""The published table of `evals.micro.concurrency`: one line for each cell, in Markdown. Pure.

A cell that was measured with several versions is shown once, by the measurement with the most paired conversations,
the newest of equals; its commit stands in the line, and all runs stay in the file of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.micro.concurrency_rows import BASELINE, CELL_KEYS, PAIRED, shown

Row = Mapping[str, Any]

_SPLICE = PAIRED[0]
_HEAD = (
    "model",
    "tokens, n",
    "C",
    "repeats",
    "p50 without edits, ms",
    "p50, ms",
    "ratio of the medians",
    "gain a turn, ms",
    "p95, ms",
    "mean, ms",
    "hit rate, %",
    "ideal",
    "output tokens/s",
    "edits spliced",
    "commit",
)


def one_of_each_cell(found: Sequence[Row]) -> list[Row]:
    """Return a summary for each cell in which both a splice and a re-prefill were run, by model, n, tokens and C.

    A cell that was measured again is shown by what tells most: the most pairs, then the most arms, then the newest.
    """
    best: dict[tuple[Any, ...], Row] = {}
    for summary in found:
        if _SPLICE not in summary["pairs"]:
            continue
        cell = tuple(summary[name] for name in ("model", "label", *CELL_KEYS))
        if cell not in best or _tells(summary) >= _tells(best[cell]):
            best[cell] = summary
    models = list(dict.fromkeys(summary["model"] for summary in found))
    return sorted(
        best.values(),
        key=lambda s: (models.index(s["model"]), s["keep_turns"], s["prompt_tokens"], s["label"], s["concurrency"]),
    )


def markdown(summaries: Sequence[Row]) -> str:
    """Return the table; where two values stand, the first is re-prefilled and the second spliced."""
    lines = [_HEAD, ("---",) * len(_HEAD), *map(_line, summaries)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(summary: Row) -> tuple[str, ...]:
    arms, pair = summary["arms"], summary["pairs"][_SPLICE]
    plain, splice = arms[BASELINE], arms[_SPLICE]
    repeats = list(dict.fromkeys(str(arm["repeats"]) for arm in (plain, splice)))
    return (
        ", ".join(filter(None, [summary["model"], summary["label"]])),
        f"{summary['prompt_tokens']:,}, {summary['keep_turns']}",
        str(summary["concurrency"]),
        ", ".join(repeats),
        f"{arms['none']['p50_ms']:,.0f}" if "none" in arms else "",
        _both(plain, splice, "p50_ms", ",.0f"),
        shown(pair["ratio"], ".3f").replace("-", "−"),
        shown(pair["gain_ms"], ",.0f").replace("-", "−"),
        _both(plain, splice, "p95_ms", ",.0f"),
        _both(plain, splice, "mean_ms", ",.0f"),
        f"{100 * plain['hit_rate']:.1f} → {100 * splice['hit_rate']:.1f}",
        f"{100 * splice['ideal_hit_rate']:.1f}",
        _both(plain, splice, "output_tokens_per_s", ",.0f"),
        f"{splice['spliced']} of {splice['edited_turns']}",
        str(summary["git"] or ""),
    )


def _tells(summary: Row) -> tuple[int, int]:
    return summary["pairs"][_SPLICE]["clusters"], len(summary["arms"])


def _both(plain: Row, splice: Row, name: str, form: str) -> str:
    return f"{plain[name]:{form}} → {splice[name]:{form}}"
