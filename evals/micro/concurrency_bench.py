"""Runs of `evals.micro.concurrency`: C agents side by side in a closed loop, and what is measured of their turns.

All begin from the same base: cached before, and sent once more, untimed, as each run begins, so that a first edit
copies rows of the shared namespace and later ones move the conversation's own. Each run has ids of its own in what it
adds, so no run finds what another has cached.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from evals.micro.bench_server import Answer, BenchError, Server, Talk, say
from evals.micro.concurrency_plan import Cell, Workload, base_s, run_s
from evals.micro.conversations import MARK_TOKENS, Conversation

GATES = {"splice": "auto", "splice_ungated": "off"}
"""What an arm's notes say; arms that are not here send none."""
_MARK_IDS = (100, 4000)
_BASES_AT_ONCE = 8


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
        say("concurrency", f"{cell}: warm")

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
