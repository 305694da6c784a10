"""What a replay shows while it runs, and the table at its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from evals.replay.turn_rows import Arm, TurnRow


class ReplayProgress:
    """A bar for each arm on a terminal; elsewhere one line for each turn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[Arm, TaskID] = {}
        self._num_turns = 0

    def __enter__(self) -> ReplayProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False, markup=False)

    def start_arm(self, arm: Arm, num_turns: int) -> None:
        """Open an arm's bar."""
        self._num_turns = num_turns
        self._tasks[arm] = self._bars.add_task(arm, total=num_turns, last="")

    def turn(self, row: TurnRow) -> None:
        """Show one turn."""
        cached = f"{row.cached_tokens / row.prompt_tokens:>4.0%}" if row.prompt_tokens else "   –"
        facts = f"prompt {row.prompt_tokens:>6,}  cached {cached}  {row.ms:>8,.0f} ms"
        outcome = " ".join(part for part in (row.status, row.reason) if part)
        self._bars.update(self._tasks[row.arm], advance=1, last=f"{facts}  {outcome}")
        if not self._console.is_terminal:
            self.say(f"{row.arm:<9} {row.turn:>3}/{self._num_turns}  {facts}  {outcome}".rstrip())

    def end_arm(self, arm: Arm, stopped_at: str | None) -> None:
        """Close an arm's bar, visibly where it stopped early."""
        if stopped_at is not None:
            self.say(f"{arm}: stopped at {stopped_at}")
            self._bars.update(self._tasks[arm], last=f"stopped at {stopped_at}")


def arms_table(summary: Mapping[str, Any]) -> Table:
    """Return the arms side by side."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("arm", style="bold", no_wrap=True)
    for name in ("turns", "prompt", "cached", "computed", "hit rate", "ideal", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm, totals in summary["arms"].items():
        ideal = totals.get("hit_rate_ideal")
        table.add_row(
            arm,
            f"{totals['turns']}" + ("*" if "stopped_at" in totals else ""),
            f"{totals['prompt_tokens']:,}",
            f"{totals['cached_tokens']:,}",
            f"{totals['computed_tokens']:,}",
            f"{totals['hit_rate']:.1%}",
            "" if ideal is None else f"{ideal:.1%}",
            f"{totals['ms_total'] / 1000:,.1f}",
        )
    return table


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Return what the table does not say, a line each."""
    lines = ["tokens and hit rate from the second request on; what a splice itself prefilled is not counted as cached"]
    for arm, totals in summary["arms"].items():
        if "stopped_at" in totals:
            lines.append(f"* {arm} stopped at {totals['stopped_at']}")
        if "splices" in totals:
            reasons = "".join(f", {reason} {count}" for reason, count in totals["fallbacks_by_reason"].items())
            lines.append(
                f"{arm}: {totals['splices']} of {totals['turns']} turns spliced, "
                f"{totals['fallbacks']} fallbacks{reasons}"
            )
        if gap := totals.get("ideal_gap"):
            lines.append(
                f"{arm}: {gap['missed_tokens']:,} tokens of the ideal missed; {gap['extra_tokens']:,} served beyond "
                "it, where a new text repeats one that was edited"
            )
        if totals.get("tokenizer_mismatches"):
            lines.append(
                f"{arm}: the local tokenizer counts {totals['tokenizer_mismatches']} prompts differently from the "
                "server, so do not trust the ideal"
            )
    return lines + _crosscheck_lines(summary)


def _crosscheck_lines(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    for arm, totals in summary["arms"].items():
        check = totals["crosscheck"]
        client, server = check["client"], check["server"]
        said = f"{client['requests']} requests, {client['prompt_tokens']:,} prompt, {client['cached_tokens']:,} cached"
        if server is None:
            lines.append(f"{arm}: responses say {said}; the server has no /metrics (--enable-metrics)")
        elif check["agrees"] and not check["internal_requests"]:
            lines.append(f"{arm}: responses and /metrics agree: {said}")
        else:
            counted = (
                f"{server['http_chat_requests']} requests, {server['prompt_tokens']:,} prompt, "
                f"{server['cached_tokens']:,} cached, {check['internal_requests']} internal prefills"
            )
            verdict = "which agrees" if check["agrees"] else "which DISAGREES"
            lines.append(f"{arm}: responses say {said}; /metrics {counted}, {verdict}")
    return lines
