"""What edits cost the others: gaps between the tokens of a parallel stream, with and without splices beside it.

    python -m evals.micro.stream_gap [--url URL] [--prompt-tokens 4000] [--stream-tokens 400] [--repeats 3]

Three arms in one run against one server, in turn, `--repeats` times: `alone` (the stream has the server to itself),
`append` (a conversation beside it sends prompts that only grow) and `splice` (the same conversation drops 100 tokens
each turn, spliced). Prints one JSON line an arm with p50, p95 and worst gap in milliseconds, and the turns made
beside it. A ratio of arms of one run; a CPU's absolute times mean little.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import httpx

from evals.models.random_mla import ensure_model
from evals.serving import serve

ARMS = ("alone", "append", "splice")
TURN_EVERY_S = 0.3
DROPPED_TOKENS = 100
NEW_TOKENS = 20


class _Beside(threading.Thread):
    """A conversation that takes a turn every `TURN_EVERY_S` until it is told to stop."""

    def __init__(self, url: str, prompt: list[int], *, splice: bool, seed: int) -> None:
        super().__init__(daemon=True)
        self._prompt, self._splice, self._rng = prompt, splice, random.Random(seed)
        # Made here: setting up a client takes a good part of a second on a busy machine.
        self._http = httpx.Client(base_url=url, timeout=120)
        self._conversation = secrets.token_urlsafe(24)
        self._done = threading.Event()
        self.num_turns = self.num_spliced = 0

    def stop(self) -> None:
        """End the conversation after the turn it is at."""
        self._done.set()
        self.join()
        self._http.close()

    def warm_up(self) -> None:
        """Send the first prompt, whose prefill is nobody's edit."""
        self._turn()

    def run(self) -> None:
        """Take turns."""
        while not self._done.wait(TURN_EVERY_S):
            self.num_turns += 1
            if self._splice:
                del self._prompt[200 : 200 + DROPPED_TOKENS]
            self._prompt += [self._rng.randrange(100, 2000) for _ in range(NEW_TOKENS)]
            self.num_spliced += self._turn() == "spliced"

    def _turn(self) -> str:
        base = {"base": str(self.num_turns - 1)} if self.num_turns else {}
        note = {"v": 1, "conversation": self._conversation, "turn": str(self.num_turns), **base}
        answer = _generate(self._http, self._prompt, 1, custom_params={"leyline": json.dumps(note)})
        answer.raise_for_status()
        return str(json.loads(answer.headers["x-leyline"])["status"])


def _generate(http: httpx.Client, ids: list[int], max_new_tokens: int, **sampling: Any) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
    return http.post("/generate", json={"input_ids": ids, "sampling_params": params})


def _gaps_ms(http: httpx.Client, ids: list[int], num_tokens: int) -> list[float]:
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    times = []
    body = {"input_ids": ids, "stream": True, "sampling_params": params}
    with http.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [(after - before) * 1e3 for before, after in pairwise(times)]


def measure(url: str, *, prompt_tokens: int, stream_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Return one row an arm."""
    rng = random.Random(0)
    gaps: dict[str, list[float]] = {arm: [] for arm in ARMS}
    turns: dict[str, int] = dict.fromkeys(ARMS, 0)
    spliced = 0
    stream_prompt = [rng.randrange(100, 2000) for _ in range(100)]
    with httpx.Client(base_url=url, timeout=300) as http:
        for repeat in range(repeats):
            for arm in ARMS:
                prompt = [rng.randrange(100, 2000) for _ in range(prompt_tokens)]
                beside = _Beside(url, prompt, splice=arm == "splice", seed=repeat)
                if arm != "alone":
                    beside.warm_up()
                    beside.start()
                gaps[arm] += _gaps_ms(http, stream_prompt, stream_tokens)
                if arm != "alone":
                    beside.stop()
                turns[arm] += beside.num_turns
                spliced += beside.num_spliced
                print(f"stream_gap: repeat {repeat + 1}/{repeats}, {arm}", file=sys.stderr)
    return [
        {
            "op": "stream_gap",
            "arm": arm,
            "prompt_tokens": prompt_tokens,
            "gaps": len(gaps[arm]),
            "p50_ms": round(statistics.median(gaps[arm]), 2),
            "p95_ms": round(statistics.quantiles(gaps[arm], n=20)[-1], 2),
            "max_ms": round(max(gaps[arm]), 2),
            "turns_beside": turns[arm],
            "spliced": spliced if arm == "splice" else 0,
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "sglang": version("sglang"),
            "torch": version("torch"),
        }
        for arm in ARMS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit 1 where nothing was spliced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="a patched server; without it one is started on the test model")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        url = args.url or stack.enter_context(serve(ensure_model())).url
        rows = measure(url, prompt_tokens=args.prompt_tokens, stream_tokens=args.stream_tokens, repeats=args.repeats)
    for row in rows:
        print(json.dumps(row))
    return 0 if rows[-1]["spliced"] else 1


if __name__ == "__main__":
    sys.exit(main())
