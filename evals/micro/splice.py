"""What one splice takes of the scheduler, beside requests that decode: `python -m evals.micro.splice [--json]`.

Two arms, each on a server of its own with the test model: `in_place` (the conversation's rows move where they are) and
`copy` (`LEYLINE_IN_PLACE=0`). In each, `--streams` requests decode all the time, without a note, while one conversation
replaces a span of each prompt so that `--downstream-tokens` stand right of it. One row an arm: percentiles of
`scheduler_ms` (the scheduler works on the edit and decodes nothing) and `ms` of the outcomes. Its baseline in the same
run is the gap between the tokens of the streams, with nothing edited and with edits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from evals.micro.result_rows import percentile
from evals.models.random_mla import ensure_model
from evals.serving import serve
from leyline_agent.core.protocol import CONVERSATION_HEADER, OUTCOME_HEADER, ConversationState, Outcome, Status
from leyline_agent.errors import LeylineError

ARMS = ("in_place", "copy")
PREFIX_TOKENS = 200
DROPPED_TOKENS = 110
REPLACEMENT_TOKENS = 10
STREAM_PROMPT_TOKENS = 100
STREAM_TOKENS = 400
TURN_EVERY_S = 0.1
_READY_TIMEOUT_S = 60.0
_TOKENS = (100, 2000)
"""Ids that random text is drawn from: none of them special."""


class SpliceFailedError(LeylineError):
    """A turn did not do what this benchmark is to time."""


def next_prompt(prompt: Sequence[int], rng: random.Random) -> list[int]:
    """Replace the span right of the prefix by a shorter one, and append as many tokens as the prompt lost.

    The next span takes this one's replacement along, so every prompt has the same length and every edit the same
    number of tokens downstream.
    """
    kept = prompt[PREFIX_TOKENS + DROPPED_TOKENS :]
    appended = _fresh(rng, DROPPED_TOKENS - REPLACEMENT_TOKENS)
    return [*prompt[:PREFIX_TOKENS], *_fresh(rng, REPLACEMENT_TOKENS), *kept, *appended]


def is_in_place(state: ConversationState) -> bool:
    """Tell whether the edits of the remembered turns took the rows of their bases away.

    Raises:
        SpliceFailedError: some did and some did not, or there is no turn to tell it by.
    """
    # The newest has not been edited yet, and the rows of the shared namespace are only ever copied.
    edited = [turn for turn in state.turns[:-1] if turn.own_namespace]
    found = {turn.cached_tokens < turn.prompt_tokens for turn in edited}
    if len(found) != 1:
        raise SpliceFailedError(f"{len(edited)} edited turns are remembered, some with all their rows, some without")
    return found.pop()


def row(
    arm: str,
    outcomes: Sequence[Outcome],
    gaps: dict[str, list[float]],
    *,
    in_place: bool,
    num_streams: int,
    load_before: float,
) -> dict[str, Any]:
    """Return one row from the outcomes of the timed turns and the streams' gaps without (`alone`) and with edits.

    `load_before` is the machine's load average from before the server started: above about 0.5, others were at work
    on the cores that are timed.
    """
    figures = {
        "scheduler": [outcome.scheduler_ms for outcome in outcomes],
        "turn": [outcome.ms for outcome in outcomes],
    }
    return {
        "op": "splice",
        "arm": arm,
        "dtype": "float32",
        "turns": len(outcomes),
        "moved_tokens": round(sum(outcome.moved_tokens for outcome in outcomes) / len(outcomes), 1),
        "moved_in_place": in_place,
        "streams": num_streams,
        **{
            f"{name}_p{percent}_ms": round(percentile(values, percent), 3)
            for name, values in figures.items()
            for percent in (20, 50, 80, 95)
        },
        "gaps": {name: len(gaps[name]) for name in ("alone", "edits")},
        **{
            f"gap_{name}_p{percent}_ms": round(percentile(gaps[name], percent), 2)
            for name in ("alone", "edits")
            for percent in (50, 95)
        },
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load_before, 2),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "sglang": version("sglang"),
        "torch": version("torch"),
    }


@dataclass
class _Streams:
    """Requests that decode, each begun again as it ends; a gap counts for the phase that both its tokens came in."""

    url: str
    phase: str | None = None
    gaps: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "edits": []})
    _stopped: threading.Event = field(default_factory=threading.Event)
    _decoding: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @contextmanager
    def running(self, num_streams: int) -> Iterator[None]:
        """Decode for as long as the context lasts, from when all of them have their first token."""
        with ThreadPoolExecutor(num_streams) as pool:
            streams = [pool.submit(self._run, seed) for seed in range(num_streams)]
            try:
                for _ in streams:
                    if not self._decoding.acquire(timeout=_READY_TIMEOUT_S):
                        raise SpliceFailedError(f"a stream had no token within {_READY_TIMEOUT_S:.0f} s")
                yield
            finally:
                self._stopped.set()
        for stream in streams:
            stream.result()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=120, trust_env=False) as http:
            first = True
            while not self._stopped.is_set():
                body = {**_body(_fresh(rng, STREAM_PROMPT_TOKENS), STREAM_TOKENS), "stream": True}
                before: tuple[float, str | None] | None = None
                with http.stream("POST", "/generate", json=body) as response:
                    response.raise_for_status()
                    for line in response.iter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now = (time.perf_counter(), self.phase)
                        if before and now[1] is not None and now[1] == before[1]:
                            self.gaps[now[1]].append((now[0] - before[0]) * 1e3)
                        before = now
                        if first:
                            self._decoding.release()
                            first = False
                        if self._stopped.is_set():
                            break


@dataclass
class _Conversation:
    http: httpx.Client
    prompt: list[int]
    rng: random.Random
    conversation_id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    num_turns: int = 0

    def start(self) -> None:
        """Send the first prompt, which edits nothing."""
        self._turn()

    def edit(self) -> Outcome:
        """Take an edited turn.

        Raises:
            SpliceFailedError: it was not spliced as a whole.
        """
        downstream = len(self.prompt) - PREFIX_TOKENS - DROPPED_TOKENS
        self.prompt = next_prompt(self.prompt, self.rng)
        outcome = self._turn()
        if outcome.status is not Status.SPLICED or outcome.moved_tokens < downstream or not outcome.scheduler_ms:
            raise SpliceFailedError(
                f"expected a splice of {downstream} tokens and its scheduler_ms, got {outcome.model_dump_json()}"
            )
        return outcome

    def state(self) -> ConversationState:
        """Ask the server what it remembers of this conversation."""
        answer = self.http.get("/leyline/conversation", headers={CONVERSATION_HEADER: self.conversation_id})
        answer.raise_for_status()
        return ConversationState.model_validate_json(answer.content)

    def _turn(self) -> Outcome:
        note = {"v": 1, "conversation": self.conversation_id, "turn": str(self.num_turns), "gate": "off"}
        if self.num_turns:
            note["base"] = str(self.num_turns - 1)
        self.num_turns += 1
        body = _body(self.prompt, 1, custom_params={"leyline": json.dumps(note)})
        answer = self.http.post("/generate", json=body)
        answer.raise_for_status()
        return Outcome.model_validate_json(answer.headers[OUTCOME_HEADER])


def _fresh(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(*_TOKENS) for _ in range(num_tokens)]


def _body(token_ids: list[int], max_new_tokens: int, **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
    return {"input_ids": token_ids, "sampling_params": params}


def measure(
    arm: str, model_dir: Path, *, downstream_tokens: int, num_turns: int, warm_up: int, num_streams: int, alone_s: float
) -> dict[str, Any]:
    """Return the row of one arm.

    Raises:
        SpliceFailedError: a turn was not spliced, or not in the way that the arm is about.
    """
    rng = random.Random(0)
    prompt = _fresh(rng, PREFIX_TOKENS + DROPPED_TOKENS + downstream_tokens)
    load_before = os.getloadavg()[0]
    _say(f"{arm}: starting a server; load average {load_before:.2f}")
    with (
        serve(model_dir, env={"LEYLINE_IN_PLACE": str(int(arm == "in_place"))}) as server,
        httpx.Client(base_url=server.url, timeout=300, trust_env=False) as http,
    ):
        conversation = _Conversation(http, prompt, rng)
        conversation.start()
        streams = _Streams(server.url)
        with streams.running(num_streams):
            # The first of these copies from the shared namespace, and the first tokens of a process are slow.
            for _ in range(warm_up):
                conversation.edit()
            _say(f"{arm}: {num_streams} streams alone for {alone_s:.0f} s")
            streams.phase = "alone"
            time.sleep(alone_s)
            streams.phase = "edits"
            outcomes = []
            for turn in range(num_turns):
                time.sleep(TURN_EVERY_S)
                outcomes.append(conversation.edit())
                if (turn + 1) % 20 == 0:
                    _say(f"{arm}: turn {turn + 1}/{num_turns}")
            streams.phase = None
            in_place = is_in_place(conversation.state())
    if in_place != (arm == "in_place"):
        raise SpliceFailedError(f"{arm}: rows were {'moved in place' if in_place else 'copied'}")
    return row(arm, outcomes, streams.gaps, in_place=in_place, num_streams=num_streams, load_before=load_before)


def _say(text: str) -> None:
    print(f"splice: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row an arm; exit 1 where a turn was not spliced as the arm wants it."""
    parser = argparse.ArgumentParser(prog="python -m evals.micro.splice", description="Time the scheduler's share.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--downstream-tokens", type=int, default=4000, help="right of the edit (default: 4000)")
    parser.add_argument("--turns", type=int, default=100, help="timed turns an arm (default: 100)")
    parser.add_argument("--warm-up", type=int, default=10, help="edited turns before them (default: 10)")
    parser.add_argument("--streams", type=int, default=4, help="requests that decode meanwhile (default: 4)")
    parser.add_argument("--alone-s", type=float, default=10, help="seconds of streams without edits (default: 10)")
    options = parser.parse_args(arguments)
    if options.turns < 20:
        parser.error(f"--turns: a p95 needs 20 turns or more, got {options.turns}")
    if options.warm_up < 1:
        parser.error(f"--warm-up: the first edit always copies, so at least 1, got {options.warm_up}")
    model_dir = ensure_model()
    if not options.json:
        print(
            "arm, turns, moved tokens | p20 p50 p80 p95 of scheduler ms | of turn ms | p50 p95 of gap ms alone | beside"
        )
    for arm in ARMS:
        try:
            measured = measure(
                arm,
                model_dir,
                downstream_tokens=options.downstream_tokens,
                num_turns=options.turns,
                warm_up=options.warm_up,
                num_streams=options.streams,
                alone_s=options.alone_s,
            )
        except SpliceFailedError as error:
            _say(str(error))
            return 1
        if options.json:
            print(json.dumps(measured), flush=True)
        else:
            figures = [
                " ".join(f"{measured[f'{name}_p{percent}_ms']:.1f}" for percent in percents)
                for name, percents in (
                    ("scheduler", (20, 50, 80, 95)),
                    ("turn", (20, 50, 80, 95)),
                    ("gap_alone", (50, 95)),
                    ("gap_edits", (50, 95)),
                )
            ]
            print(f"{arm}, {measured['turns']}, {measured['moved_tokens']:.0f} | {' | '.join(figures)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
