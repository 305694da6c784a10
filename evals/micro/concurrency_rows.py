"""What the runs of `evals.micro.concurrency` add up to: figures of each arm, paired differences, bars, a table.

A run is one arm of a cell, once; its row holds a list for each conversation with a value for each turn. A summary is
made of run rows alone, so it can be made again from a file. Pure arithmetic.

**Pairs.** A turn of an arm is paired with the same turn of the same conversation in the same repeat of `reprefill`. The
intervals are 95% percentile bootstraps that draw whole conversations of a repeat, with all their turns: turns of one
conversation are no independent draws. Conversations of one run share its luck, which no interval here knows of.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evals.micro.result_rows import percentile

Row = Mapping[str, Any]

ARMS = ("none", "reprefill", "splice", "splice_ungated")
RUN, SUMMARY = "concurrency_run", "concurrency"
BASELINE = "reprefill"
PAIRED = ("splice", "splice_ungated")
NEVER_SLOWER = 1.05
NEAR_IDEAL_POINTS = 1.0
CLEAR_WIN = 0.2
LET_THROUGH = 0.95
MIN_CLUSTERS = 3
NUM_RESAMPLES = 4000
GATED = "reprefill: gated"
SPLICED = ("spliced", "partial")
CELL_KEYS = ("prompt_tokens", "concurrency", "keep_turns")
SAME_KEYS = ("model", "git", "seed", "label", "turns", "output_tokens", "workload", *CELL_KEYS)
"""Rows are of one measurement where these are equal."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval; None for the ends with fewer than `MIN_CLUSTERS` clusters."""

    value: float
    low: float | None
    high: float | None

    def as_json(self, digits: int) -> dict[str, float | None]:
        """Return it rounded."""
        return {
            name: None if value is None else round(value, digits)
            for name, value in (("value", self.value), ("low", self.low), ("high", self.high))
        }


@dataclass(frozen=True, slots=True)
class Gain:
    """What an arm gains over the baseline."""

    difference: Estimate
    """Median over pairs of baseline less arm, ms."""
    ratio: Estimate
    """Median of the arm over median of the baseline."""
    num_clusters: int


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; of one that is not there yet, none. A line that was cut is no row."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def measurement(row: Row) -> tuple[Any, ...]:
    """Return what tells a measurement of a cell from others."""
    return tuple(row.get(key) for key in SAME_KEYS)


def key(row: Row) -> tuple[Any, ...]:
    """Return what tells a run from others."""
    return (*measurement(row), row["arm"], row["repeat"])


