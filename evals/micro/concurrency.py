"""Edited conversations side by side: `python -m evals.micro.concurrency --url http://127.0.0.1:30000`.

C agents, each with a conversation of its own (`conversations.py`: replayed trajectories under the shipped policy that
keeps the outputs of the last n turns), send a turn, wait for the whole answer and send the next: a closed loop without
time to think. A *cell* is a length of prompt, C and n. The arms:

- `none`: no edits from the base on, plain requests;
- `reprefill`: edited prompts, plain requests, so that the prefix cache is all that helps;
- `splice`: edited prompts with notes; the server may decide that re-prefilling is cheaper (`gate: auto`);
- `splice_ungated`: with notes, every edit carried out (`gate: off`).

All begin from the same base: cached before, and sent once more, untimed, as each run begins, so that a first edit
copies rows of the shared namespace and later ones move the conversation's own. Each run has ids of its own in what it
adds, so no run finds what another has cached. Arms take turns in random order. Every run is a row as soon as it ends;
the same command does what has no row yet. `concurrency_rows.py` says how they add up.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.micro.bench_server import Answer, BenchError, Server, Talk, about, append_row, say
from evals.micro.concurrency_plan import (
    Cell,
    Workload,
    base_s,
    chosen_cells,
    dry_run,
    expected_total_s,
    parse_cell,
    run_s,
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
from evals.micro.conversations import MARK_TOKENS, Conversation
from evals.micro.recorded_steps import WorkloadError
from evals.micro.result_rows import percentile
from leyline_agent.explain.conversation_file import ConversationFileError

GATES = {"splice": "auto", "splice_ungated": "off"}
"""What an arm's notes say; arms that are not here send none."""
_MARK_IDS = (100, 4000)
_BASES_AT_ONCE = 8
_INCOMPLETE = 3
_DEMO = Path(__file__).parent.parent / "replay" / "demo_trajectory.json"
_FAILURES = (BenchError, OSError, http.client.HTTPException, threading.BrokenBarrierError)


@dataclass(frozen=True, slots=True)
class Turn:
    """A measured turn."""

    answer: Answer
    ideal: int
    edits: int
    prompt: int
    ended: float

    @property
    def cached(self) -> int:
        """Tokens that were served from the cache; what a splice prefilled is counted among them by the server."""
        return self.answer.cached_tokens - int(self.answer.outcome.get("prefilled_tokens", 0))

    @property
    def status(self) -> str:
        """What became of the note, with the reason."""
        outcome = self.answer.outcome
        return ": ".join(filter(None, [outcome["status"], outcome.get("reason")]))


