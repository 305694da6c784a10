"""From the rows of a run to what they say: solve rates, paired differences, costs, and what went wrong.

Errors and skipped episodes count neither as solved nor as failed, and stand apart. Only episodes that ended have a rate
or a cost. `report_text.py`, `report_json.py` and `page.py` show this, each with the title, which says so where a script
stood for a model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import get_args

import numpy as np

from evals.solve_rate.power import pairs_needed
from evals.solve_rate.rows import Execution, Row, SolveRateError
from evals.solve_rate.statistics import (
    CONFIDENCE,
    Interval,
    Pair,
    PairedDifference,
    holm,
    is_distinguishable,
    paired_difference,
    wilson,
)

_EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
_POWER = 0.8


@dataclass(frozen=True, slots=True)
class Rate:
    """Solved episodes among those that ended."""

    solved: int
    ended: int

    @property
    def value(self) -> float | None:
        """Return the rate; None where no episode ended."""
        return self.solved / self.ended if self.ended else None

    @property
    def interval(self) -> Interval | None:
        """Return Wilson's interval."""
        return wilson(self.solved, self.ended)


@dataclass(frozen=True, slots=True)
class ArmReport:
    """One arm. Tokens, turns and times are of episodes that ended; means are by episode."""

    arm: str
    execution: Execution
    scripts: tuple[str, ...]
    """Which scripts stood for the model in any of its episodes."""
    rate: Rate
    failures_ended: Mapping[str, int]
    """What ended the failed episodes."""
    errors: int
    skipped: int
    turns: float
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    splices: int
    fallbacks: Mapping[str, int]
    turn_ms: tuple[float, float, float] | None
    """The 20th, 50th and 80th percentile; None without turns."""

    @property
    def rate_with_errors(self) -> Rate:
        """Return what the rate would be if each error were a failure."""
        return Rate(self.rate.solved, self.rate.ended + self.errors)

    @property
    def hit_rate(self) -> float | None:
        """Return cached over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms, over the episodes that both ended."""

    base: str
    other: str
    left_out: int
    """Pairs of which an episode is missing, an error or skipped."""
    difference: PairedDifference | None
    """None where no pair is left."""
    adjusted_p_value: float | None
    """After Holm, for all comparisons of the group."""
    distinguishable: bool
    pairs_needed: int | None
    """How many it takes to see a difference of this size four times out of five; None if there is none, or far more."""

    @property
    def name(self) -> str:
        """Return what is taken from what, shortly."""
        policy, _, base = self.base.rpartition("/")
        if policy and self.other.startswith(f"{policy}/"):
            return f"{policy}: {self.other.removeprefix(f'{policy}/')} − {base}"
        return f"{self.other} − {self.base}"

    @property
    def verdict(self) -> str:
        """Return the words for it."""
        if self.difference is None:
            return "no pairs"
        if not self.distinguishable:
            return "not distinguishable"
        return f"{'higher' if self.difference.difference > 0 else 'lower'} than {self.base}"


