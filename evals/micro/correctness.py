"""Whether a splice is right, where the answer is known: `python -m evals.micro.correctness --url URL --model NAME`.

A span is inserted into a cached sequence by one splice and removed by another. What is cached then are the original
rows, their keys turned forth and back, so the next token must be the one that the original rows give. For each prompt:

- `base`: prefix + tail, prefilled in the shared namespace. It ends in a token of its own, so that the shared namespace
  never has more of the prompt than the conversation's own, which is preferred on a tie;
- `insert`, `remove`: the two splices, in the conversation's own namespace. Whether the last is served from there, with
  all of the tail moved, is checked by its outcome and by what the server tells of the turn;
- `reference`: the same prompt without a note, from the original rows;
- `rebatched`: the reference again, its rows and its last token computed in other, smaller batches, the second half of
  the rows after the first (under another `extra_key`). How far that changes the margin between the reference's first
  two tokens is the noise of bf16; only a margin above it can tell right from wrong;
- `shuffled`: prefix and tail in another order before the same last token. It must change the next token, else the
  weights ignore the context and nothing here means anything;
- `wrong`: as `remove`, but turned 64 positions too far. It must disagree, else the keys' positions do not matter.

The server needs the plugin and `evals/micro/server_plugin` on its PYTHONPATH (with `BENCH_SEED` where its weights are
dummies), and no other requests meanwhile: its cache is emptied after each round. One JSON line for the model; a run
that is cut short (SIGTERM, `--limit-s`) writes what it has. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import http.client
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from evals.micro.bench_server import BenchError, about, append_row, say
from evals.micro.known_answers import WRONG_BY, Batches, Case, Judged, Verdict, run_round
from evals.micro.result_rows import percentile

LISTENING_SHARE = 0.9
WRONG_AGREEMENT = 0.5
NOISE_PERCENTS = (50, 95, 99, 100)


def share(flags: Iterable[bool]) -> float | None:
    """Return how many of the flags are set, of 1; None where there are none."""
    known = list(flags)
    return round(sum(known) / len(known), 4) if known else None


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the figures of a model, and which bars they miss."""
    sound = [verdict for verdict in verdicts if verdict.problem is None]
    problems = [verdict.problem for verdict in verdicts if verdict.problem is not None]
    first = problems[0] if problems else None
    figures: dict[str, Any] = {"judged": len(sound), "unsound": len(problems), "first_problem": first}
    if not sound:
        return {**figures, "missed": ["no prompt could be judged"]}
    noise = [verdict.margin_change("rebatched") for verdict in sound]
    thresholds = {f"p{percent}": percentile(noise, percent) for percent in NOISE_PERCENTS}
    qualified = {
        name: [verdict for verdict in sound if verdict.answers["reference"].margin > threshold]
        for name, threshold in thresholds.items()
    }
    disturbed = [verdict for verdict in sound if "wrong" in verdict.answers]
    figures |= {
        "listening": share(not verdict.agrees("shuffled") for verdict in sound),
        "wrong_prompts": len(disturbed),
        "wrong_agreement": share(verdict.agrees("wrong") for verdict in disturbed),
        "agreement": share(verdict.agrees("remove") for verdict in sound),
        "agreement_qualified": share(verdict.agrees("remove") for verdict in qualified["p100"]),
        "qualified_share": round(len(qualified["p100"]) / len(sound), 4),
        "noise": {name: round(threshold, 6) for name, threshold in thresholds.items()},
        "by_noise": {
            name: {
                "share": round(len(known) / len(sound), 4),
                "agreement": share(verdict.agrees("remove") for verdict in known),
                "rebatched_agreement": share(verdict.agrees("rebatched") for verdict in known),
                "disagreeing_prompts": [verdict.case.idx for verdict in known if not verdict.agrees("remove")][:20],
            }
            for name, known in qualified.items()
        },
        "rebatched_agreement": share(verdict.agrees("rebatched") for verdict in sound),
        "margin_p50": round(percentile([verdict.answers["reference"].margin for verdict in sound], 50), 6),
        "margin_change": {
            name: {
                f"p{percent}": round(percentile([verdict.margin_change(name) for verdict in known], percent), 6)
                for percent in NOISE_PERCENTS
            }
            for name, known in (("remove", sound), ("rebatched", sound), ("wrong", disturbed))
            if known
        },
        "prompt_tokens": round(sum(len(verdict.case.prompt) for verdict in sound) / len(sound), 1),
        "moved_tokens": sum(2 * len(verdict.case.tail) for verdict in sound),
    }
    return {**figures, "missed": list(_missed(figures))}


