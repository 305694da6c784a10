"""What a run shows: a table that lives on a terminal, elsewhere a line an episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from evals.solve_rate.config import Config
from evals.solve_rate.episode import Plan
from evals.solve_rate.rows import Row

_MAX_NAMED = 4


class RunProgress:
    """A table of the arms, and what runs now."""

    def __init__(self, console: Console, config: Config) -> None:
        self._console, self._config = console, config
        self._rows: dict[tuple[str, str, str, int, int], Row] = {}
        self._planned: Counter[str] = Counter()
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None

    def __enter__(self) -> RunProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, plans: Sequence[Plan], done: Sequence[Row], *, is_sandboxed: bool | None) -> None:
        """Say what is to be done."""
        self._planned = Counter(plan.arm.name for plan in plans)
        self._rows = {row.key: row for row in done}
        num_done = sum(row.status != "error" for row in done)
        self._say(f"{len(plans)} episodes, {num_done} of them done before; {self._config.jobs} at a time")
        if is_sandboxed is not None:
            how = "in a sandbox without network" if is_sandboxed else "NOT sandboxed: in a folder with a time limit"
            self._say(f"the agent's commands run {how}")
        for reason in dict.fromkeys(
            f"{plan.entry.name}: skipped, {plan.entry.skip}" for plan in plans if plan.entry.skip
        ):
            self._say(reason)
        if (script := self._config.model.scripted) is not None:
            self._say(f"the model is the script {script!r}: nothing here says anything about a model")

    def tick(self, running: Sequence[Plan], *, tokens: int, seconds: float) -> None:
        """Show what runs."""
        if self._live is not None:
            self._live.update(Group(self.table(), self._footer(running, tokens, seconds)))

    def row(self, row: Row) -> None:
        """Count an episode."""
        self._rows[row.key] = row
        if self._live is None:
            hit = f"{row.cached_tokens / row.prompt_tokens:.0%}" if row.prompt_tokens else "–"
            num_done = sum(each.status != "error" for each in self._rows.values())
            self._say(
                f"{num_done:>4}/{self._planned.total()} {row.status:<7} {row.task:<22} {row.arm:<34} seed {row.seed} "
                f"{row.score}/{row.max_score}  turns {row.turns:>3}  prompt {row.prompt_tokens:>8,}  cached {hit:>4}  "
                f"{row.seconds:>6.1f} s  {row.reason or ''}".rstrip()
            )

    def table(self) -> Table:
        """Return the arms side by side, as far as they have come."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("arm", style="bold", no_wrap=True)
        for name in (
            "done",
            "solved",
            "failed",
            "errors",
            "skipped",
            "turns",
            "prompt",
            "cached",
            "splices",
            "s/episode",
        ):
            table.add_column(name, justify="right", no_wrap=True)
        for arm, planned in self._planned.items():
            rows = [row for row in self._rows.values() if row.arm == arm]
            count = Counter(row.status for row in rows)
            played = [row for row in rows if row.status in ("solved", "failed")]
            prompt, cached = (sum(getattr(row, key) for row in played) for key in ("prompt_tokens", "cached_tokens"))
            fallbacks = sum(sum(row.fallbacks.values()) for row in played)
            splices = f"{sum(row.splices for row in played)}" + (f" ({fallbacks} not)" if fallbacks else "")
            table.add_row(
                arm,
                f"{len(rows) - count['error']}/{planned}",
                *(str(count[status]) for status in ("solved", "failed", "error", "skipped")),
                f"{sum(row.turns for row in played):,}",
                f"{prompt:,}",
                f"{cached / prompt:.1%}" if prompt else "",
                splices,
                f"{sum(row.seconds for row in played) / len(played):.1f}" if played else "",
            )
        return table

    def _footer(self, running: Sequence[Plan], tokens: int, seconds: float) -> Text:
        limits = self._config.limits
        of_tokens = f" of {limits.total_tokens:,}" if limits.total_tokens else ""
        of_seconds = f" of {limits.total_s:,.0f}" if limits.total_s else ""
        named = [f"{plan.entry.name} {plan.arm.name} seed {plan.seed}" for plan in running[:_MAX_NAMED]]
        if len(running) > _MAX_NAMED:
            named.append(f"{len(running) - _MAX_NAMED} more")
        return Text(
            f"{tokens:,}{of_tokens} tokens, {seconds:,.0f}{of_seconds} s; running: {'; '.join(named) or 'none'}"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