@dataclass(frozen=True, slots=True)
class Group:
    """A suite, or the part of it that the paper ran."""

    name: str
    arms: tuple[ArmReport, ...]
    tasks: Mapping[str, Mapping[str, Rate]]
    """By task, then by arm."""
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why episodes have no result."""

    suite: str
    arm: str
    status: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """A run."""

    title: str
    """Says so, where a script stood for a model."""
    is_scripted: bool
    facts: Mapping[str, str]
    statuses: Mapping[str, int]
    groups: tuple[Group, ...]
    problems: tuple[Problem, ...]


def make_report(rows: Sequence[Row]) -> Report:
    """Sum up a run.

    Raises:
        SolveRateError: there is no row.
    """
    if not rows:
        raise SolveRateError("the run has no episodes yet; expected one row or more, see `leyline-eval run`")
    statuses = Counter(row.status for row in rows)
    commits = sorted({row.git for row in rows if row.git})
    started = sorted(row.started for row in rows)
    facts = {
        "run": _listed(row.run for row in rows),
        "model": _listed(row.model for row in rows),
        "agent": _listed(row.agent for row in rows),
        "seeds": _seeds({row.seed for row in rows}),
        "commit": ", ".join(commits) or "unknown",
        "episodes started": f"{started[0]} to {started[-1]}",
    }
    if any(row.sandboxed is False for row in rows):
        facts["sandbox"] = "none: commands of the agent could reach the network and other files"
    problems = Counter(
        (row.suite, row.arm, row.status, row.reason or "no reason was written")
        for row in rows
        if row.status in ("error", "skipped")
    )
    return Report(
        title=_title(rows),
        is_scripted=any(row.scripted is not None for row in rows),
        facts=facts,
        statuses={status: statuses[status] for status in ("solved", "failed", "error", "skipped")},
        groups=tuple(_group(name, of_group) for name, of_group in _groups(rows).items()),
        problems=tuple(Problem(*what, count) for what, count in problems.most_common()),
    )


def _title(rows: Sequence[Row]) -> str:
    run, models = _listed(row.run for row in rows), _listed(row.model for row in rows if row.scripted is None)
    scripts = _listed(row.scripted for row in rows if row.scripted is not None)
    if not scripts:
        return f"Solve rates of {run}: {models}"
    if not models:
        return f"SCRIPTED, NO MODEL: solve rates of {run} (a script, {scripts}, stands for the model)"
    of_model = {row.arm for row in rows if row.scripted is None}
    arms = _listed(
        f"{row.arm} (some episodes)" if row.arm in of_model else row.arm for row in rows if row.scripted is not None
    )
    return f"PARTLY SCRIPTED: solve rates of {run}: {models} (but in {arms} a script, {scripts}, stands for the model)"


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.suite].append(row)
    of_paper = [row for row in rows if row.paper_subset]
    if of_paper and len(of_paper) < len(groups[of_paper[0].suite]):
        groups[f"{of_paper[0].suite}, the paper's tasks"] = of_paper
    return groups


def _group(name: str, rows: Sequence[Row]) -> Group:
    by_arm: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_arm[row.arm].append(row)
    policies = list(dict.fromkeys(row.policy for row in rows))
    arms = sorted(
        by_arm,
        key=lambda arm: (
            by_arm[arm][0].execution != "none",
            policies.index(by_arm[arm][0].policy),
            _EXECUTIONS.index(by_arm[arm][0].execution),
            arm,
        ),
    )
    tasks = {
        task: {arm: _rate([row for row in by_arm[arm] if row.task == task]) for arm in arms}
        for task in sorted({row.task for row in rows})
    }
    return Group(name, tuple(_arm(by_arm[arm]) for arm in arms), tasks, tuple(_compare_all(arms, by_arm)))


def _arm(rows: Sequence[Row]) -> ArmReport:
    ended = [row for row in rows if row.status in ("solved", "failed")]
    fallbacks: Counter[str] = Counter()
    for row in ended:
        fallbacks.update(row.fallbacks)

    def mean(values: Sequence[int]) -> float:
        return fmean(values) if values else 0.0

    return ArmReport(
        arm=rows[0].arm,
        execution=rows[0].execution,
        scripts=tuple(sorted({row.scripted for row in rows if row.scripted is not None})),
        rate=_rate(rows),
        failures_ended=dict(Counter(row.ended or "unknown" for row in ended if row.status == "failed")),
        errors=sum(row.status == "error" for row in rows),
        skipped=sum(row.status == "skipped" for row in rows),
        turns=mean([row.turns for row in ended]),
        prompt_tokens=mean([row.prompt_tokens for row in ended]),
        cached_tokens=mean([row.cached_tokens for row in ended]),
        completion_tokens=mean([row.completion_tokens for row in ended]),
        splices=sum(row.splices for row in ended),
        fallbacks=dict(fallbacks),
        turn_ms=_percentiles([ms for row in ended for ms in row.turn_ms]),
    )


def _percentiles(turn_ms: Sequence[float]) -> tuple[float, float, float] | None:
    if not turn_ms:
        return None
    low, middle, high = np.percentile(turn_ms, (20, 50, 80))
    return float(low), float(middle), float(high)


def _rate(rows: Sequence[Row]) -> Rate:
    statuses = Counter(row.status for row in rows)
    return Rate(statuses["solved"], statuses["solved"] + statuses["failed"])


def _compare_all(arms: Sequence[str], by_arm: Mapping[str, Sequence[Row]]) -> list[Comparison]:
    """Compare each arm with the one without a policy, and the executions of each policy with each other."""
    every = list(combinations(arms, 2))
    pairs = [
        (base, other)
        for base, other in every
        if by_arm[base][0].execution == "none" or by_arm[base][0].policy == by_arm[other][0].policy
    ] or every
    compared = [_pair_up(by_arm[base], by_arm[other]) for base, other in pairs]
    differences = [paired_difference(paired) for paired, _ in compared]
    adjusted = iter(holm([difference.p_value for difference in differences if difference is not None]))
    comparisons = []
    for (base, other), (_, left_out), difference in zip(pairs, compared, differences, strict=True):
        p_value = None if difference is None else next(adjusted)
        distinguishable = difference is not None and p_value is not None and is_distinguishable(difference, p_value)
        comparisons.append(
            Comparison(base, other, left_out, difference, p_value, distinguishable, _pairs_needed(difference))
        )
    return comparisons


def _pair_up(base: Sequence[Row], other: Sequence[Row]) -> tuple[dict[str, list[Pair]], int]:
    """Return the pairs by task, and how many are left out."""
    by_episode = [
        {(row.task, row.seed, row.repeat): row.status == "solved" for row in rows if row.status in ("solved", "failed")}
        for rows in (base, other)
    ]
    planned = {(row.task, row.seed, row.repeat) for row in (*base, *other)}
    # Each seed of the bundled tasks is a task that was generated for it.
    is_generated = base[0].suite == "mini_tasks"
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for episode in sorted(by_episode[0].keys() & by_episode[1].keys()):
        task, seed, _ = episode
        pairs[f"{task} {seed}" if is_generated else task].append((by_episode[0][episode], by_episode[1][episode]))
    return pairs, len(planned) - sum(len(of_task) for of_task in pairs.values())


def _pairs_needed(difference: PairedDifference | None) -> int | None:
    if difference is None or difference.difference == 0:
        return None
    try:
        return pairs_needed(
            difference=difference.difference,
            discordance=difference.discordance,
            alpha=1 - CONFIDENCE,
            power=_POWER,
        )
    except SolveRateError:
        return None


def _seeds(seeds: set[int]) -> str:
    if len(seeds) > 12:
        return f"{len(seeds)}, from {min(seeds)} to {max(seeds)}"
    return ", ".join(str(seed) for seed in sorted(seeds))


def _listed(values: Iterable[str | None]) -> str:
    return ", ".join(sorted({value for value in values if value}))