@dataclass
class Bench:
    """Runs against one server."""

    server: Server
    options: argparse.Namespace
    workload: Workload
    pool: ThreadPoolExecutor
    nonce: str
    """Tells this process's runs from those of another that used the same server."""
    _based: dict[tuple[int, int], int] = field(default_factory=dict)
    """How many bases of these lengths are cached."""
    _warm: set[Cell] = field(default_factory=set)
    _pace: list[float] = field(default_factory=list)
    """Of runs so far: seconds taken over seconds expected."""

    def check_vocabulary(self, cell: Cell) -> None:
        """Raise `BenchError` where the server has no such ids. Asked with a note: plain, they would kill it."""
        highest = max(max(max(s.ids, default=0) for s in c.segments) for c in self.workload.of(cell))
        talk = Talk(self.server, [])
        talk.turn([max(highest, _MARK_IDS[1])])
        talk.release()

    def prepare(self, cell: Cell) -> None:
        """Prefill the bases that are not yet, and take a few turns of each arm: every shape of batch compiles kernels.

        Raises:
            BenchError: as `run`.
        """
        if cell in self._warm:
            return
        self.check_vocabulary(cell)
        bases = [c.prompt(0, [], edits=True).ids for c in self.workload.of(cell)]
        missing = bases[self._based.get(cell.lengths, 0) :]
        for start in range(0, len(missing), _BASES_AT_ONCE):
            self.server.generate_batch(missing[start : start + _BASES_AT_ONCE], 1)
        self._based[cell.lengths] = max(self._based.get(cell.lengths, 0), len(bases))
        for arm in self.options.arms:
            self.run(cell, arm, "warm-up", min(self.options.warm_up_turns, self.options.turns))
        self._warm.add(cell)
        _say(f"{cell}: warm")

    def expected_s(self, cell: Cell) -> float:
        """Return how long the next run will take with what is to be prepared for it, going by the runs so far."""
        options = self.options
        seconds = run_s(cell, options.turns, options.output_tokens)
        if cell not in self._warm:
            seconds += len(options.arms) * run_s(cell, min(options.warm_up_turns, options.turns), options.output_tokens)
            seconds += base_s(cell, max(0, cell.num_conversations - self._based.get(cell.lengths, 0)))
        return seconds * (sum(self._pace) / len(self._pace) if self._pace else 1.0)

    def run(self, cell: Cell, arm: str, repeat: int | str, turns: int) -> dict[str, Any]:
        """Take an arm's turns, all conversations at once, and return what was measured.

        Raises:
            BenchError: a turn went wrong; `OSError` and `HTTPException` where the connection did.
        """
        conversations = self.workload.of_repeat(cell, repeat if isinstance(repeat, int) else 0)
        rng = random.Random(f"{self.options.seed} {cell} {arm} {repeat} {self.nonce}")
        mark = [rng.randrange(*_MARK_IDS) for _ in range(MARK_TOKENS)]
        talks = [Talk(self.server, []) if arm in GATES else None for _ in conversations]
        began: list[tuple[float, float]] = []

        def start() -> None:
            self.server.state(reset=True)
            began.append((time.perf_counter(), time.process_time()))

        barrier = threading.Barrier(len(conversations), action=start)
        begun = time.monotonic()
        try:
            futures = [
                self.pool.submit(self._converse, conversation, talk, arm, mark, turns, barrier)
                for conversation, talk in zip(conversations, talks, strict=True)
            ]
            errors = [error for future in futures if (error := future.exception()) is not None]
            if errors:
                # The others were only told that one of them gave up.
                raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
            ((started, cpu_started),) = began
            cpu_s = time.process_time() - cpu_started
            taken = [future.result() for future in futures]
            counted = self.server.state()
        finally:
            for talk in talks:
                if talk is not None and talk.num_turns:
                    talk.release()
        if isinstance(repeat, int):
            self._pace.append((time.monotonic() - begun) / run_s(cell, turns, self.options.output_tokens))
        wall_s = max(turn.ended for talk in taken for turn in talk) - started
        return {"wall_s": round(wall_s, 3), "client_cpu_s": round(cpu_s, 3), **_as_json(taken, counted)}

    def _converse(
        self,
        conversation: Conversation,
        talk: Talk | None,
        arm: str,
        mark: Sequence[int],
        turns: int,
        barrier: threading.Barrier,
    ) -> list[Turn]:
        """Be one agent."""

        def send(ids: list[int], output_tokens: int) -> Answer:
            if talk is None:
                return self.server.stream(ids, output_tokens)
            return talk.turn(ids, output_tokens, stream=True, gate=GATES[arm])

        taken: list[Turn] = []
        try:
            answers = [send(conversation.prompt(0, [], edits=True).ids, 1).output_ids]
            barrier.wait()
            for turn in range(1, turns + 1):
                prompt = conversation.prompt(turn, answers, mark, edits=arm != "none")
                answer = send(prompt.ids, self.options.output_tokens)
                taken.append(Turn(answer, prompt.ideal_tokens, prompt.num_edits, len(prompt.ids), time.perf_counter()))
                if len(answer.output_ids) != self.options.output_tokens:
                    raise BenchError(f"turn {turn}: {len(answer.output_ids)} tokens came, not as many as asked for")
                answers.append(answer.output_ids)
        except BaseException:
            barrier.abort()
            raise
        return taken


def _as_json(taken: Sequence[Sequence[Turn]], counted: dict[str, Any]) -> dict[str, Any]:
    """Return what a run row holds: a list for each conversation with a value for each turn, and sums."""

    def each(value: Callable[[Turn], Any]) -> list[list[Any]]:
        return [[value(turn) for turn in talk] for talk in taken]

    row = {
        "ms": each(lambda turn: round(turn.answer.ms, 1)),
        "first_token_ms": each(lambda turn: round(turn.answer.first_token_ms, 1)),
        "prompt": each(lambda turn: turn.prompt),
        "cached": each(lambda turn: turn.cached),
        "ideal": each(lambda turn: turn.ideal),
        "edits": each(lambda turn: turn.edits),
        **{name: counted[name] for name in ("prefill_tokens", "prefill_batches", "decode_batches")},
    }
    if all("forward_entry_time" in turn.answer.meta_info for talk in taken for turn in talk):
        row["stages_ms"] = each(lambda turn: _stages_ms(turn.answer))
    outcomes = [turn.answer.outcome for talk in taken for turn in talk if turn.answer.outcome]
    if not outcomes:
        return row
    sums = {
        "moved_tokens": "moved_tokens",
        "saved_ms": "saved_ms",
        "note_ms": "ms",
        "scheduler_ms": "scheduler_ms",
        "spliced_prefill_tokens": "prefilled_tokens",
    }
    return row | {
        "status": each(lambda turn: turn.status),
        **{name: round(sum(outcome.get(of) or 0 for outcome in outcomes), 1) for name, of in sums.items()},
    }


def _stages_ms(answer: Answer) -> list[float]:
    """Return where a turn's time went, as a server started with `--enable-metrics` says.

    In milliseconds: until the request was handed to the scheduler, in its queue, in prefill, in decoding, and what is
    left of what the client has waited. What is done about a note stands in the first or, before the server's own clock
    starts, in the last.
    """
    at = [
        answer.meta_info[name]
        for name in (
            "request_received_ts",
            "api_server_dispatch_finish_ts",
            "forward_entry_time",
            "prefill_finished_time",
            "request_finished_ts",
        )
    ]
    stages = [(end - begin) * 1e3 for begin, end in itertools.pairwise(at)]
    return [round(stage, 1) for stage in (*stages, answer.ms - sum(stages))]


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