def finished(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """Return the runs that ended well, by key."""
    return {key(row): row for row in rows if row.get("op") == RUN and "error" not in row}


def paired_gain(baseline: Sequence[Sequence[float]], arm: Sequence[Sequence[float]], *, seed: int = 0) -> Gain:
    """Compare two arms, both `[clusters, turns]` in milliseconds, turn by turn; the same seed, the same intervals."""
    over, under = np.asarray(baseline, float), np.asarray(arm, float)
    assert over.shape == under.shape
    difference = float(_median((over - under)[None])[0])
    ratio = float(_median(under[None])[0] / _median(over[None])[0])
    num_clusters = len(over)
    if num_clusters < MIN_CLUSTERS:
        return Gain(Estimate(difference, None, None), Estimate(ratio, None, None), num_clusters)
    drawn = np.random.default_rng(seed).integers(0, num_clusters, (NUM_RESAMPLES, num_clusters))
    differences = _median((over - under)[drawn])
    ratios = _median(under[drawn]) / _median(over[drawn])
    return Gain(_with_interval(difference, differences), _with_interval(ratio, ratios), num_clusters)


def summarise(runs: Sequence[Row]) -> dict[str, Any]:
    """Return the summary of one cell's runs."""
    by_arm: dict[str, dict[int, Row]] = defaultdict(dict)
    for run in runs:
        by_arm[run["arm"]][run["repeat"]] = run
    arms = {arm: arm_figures(list(by_arm[arm].values())) for arm in ARMS if arm in by_arm}
    pairs = {
        arm: _pair(by_arm[BASELINE], by_arm[arm], seed=runs[0].get("seed") or 0)
        for arm in PAIRED
        if arm in arms and by_arm[BASELINE].keys() & by_arm[arm].keys()
    }
    return {
        "op": SUMMARY,
        **{name: runs[0].get(name) for name in SAME_KEYS},
        "repeats": max(len(repeats) for repeats in by_arm.values()),
        "arms": arms,
        "pairs": pairs,
        "bars": bars(arms, pairs),
    }


def arm_figures(runs: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of one arm over its repeats."""
    ms, first_token = _flat(runs, "ms"), _flat(runs, "first_token_ms")
    prompt, cached, ideal, edits = (_flat(runs, name) for name in ("prompt", "cached", "ideal", "edits"))
    wall_s = sum(run["wall_s"] for run in runs)
    num_turns = len(runs[0]["ms"][0])
    figures: dict[str, Any] = {
        "repeats": len(runs),
        "turns": len(ms),
        **{f"p{percent}_ms": round(percentile(ms, percent), 1) for percent in (50, 95)},
        "mean_ms": round(sum(ms) / len(ms), 1),
        **{f"first_token_p{percent}_ms": round(percentile(first_token, percent), 1) for percent in (50, 95)},
        "first_token_mean_ms": round(sum(first_token) / len(first_token), 1),
        "p50_ms_by_turn": [
            round(percentile([talk[turn] for run in runs for talk in run["ms"]], 50), 1) for turn in range(num_turns)
        ],
        "output_tokens_per_s": round(len(ms) * runs[0]["output_tokens"] / wall_s, 1),
        "turns_per_s": round(len(ms) / wall_s, 3),
        "prompt_tokens": round(sum(prompt) / len(prompt), 1),
        "hit_rate": _rate(cached, prompt),
        "ideal_hit_rate": _rate(ideal, prompt),
        "edited_turns": sum(number > 0 for number in edits),
        **{f"{name}_per_run": round(_mean(runs, name), 1) for name in ("prefill_tokens", "prefill_batches")},
        "client_cpu_share": round(sum(run["client_cpu_s"] for run in runs) / wall_s, 3),
    }
    if "status" not in runs[0]:
        return figures
    status = _flat(runs, "status")
    edited = [which for which, number in zip(status, edits, strict=True) if number]
    let_through = [idx for idx, which in enumerate(status) if which in SPLICED and edits[idx]]
    return figures | {
        "statuses": dict(Counter(status)),
        "spliced": sum(which in SPLICED for which in edited),
        "gated": edited.count(GATED),
        "refused": {reason: number for reason, number in Counter(edited).items() if reason.startswith("refused")},
        "let_through": None if not edited else round(1 - edited.count(GATED) / len(edited), 4),
        "let_through_hit_rate": _rate(*([values[idx] for idx in let_through] for values in (cached, prompt))),
        "let_through_ideal_hit_rate": _rate(*([values[idx] for idx in let_through] for values in (ideal, prompt))),
        **{name: round(sum(run[name] for run in runs), 1) for name in ("moved_tokens", "saved_ms", "note_ms")},
    }


def bars(arms: Mapping[str, Row], pairs: Mapping[str, Row]) -> dict[str, bool | None]:
    """Say which bars the cell meets; None where it does not tell."""
    splice, pair, ungated = arms.get("splice"), pairs.get("splice"), pairs.get("splice_ungated")
    met: dict[str, bool | None] = dict.fromkeys(("gains", "never_slower", "near_ideal", "let_through"))
    if pair:
        low = pair["gain_ms"]["low"]
        met["gains"] = None if low is None else pair["gain_ms"]["value"] > 0 and low > 0
        met["never_slower"] = pair["ratio"]["value"] <= NEVER_SLOWER
    if splice and splice["let_through_hit_rate"] is not None:
        short = 100 * (splice["let_through_ideal_hit_rate"] - splice["let_through_hit_rate"])
        met["near_ideal"] = round(short, 3) <= NEAR_IDEAL_POINTS
    if splice and ungated and 1 - ungated["ratio"]["value"] > CLEAR_WIN:
        met["let_through"] = splice["let_through"] is not None and splice["let_through"] >= LET_THROUGH
    return met


def summaries(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return a summary for each measurement of a cell among run rows, in the order of their first runs."""
    cells: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in finished(rows).values():
        cells[measurement(row)].append(row)
    return [summarise(runs) for runs in cells.values()]


def table(found: Sequence[Row]) -> str:
    """Return the summaries as a table, a line for each arm of each cell."""
    head = ("cell", "arm", "p50 ms", "p95", "mean", "first token", "tok/s", "hit", "ideal", "prefilled", "edits done")
    lines = [(*head, "of re-prefill's p50", "gain a turn, ms")]
    notes = []
    for summary in found:
        cell = cell_name(summary)
        for arm, figures in summary["arms"].items():
            pair = summary["pairs"].get(arm)
            done = f"{figures['spliced']}/{figures['edited_turns']}" if "spliced" in figures else ""
            if figures.get("gated"):
                done += f", {figures['gated']} gated"
            lines.append(
                (
                    cell,
                    arm,
                    *(f"{figures[name]:,.0f}" for name in ("p50_ms", "p95_ms", "mean_ms", "first_token_p50_ms")),
                    f"{figures['output_tokens_per_s']:,.0f}",
                    *(f"{100 * figures[name]:.1f}%" for name in ("hit_rate", "ideal_hit_rate")),
                    f"{figures['prefill_tokens_per_run']:,.0f}",
                    done,
                    shown(pair["ratio"], ".3f") if pair else "",
                    shown(pair["gain_ms"], ".1f") if pair else "",
                )
            )
            if figures.get("refused"):
                notes.append(f"{cell} {arm}: {figures['refused']}")
        words = {True: "met", False: "MISSED", None: "-"}
        notes.append(f"{cell}: " + ", ".join(f"{bar} {words[met]}" for bar, met in summary["bars"].items()))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, "", *notes])


