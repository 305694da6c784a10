"""`leyline-eval`: run episodes, and say what came of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from evals.solve_rate import report_cli
from evals.solve_rate.config import Config, Serve, load_config, parse_config
from evals.solve_rate.progress import RunProgress
from evals.solve_rate.runner import Stop, run
from leyline_agent.errors import LeylineError

_RUNS = Path("build/solve_rate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0: done. 1: done, with errors among the episodes. 2: it cannot be done, with a message. 3: the budget was spent
    before all episodes were done. 130: interrupted; the same command goes on.
    """
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except LeylineError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command goes on")
        return 130
    except BrokenPipeError:
        # Whoever reads has had enough; nothing more is written as the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def run_command(args: argparse.Namespace) -> int:
    """Run what is left of a config."""
    config = _with_options(load_config(args.config), args)
    folder = args.out or _RUNS / config.name
    console = Console(width=None if sys.stdout.isatty() else 200)
    stop = Stop()
    with _stopping(stop, console), _server(config, console) as url, RunProgress(console, config) as progress:
        finished = run(config, folder, url, progress, stop, fresh=args.fresh)
    if not console.is_terminal:
        console.print(progress.table())
    console.print(f"{folder}; see it with: leyline-eval report {folder}", markup=False, highlight=False, soft_wrap=True)
    if finished.num_errors:
        console.print(
            f"{finished.num_errors} episodes are errors, which the same command does again; the rows say why",
            soft_wrap=True,
        )
    if finished.num_left:
        console.print(f"{finished.num_left} episodes are left: {finished.stopped_by}", markup=False, soft_wrap=True)
        return 130 if finished.stopped_by == "interrupted" else 3
    return 1 if finished.num_errors else 0


def _with_options(config: Config, args: argparse.Namespace) -> Config:
    """Return the config with what the command line says instead."""
    said = config.model_dump(mode="json")
    if args.url is not None:
        said["server"] |= {"url": args.url, "serve": None}
    if args.serve is not None:
        # With a model of one's own it is a GPU's, unless the config says otherwise.
        serve = config.server.serve or Serve(device="cuda" if args.serve else "cpu")
        model = args.serve or serve.model
        said["server"] |= {"url": None, "serve": {**serve.model_dump(mode="json"), "model": model}}
    if args.model is not None:
        said["model"] |= {"name": args.model, "scripted": None, "recorded": None}
    if args.seeds is not None:
        said["seeds"] = list(range(args.seeds))
    for name in ("jobs", "agent"):
        if getattr(args, name) is not None:
            said[name] = getattr(args, name)
    for name in ("total_s", "total_tokens"):
        if getattr(args, name) is not None:
            said["limits"][name] = getattr(args, name)
    return parse_config(said, where=f"{args.config} and the command line")


@contextlib.contextmanager
def _server(config: Config, console: Console) -> Iterator[str]:
    """Yield the given server, or start one and stop it afterwards."""
    if config.server.url is not None:
        yield config.server.url
        return
    # Only here: a run against a running server needs neither torch nor SGLang.
    from evals.models.random_mla import ensure_model
    from evals.serving import serve

    wanted = config.server.serve or Serve()
    model = wanted.model or str(ensure_model())
    console.print(f"starting SGLang on {model} ({wanted.device}) …", markup=False, highlight=False, soft_wrap=True)
    with serve(model, device=wanted.device, extra_args=wanted.args, ready_timeout_s=wanted.ready_s) as server:
        console.print(f"{server.url}, log in {server.log_path}", markup=False, highlight=False, soft_wrap=True)
        yield server.url


@contextlib.contextmanager
def _stopping(stop: Stop, console: Console) -> Iterator[None]:
    """Have the first Ctrl-C, or SIGTERM, break the episodes off, and the second one end the program."""
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            # Threads that wait for a tool would be waited for. Rows are on the disk, and what we started ends with us.
            console.show_cursor()
            os._exit(130)
        stop.set("interrupted")
        print("breaking off; once more to end at once", file=sys.stderr)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each command sets `run`."""
    parser = argparse.ArgumentParser(prog="leyline-eval", description="What policies do to how often agents succeed.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    words = "run the episodes of a config that are not done yet"
    command = commands.add_parser("run", help=words, description=f"{words[0].upper()}{words[1:]}. See evals/README.md.")
    command.add_argument("config", help="a YAML file, or the name of one that comes along")
    command.add_argument("--out", type=Path, metavar="FOLDER", help=f"the run's folder ({_RUNS}/NAME)")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--url", help="a running OpenAI-compatible server")
    where.add_argument(
        "--serve",
        nargs="?",
        const="",
        metavar="MODEL",
        help="start an SGLang with the plugin: with a model on a GPU, without one the test model on the CPU",
    )
    command.add_argument("--model", metavar="NAME", help="a served model's name, instead of the config's")
    command.add_argument("--agent", choices=("langgraph", "debug_gym"), help="who acts, instead of the config's")
    command.add_argument("--seeds", type=int, metavar="N", help="the seeds 0 to N - 1, instead of the config's")
    command.add_argument("--jobs", type=int, metavar="N", help="episodes at a time")
    command.add_argument(
        "--total-s", type=float, metavar="S", help="after so many seconds running episodes are broken off"
    )
    command.add_argument("--total-tokens", type=int, metavar="N", help="no episode starts after so many tokens")
    command.add_argument("--fresh", action="store_true", help="begin anew: remove what the folder has of a run")
    command.set_defaults(run=run_command)
    report_cli.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
