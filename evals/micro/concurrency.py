"""Edited conversations side by side: `python -m evals.micro.concurrency --url http://127.0.0.1:30000`.

C agents, each with a conversation of its own (`conversations.py`: replayed trajectories under the shipped policy that
keeps the outputs of the last n turns), send a turn, wait for the whole answer and send the next: a closed loop without
time to think. A *cell* is a length of prompt, C and n. The arms:

- `none`: no edits from the base on, plain requests;
- `reprefill`: edited prompts, plain requests, so that the prefix cache is all that helps;
- `splice`: edited prompts with notes; the server may decide that re-prefilling is cheaper (`gate: auto`);
- `splice_ungated`: with notes, every edit carried out (`gate: off`).

Arms take turns in random order. Every run is a row as soon as it ends; the same command does what has no row yet.
`concurrency_bench.py` says what a run is, `concurrency_rows.py` how runs add up.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evals.micro.bench_server import BenchError, Server, about, append_row, say
from evals.micro.concurrency_bench import Bench
from evals.micro.concurrency_plan import (
    Cell,
    Workload,
    chosen_cells,
    dry_run,
    expected_total_s,
    parse_cell,
    schedule,
)
from evals.micro.concurrency_rows import (
    ARMS,
    RUN,
    SUMMARY,
    finished,
    key,
    measurement,
    read_rows,
    summaries,
    summarise,
    table,
)
from evals.micro.recorded_steps import WorkloadError
from evals.micro.result_rows import percentile
from leyline_agent.explain.conversation_file import ConversationFileError

_INCOMPLETE = 3
_DEMO = Path(__file__).parent.parent / "replay" / "demo_trajectory.json"
_FAILURES = (BenchError, OSError, http.client.HTTPException, threading.BrokenBarrierError)


def measure(bench: Bench, cells: Sequence[Cell], facts: dict[str, Any], done: dict[tuple[Any, ...], Any]) -> int:
    """Do what is not done yet, add it there, and return the exit code."""
    options = bench.options
    deadline = time.monotonic() + options.limit_s
    same = {"turns": options.turns, "output_tokens": options.output_tokens}
    rows = {cell: {**facts, **same, **cell.as_json(), "workload": bench.workload.digest(cell)} for cell in cells}
    left = {
        cell: [(n, arm) for n, arm in schedule(cell, options) if key({**row, "arm": arm, "repeat": n}) not in done]
        for cell, row in rows.items()
    }
    _say(f"{sum(map(len, left.values()))} runs to do, about {expected_total_s(left, options):.0f} s")
    failed = incomplete = False
    for cell, row in rows.items():
        for repeat, arm in left[cell]:
            if time.monotonic() + bench.expected_s(cell) > deadline:
                incomplete = True
                break
            run_row = _run_row(bench, cell, arm, repeat, row)
            append_row(options.json_out, run_row)
            _say(f"{cell} {arm}, repeat {repeat + 1} of {options.repeats}: {_in_a_line(run_row)}")
            if "error" not in run_row:
                done[key(run_row)] = run_row
                continue
            failed = True
            if not bench.server.is_healthy():
                raise BenchError("the server does not answer any more")
        of_cell = [run for run in done.values() if measurement(run) == measurement(row)]
        if left[cell] and len(of_cell) >= options.repeats * len(options.arms):
            append_row(options.json_out, {**row, **summarise(of_cell)})
    measured = {measurement(row) for row in rows.values()}
    print(table(summaries(run for run in done.values() if measurement(run) in measured)))
    if incomplete:
        _say(f"not all was done in {options.limit_s:.0f} s; the same command goes on from here")
    return 1 if failed else _INCOMPLETE * incomplete


def _run_row(bench: Bench, cell: Cell, arm: str, repeat: int, row: dict[str, Any]) -> dict[str, Any]:
    """Run, and return the row, of what went wrong as well."""
    run_row = {"op": RUN, **row, "arm": arm, "repeat": repeat}
    try:
        bench.prepare(cell)
        return run_row | bench.run(cell, arm, repeat, bench.options.turns)
    except _FAILURES as error:
        return run_row | {"error": f"{type(error).__name__}: {error}"}


def _in_a_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    ms, prompt, cached, ideal = (
        [value for talk in row[name] for value in talk] for name in ("ms", "prompt", "cached", "ideal")
    )
    statuses = [status for talk in row.get("status", ()) for status in talk]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses)))
    rates = f"hit {100 * sum(cached) / sum(prompt):.1f}% (ideal {100 * sum(ideal) / sum(prompt):.1f}%)"
    return f"p50 {percentile(ms, 50):,.0f} ms, {rates}, {row['wall_s']:.1f} s{'; ' if counts else ''}{counts}"


def _say(text: str) -> None:
    say("concurrency", text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evals.micro.concurrency", description="Time edited conversations side by side."
    )
    parser.add_argument("--url")
    parser.add_argument("--trajectories", type=Path, nargs="+", default=[_DEMO], help="files, or folders of *.json")
    parser.add_argument(
        "--cells",
        type=parse_cell,
        nargs="+",
        metavar="LENGTH:C[:N]",
        help="instead of --prompt-tokens, --concurrency, --keep-turns",
    )
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--keep-turns", type=int, nargs="+", default=[2], help="n of the policy (default: 2)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--turns", type=int, default=6, help="measured, of each conversation (default: 6)")
    parser.add_argument("--output-tokens", type=int, default=48, help="of each turn (default: 48)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up-turns", type=int, default=2, help="of each arm, before a cell (default: 2)")
    parser.add_argument("--limit-s", type=float, default=600, help="begin nothing that ends later (default: 600)")
    parser.add_argument("--label", default="", help="stands in the rows and tells servers apart, e.g. page64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json-out", type=Path, help="rows: those there are not done again, new ones are appended")
    parser.add_argument("--commit")
    parser.add_argument("--dry-run", action="store_true", help="show what would be sent; needs no server")
    parser.add_argument("--summarize", type=Path, metavar="FILE", help="print the table of a file's rows and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cells. Exit 0, 1 where a run failed, 2 for what cannot be done, 3 where time ran out."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.turns, options.output_tokens, options.repeats, options.warm_up_turns) < 1:
        parser.error("--turns, --output-tokens, --repeats and --warm-up-turns: at least 1 each")
    try:
        if options.summarize:
            found = summaries(read_rows(options.summarize))
            if not found:
                parser.error(f"--summarize: {options.summarize} has no finished run of this benchmark")
            print(table(found))
            return 0
        cells = chosen_cells(options)
        workload = Workload(options)
        if options.dry_run:
            print(dry_run(workload, cells, options))
            return 0
        if options.url is None:
            parser.error("--url: expected the server's, or --dry-run or --summarize")
        return _against_server(workload, cells, options, arguments)
    except (WorkloadError, ConversationFileError) as error:
        _say(str(error))
        return 2


def _against_server(
    workload: Workload, cells: Sequence[Cell], options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    num_threads = max(cell.concurrency for cell in cells)
    done = finished(read_rows(options.json_out) if options.json_out else [])
    if options.json_out is not None and options.json_out.exists():
        text = options.json_out.read_text()
        if text and not text.endswith("\n"):
            # A line that was cut must not swallow the next one.
            options.json_out.write_text(text + "\n")
    try:
        with (
            Server(options.url) as server,
            ThreadPoolExecutor(num_threads, thread_name_prefix="agent") as pool,
        ):
            facts = {"label": options.label, "model": server.model_name()}
            facts |= about(server, arguments, "evals.micro.concurrency", commit=options.commit, seed=options.seed)
            bench = Bench(server, options, workload, pool, nonce=f"{time.time_ns()}")
            return measure(bench, cells, facts, done)
    except _FAILURES as error:
        append_row(options.json_out, {"op": SUMMARY, "error": f"{type(error).__name__}: {error}"})
        _say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