def cell_name(row: Row) -> str:
    """Return a cell as it is called: length, concurrency, and how many turns the policy keeps."""
    parts = [f"{row['prompt_tokens']}:{row['concurrency']}:{row['keep_turns']}"]
    return " ".join(filter(None, [str(row.get("model") or ""), str(row.get("label") or ""), *parts]))


def shown(estimate: Mapping[str, float | None], form: str) -> str:
    """Return a row's estimate with its interval, if it has one, each number in a format such as `.3f`."""
    text = f"{estimate['value']:{form}}"
    return text if estimate["low"] is None else f"{text} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def _pair(baseline: Mapping[int, Row], runs: Mapping[int, Row], *, seed: int) -> dict[str, Any]:
    repeats = sorted(baseline.keys() & runs.keys())
    over, under = (
        [talk for repeat in repeats for talk in side[repeat]["ms"]] for side in (baseline, runs)
    )  # [repeat and conversation][turn]
    gain = paired_gain(over, under, seed=seed)
    common = [arm_figures([side[repeat] for repeat in repeats]) for side in (baseline, runs)]
    return {
        "over": BASELINE,
        "clusters": gain.num_clusters,
        "gain_ms": gain.difference.as_json(2),
        "ratio": gain.ratio.as_json(4),
        # Of the repeats that both have, as the gains are.
        "p50_difference_ms": round(common[0]["p50_ms"] - common[1]["p50_ms"], 1),
        "hit_rate_gain_points": round(100 * (common[1]["hit_rate"] - common[0]["hit_rate"]), 2),
    }


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the medians of `[samples, clusters, turns]`, each a value that occurs, as `percentile` takes them."""
    flat = values.reshape(len(values), -1)
    middle = (flat.shape[1] - 1) // 2
    return np.partition(flat, middle, axis=1)[:, middle]


def _with_interval(value: float, resampled: NDArray[np.float64]) -> Estimate:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def _flat(runs: Sequence[Row], name: str) -> list[Any]:
    return [value for run in runs for talk in run[name] for value in talk]


def _mean(runs: Sequence[Row], name: str) -> float:
    return float(sum(run[name] for run in runs)) / len(runs)


def _rate(part: Sequence[int], whole: Sequence[int]) -> float | None:
    return round(sum(part) / sum(whole), 5) if whole else None
