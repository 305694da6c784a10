"""`python -m evals.replay TRAJECTORY`: replay a recorded trajectory in three arms and compare them."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from evals.replay.progress import ReplayProgress, arms_table, remarks
from evals.replay.runner import ReplayRequest, keep_last_policy, replay
from evals.replay.trajectory import load_trajectory
from evals.replay.turn_rows import ARMS, Arm
from leyline_agent.errors import LeylineError
from leyline_agent.policy import load_policy


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 with a message on what cannot be done."""
    args = _parser().parse_args(argv)
    console = Console(stderr=args.json)
    try:
        trajectory = load_trajectory(args.trajectory)
        policy = load_policy(args.policy) if args.policy else keep_last_policy(args.turns, trajectory)
        request = ReplayRequest(trajectory, policy, args.arms, args.max_prompt_tokens, args.max_turns)
        with _server(args.url, console) as url, ReplayProgress(console) as progress:
            summary = replay(request, url=url, out=args.out, progress=progress)
    except LeylineError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        return 130
    if args.json:
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        return 0
    console.print(arms_table(summary))
    for line in remarks(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{args.out / 'report.html'}", markup=False)
    return 0


@contextlib.contextmanager
def _server(url: str | None, console: Console) -> Iterator[str]:
    """Yield the given server, or start the patched one on the test model and stop it afterwards."""
    if url is not None:
        yield url.rstrip("/")
        return
    # Only here: a replay against a running server needs neither torch nor SGLang.
    from evals.models.random_mla import ensure_model
    from evals.serving import serve

    console.print("making sure of the test model, then starting the server …")
    with serve(ensure_model()) as server:
        console.print(f"{server.url}, log in {server.log_path}", markup=False)
        yield server.url


def _arms(text: str) -> tuple[Arm, ...]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ARMS]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected some of {','.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in wanted)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected 1 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evals.replay", description=__doc__)
    parser.add_argument("trajectory", help='a JSON file: {"source", "messages"[, "tools"]} or a list of chat messages')
    rule = parser.add_mutually_exclusive_group()
    rule.add_argument("--turns", type=int, default=2, metavar="N", help="keep the outputs of the last N turns (2)")
    rule.add_argument(
        "--policy", metavar="FILE", help="a policy instead of --turns: a file, or the name of a shipped one"
    )
    parser.add_argument("--arms", type=_arms, default=ARMS, help=f"some of {','.join(ARMS)} (all)")
    parser.add_argument("--url", help="a running server, without /v1; by default one is started on the test model")
    parser.add_argument("--out", type=Path, default=Path("build/replay"), help="where the results go (build/replay)")
    parser.add_argument("--max-prompt-tokens", type=_positive, default=40_000, help="where the arm `none` ends (40000)")
    parser.add_argument("--max-turns", type=_positive, default=None, help="replay only the first so many model calls")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and progress to stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
