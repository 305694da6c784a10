"""`python -m evals.replay.demo`, or `make demo`: one trajectory in three arms on a server of its own, and a report.

Fails with exit code 1 if the splice arm had no splice, or a turn that fell back to a re-prefill.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from evals.models.random_mla import ensure_model
from evals.replay.errors import ReplayError
from evals.replay.progress import ReplayProgress, arms_table, remarks
from evals.replay.record import DEMO_TRAJECTORY
from evals.replay.runner import ReplayRequest, keep_last_policy, replay
from evals.replay.trajectory import load_trajectory
from evals.serving import serve
from leyline_agent.errors import LeylineError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = _parser().parse_args(argv)
    # A termination unwinds like Ctrl-C, so that the server is stopped either way.
    signal.signal(signal.SIGTERM, _terminated)
    console = Console()
    started = time.monotonic()
    try:
        trajectory = load_trajectory(args.trajectory)
        request = ReplayRequest(trajectory, keep_last_policy(args.turns, trajectory))
        console.print("1/3 the test model (generated once, then reused) …")
        model_dir = ensure_model()
        console.print(f"    {model_dir}", markup=False, highlight=False)
        console.print("2/3 the server: SGLang with the Leyline plugin, on the CPU …")
        with serve(model_dir) as server, ReplayProgress(console) as progress:
            progress.say(f"    {server.url}, log in {server.log_path}")
            progress.say(f"3/3 {trajectory.num_turns} model calls in three arms")
            summary = replay(request, url=server.url, out=args.out, progress=progress)
        show(summary, console, args.out)
        console.print(f"{time.monotonic() - started:.0f} s in all", highlight=False)
        check(summary)
    except LeylineError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the server is stopped")
        return 130
    return 0


def show(summary: dict[str, Any], console: Console, out: Path) -> None:
    """Print the table, what it does not say, and where the report is."""
    console.print(arms_table(summary))
    for line in remarks(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for name in ("report.html", "summary.json", "turns.jsonl"):
        console.print(f"    {out / name}", highlight=False, markup=False)


def check(summary: dict[str, Any]) -> None:
    """Check that the splice arm spliced.

    Raises:
        ReplayError: it did not, or not in every turn that was edited.
    """
    splice = summary["arms"]["splice"]
    if splice["fallbacks"]:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in splice["fallbacks_by_reason"].items())
        raise ReplayError(
            f"{splice['fallbacks']} of {splice['turns']} turns of the splice arm fell back to a re-prefill "
            f"({reasons}); docs/wire-protocol.md explains the reasons, turns.jsonl names the turns"
        )
    if not splice["splices"]:
        raise ReplayError(
            f"no turn of the splice arm was spliced (outcomes: {splice['statuses']}). With `no_outcome` the server "
            "runs without the plugin; with `unchanged` the policy edits nothing of this trajectory, so take a smaller N"
        )


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evals.replay.demo", description=__doc__)
    parser.add_argument("--trajectory", type=Path, default=DEMO_TRAJECTORY, help="by default the project's own")
    parser.add_argument("--turns", type=int, default=2, metavar="N", help="keep the outputs of the last N turns (2)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where the results go (build/demo)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