def _missed(figures: dict[str, Any]) -> Iterable[str]:
    if figures["unsound"]:
        yield f"{figures['unsound']} prompts were not spliced as they should be: {figures['first_problem']}"
    if figures["listening"] < LISTENING_SHARE:
        yield f"shuffling changes the next token in {figures['listening']:.1%}, expected {LISTENING_SHARE:.0%} or more"
    if figures["wrong_agreement"] is not None and figures["wrong_agreement"] >= WRONG_AGREEMENT:
        agreement = figures["wrong_agreement"]
        yield f"keys {WRONG_BY} positions off agree in {agreement:.1%}, expected under {WRONG_AGREEMENT:.0%}"
    if figures["agreement_qualified"] is None:
        yield "no margin is above the noise"
    elif figures["agreement_qualified"] < 1:
        yield f"only {figures['agreement_qualified']:.2%} agree where the margin is above the noise, expected all"


def _stop(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Append a row for the model; exit 1 where it misses a bar."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.micro.correctness", description="Judge splices by known answers."
    )
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", required=True, help="what the row calls the model")
    parser.add_argument("--prompts", type=int, default=500, help="default: 500")
    parser.add_argument("--wrong-prompts", type=int, default=100, help="of these, with the fault too (default: 100)")
    parser.add_argument("--at-once", type=int, default=32, help="prompts in flight (default: 32)")
    parser.add_argument("--rebatched-at-once", type=int, default=4, help="for the noise (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--weights-seed", type=int, help="BENCH_SEED of the server, for the row alone")
    parser.add_argument(
        "--vocab-size", type=int, help="ids are drawn below this; default: by the config.json that it serves"
    )
    parser.add_argument("--limit-s", type=float, default=300, help="begin no further round after this (default: 300)")
    parser.add_argument("--json-out", type=Path, help="append the row here; default: print it")
    parser.add_argument("--commit", help="to write into the row, where there is no repository to ask")
    options = parser.parse_args(arguments)
    server = Judged(options.url)
    facts = about(
        server.bench,
        sys.argv[1:] if arguments is None else arguments,
        "evals.micro.correctness",
        commit=options.commit,
        seed=options.seed,
    )
    vocab_size = options.vocab_size or server.vocab_size()
    at_once = Batches(options.at_once, options.rebatched_at_once)
    began = time.monotonic()
    verdicts: list[Verdict] = []

    def draw(idx: int) -> Case:
        return Case.random(idx, seed=options.seed, vocab_size=vocab_size)

    try:
        # Compiles what the first batches of their kind need.
        run_round(server, [draw(-1)], num_wrong=1, at_once=at_once)
        while (first := len(verdicts)) < options.prompts and time.monotonic() - began < options.limit_s:
            cases = [draw(idx) for idx in range(first, min(first + options.at_once, options.prompts))]
            num_wrong = max(0, options.wrong_prompts - first)
            verdicts += run_round(server, cases, num_wrong=num_wrong, at_once=at_once)
            figures = summary(verdicts)
            known = ", ".join(f"{name} {figures.get(name)}" for name in _PROGRESS)
            say("correctness", f"{time.monotonic() - began:.0f} s, {len(verdicts)}/{options.prompts} prompts: {known}")
    except (KeyboardInterrupt, BenchError, OSError, http.client.HTTPException) as error:
        say("correctness", f"cut short: {error or 'stopped'}")
        if not verdicts:
            return 1
    row = {
        "op": "correctness",
        "model": options.model,
        "prompts": len(verdicts),
        "prompts_asked": options.prompts,
        "seconds": round(time.monotonic() - began, 1),
        **summary(verdicts),
        "at_once": options.at_once,
        "rebatched_at_once": options.rebatched_at_once,
        "weights_seed": options.weights_seed,
        **facts,
    }
    append_row(options.json_out, row)
    for problem in row["missed"]:
        say("correctness", f"missed: {problem}")
    return 1 if row["missed"] or len(verdicts) < options.prompts else 0


_PROGRESS = ("unsound", "agreement", "agreement_qualified", "qualified_share", "listening", "wrong_agreement")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
