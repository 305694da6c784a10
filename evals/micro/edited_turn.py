"""What an edited turn costs beside a pure prefix hit: `python -m evals.micro.edited_turn --url http://127.0.0.1:30000`.

One client, one request at a time. A prompt of `--prompt-tokens` loses `--removed` of them at a quarter of its length,
gets `--replacement` instead and `--new-tokens` at its end. The arms, in another order each time:

- `hit`: a plain prompt as long as the edited one, all of it cached but the new tokens;
- `noted_hit`: the same as a turn of a conversation, which edits nothing;
- `copy`: the first edit of a conversation, whose rows are copied from the shared namespace;
- `in_place`: a later one, whose rows move where they are;
- `empty`: a later one that puts nothing in place of what it removes;
- `reprefill`: the edited prompt without a note, so that only what stands left of the edit is cached;
- `cold`: the edited prompt in a namespace of its own, so that nothing is.

What the timed requests need (a conversation's first turn, tokens that make up for those removed) is sent before them.
Ratios are those of one repeat to another arm's of the same repeat.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.micro.bench_server import PATHS, Answer, BenchError, Server, Talk, about, append_row, fresh, say
from evals.micro.result_rows import percentile

HIT_BAR = 1.15
REPREFILL_BAR = 10.0
SCHEDULER_BAR_MS = 2.0
EDITED = ("copy", "in_place", "empty")
_PLAIN = ("reprefill", "cold")
ARMS = ("hit", "noted_hit", *EDITED, *_PLAIN)


@dataclass
class Shape:
    """Lengths in tokens."""

    prompt_tokens: int
    removed: int
    replacement: int
    new_tokens: int
    output_tokens: int

    @property
    def start(self) -> int:
        """Where the removed span begins."""
        return self.prompt_tokens // 4

    @property
    def edited_tokens(self) -> int:
        """Length of an edited prompt with a replacement; the base is a prompt and one token that answered it."""
        return self.prompt_tokens + 1 - self.removed + self.replacement + self.new_tokens

    @property
    def downstream(self) -> int:
        """Tokens right of the removed span, all of which are to be moved; the base's last one was never computed."""
        return self.prompt_tokens - self.start - self.removed

    def edit(self, base: Sequence[int], rng: random.Random, *, replacement: int) -> list[int]:
        """Return the edited prompt."""
        head, tail = base[: self.start], base[self.start + self.removed :]
        return [*head, *fresh(rng, replacement), *tail, *fresh(rng, self.new_tokens)]


@dataclass
class Measurement:
    """The arms of one prompt length."""

    server: Server
    shape: Shape
    rng: random.Random
    base: list[int] = field(default_factory=list)
    hit_base: list[int] = field(default_factory=list)
    talks: dict[str, Talk] = field(default_factory=dict)

    def start(self) -> None:
        """Cache what all repeats share."""
        self.base = fresh(self.rng, self.shape.prompt_tokens)
        # As in an edited turn, the answer before the new tokens is still to be computed.
        self.hit_base = fresh(self.rng, self.shape.edited_tokens - self.shape.new_tokens - 1)
        for prompt in (self.base, self.hit_base):
            self.server.generate(prompt, 0)
        for arm in ("in_place", "empty"):
            self.talks[arm] = self._begin(self.base)
            # The first edit copies; what is timed are later ones.
            self._edit(self.talks[arm], self.shape.replacement)

    def repeat(self, arms: Sequence[str]) -> dict[str, Answer]:
        """Take each arm once, in random order.

        Raises:
            BenchError: one did not do what it is to time.
        """
        ready = {arm: self._prepare(arm) for arm in arms}
        answers = {}
        for arm in self.rng.sample(list(arms), len(arms)):
            answers[arm] = ready[arm]()
            self._check(arm, answers[arm])
        for arm in ("copy", "noted_hit"):
            self.talks.pop(arm).release()
        return answers

    def end(self) -> None:
        """Give back what the conversations have cached."""
        for talk in self.talks.values():
            talk.release()

    def _prepare(self, arm: str) -> Callable[[], Answer]:
        """Send what the timed request needs, and return how to send that one."""
        shape, rng, output_tokens = self.shape, self.rng, self.shape.output_tokens
        if arm == "hit":
            prompt = [*self.hit_base, *fresh(rng, 1 + shape.new_tokens)]
            return lambda: self.server.stream(prompt, output_tokens)
        if arm in _PLAIN:
            prompt = shape.edit([*self.base, *fresh(rng, 1)], rng, replacement=shape.replacement)
            salt = {"cache_salt": secrets.token_hex(8)} if arm == "cold" else {}
            return lambda: self.server.stream(prompt, output_tokens, **salt)
        if arm == "noted_hit":
            talk = self.talks[arm] = self._begin(self.hit_base)
            grown = [*talk.prompt, *fresh(rng, shape.new_tokens)]
            return lambda: talk.turn(grown, output_tokens, stream=True)
        if arm == "copy":
            talk = self.talks[arm] = self._begin(self.base)
        else:
            talk = self.talks[arm]
            # Back to the length before the edit.
            missing = shape.prompt_tokens - len(talk.prompt)
            talk.turn([*talk.prompt[: shape.prompt_tokens], *fresh(rng, max(0, missing))])
        replacement = 0 if arm == "empty" else shape.replacement
        return lambda: self._edit(talk, replacement)

    def _begin(self, prompt: list[int]) -> Talk:
        talk = Talk(self.server, [])
        talk.turn(prompt)
        return talk

    def _edit(self, talk: Talk, replacement: int) -> Answer:
        prompt = self.shape.edit(talk.prompt, self.rng, replacement=replacement)
        return talk.turn(prompt, self.shape.output_tokens, stream=True)

    def _check(self, arm: str, answer: Answer) -> None:
        outcome, shape = answer.outcome, self.shape
        if arm in EDITED and (outcome["status"] != "spliced" or outcome["moved_tokens"] < shape.downstream):
            raise BenchError(f"{arm}: expected a splice of {shape.downstream} tokens, got {outcome}")
        expected = {"hit": len(self.hit_base), "noted_hit": len(self.hit_base), "reprefill": shape.start, "cold": 0}
        # A new token may happen to be one that is cached.
        if arm in expected and not 0 <= answer.cached_tokens - expected[arm] <= 2:
            raise BenchError(f"{arm}: {answer.cached_tokens} tokens were cached, expected {expected[arm]}")


def arm_row(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the figures of one arm."""
    row: dict[str, Any] = {"repeats": len(answers)}
    for name, values in (
        ("first_token", [answer.first_token_ms for answer in answers]),
        ("end", [answer.ms for answer in answers]),
    ):
        row |= {f"{name}_p{percent}_ms": round(percentile(values, percent), 2) for percent in (20, 50, 80)}
    outcomes = [answer.outcome for answer in answers if answer.outcome]
    if outcomes:
        scheduler_ms = [outcome["scheduler_ms"] for outcome in outcomes]
        row |= {f"scheduler_p{percent}_ms": round(percentile(scheduler_ms, percent), 3) for percent in (50, 95)}
        row["note_p50_ms"] = round(percentile([outcome["ms"] for outcome in outcomes], 50), 2)
        row["moved_tokens"] = round(sum(outcome["moved_tokens"] for outcome in outcomes) / len(outcomes), 1)
        row["statuses"] = dict(Counter(outcome["status"] for outcome in outcomes))
        # What the server says that a splice saved, beside what `reprefill` took here.
        if saved_ms := [outcome["saved_ms"] for outcome in outcomes if outcome.get("saved_ms") is not None]:
            row["saved_p50_ms"] = round(percentile(saved_ms, 50), 2)
        stages = [outcome.get("stages_ms") or {} for outcome in outcomes]
        # Where R is computed in the batch of the request itself, there is no stage for it.
        row["prefilled_before"] = sum("prefill" in stage for stage in stages)
        row["stages_p50_ms"] = {
            name: round(percentile([stage.get(name, 0.0) for stage in stages], 50), 3)
            for name in sorted({name for stage in stages for name in stage})
        }
    return row


def ratios(over: Sequence[Answer | None], under: Sequence[Answer | None]) -> dict[str, float] | None:
    """Return percentiles of the ratios of two arms, repeat by repeat; None where no repeat has both."""
    pairs = [(a, b) for a, b in zip(over, under, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    values = {
        "first_token": [a.first_token_ms / b.first_token_ms for a, b in pairs],
        "end": [a.ms / b.ms for a, b in pairs],
    }
    return {
        f"{name}_p{percent}": round(percentile(ratio, percent), 3)
        for name, ratio in values.items()
        for percent in (20, 50, 80)
    }


def row(shape: Shape, taken: dict[str, list[Answer | None]]) -> dict[str, Any]:
    """Return the row of one prompt length from what each arm gave in each repeat (None where it was left out)."""
    done = {arm: [answer for answer in answers if answer is not None] for arm, answers in taken.items()}
    over_hit = {arm: ratios(taken[arm], taken["hit"]) for arm in EDITED}
    reprefill = {arm: {plain: ratios(taken[plain], taken[arm]) for plain in _PLAIN} for arm in EDITED}
    arms = {arm: arm_row(answers) for arm, answers in done.items() if answers}
    bars: dict[str, Any] = {}
    for arm in ("copy", "in_place"):
        hit, plain = over_hit[arm], reprefill[arm]["reprefill"]
        bars[arm] = {
            "over_hit": hit and hit["first_token_p50"] <= HIT_BAR,
            "reprefill_over": plain and plain["first_token_p50"] >= REPREFILL_BAR,
            "scheduler": arm in arms and arms[arm]["scheduler_p50_ms"] <= SCHEDULER_BAR_MS,
        }
    return {
        "op": "edited_turn",
        "prompt_tokens": shape.prompt_tokens,
        "removed_tokens": shape.removed,
        "replacement_tokens": shape.replacement,
        "new_tokens": shape.new_tokens,
        "output_tokens": shape.output_tokens,
        "edited_tokens": shape.edited_tokens,
        "arms": arms,
        "over_hit": over_hit,
        "noted_hit_over_hit": ratios(taken["noted_hit"], taken["hit"]),
        "reprefill_over": reprefill,
        "bars": bars,
    }


def measure(server: Server, shape: Shape, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Return the row of one prompt length, from as many repeats as there was time for.

    Raises:
        BenchError: an arm did not do what it is to time, or there was no time for one repeat.
    """
    # What an earlier run has cached of the same random tokens would be hit.
    server.flush()
    measurement = Measurement(server, shape, random.Random(f"{options.seed} {shape.prompt_tokens}"))
    measurement.start()
    # Every shape of batch compiles kernels the first time.
    for _ in range(options.warm_up):
        measurement.repeat(ARMS)
    _say(f"{shape.prompt_tokens} tokens: warm")
    taken: dict[str, list[Answer | None]] = {arm: [] for arm in ARMS}
    every = max(1, options.repeats // max(1, options.reprefills))
    for repeat in range(options.repeats):
        if time.monotonic() > deadline:
            break
        arms = ARMS if repeat % every == 0 else ARMS[: -len(_PLAIN)]
        answers = measurement.repeat(arms)
        for arm in ARMS:
            taken[arm].append(answers.get(arm))
    measurement.end()
    if not taken["hit"]:
        raise BenchError(f"{shape.prompt_tokens} tokens: no time for one repeat; raise --limit-s")
    return row(shape, taken)


def _say(text: str) -> None:
    say("edited_turn", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one row for each prompt length; exit 1 where a turn was not what it was to be. Bars are in the rows."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m evals.micro.edited_turn", description="Time an edited turn.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--removed", type=int, default=2000)
    parser.add_argument("--replacement", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=20, help="appended to the prompt (default: 20)")
    parser.add_argument("--output-tokens", type=int, default=4, help="generated by each request (default: 4)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--reprefills", type=int, default=5, help="in how many repeats (default: 5)")
    parser.add_argument("--warm-up", type=int, default=3, help="repeats before those that count (default: 3)")
    parser.add_argument("--limit-s", type=float, default=180, help="begin no repeat after this (default: 180)")
    parser.add_argument("--paths", nargs="+", choices=PATHS, help="measure each; default: what the server started with")
    parser.add_argument("--label", default="", help="stands in the row, e.g. one_step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json-out", type=Path, help="append rows to this file; default: standard output")
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    if min(options.prompt_tokens) * 3 // 4 < options.removed + 64:
        parser.error(f"--removed: {options.removed} tokens do not fit right of the first quarter of --prompt-tokens")
    deadline = time.monotonic() + options.limit_s
    facts: dict[str, Any] = {"label": options.label}
    failed = False
    with Server(options.url) as server:
        lengths_and_paths = ((n, path) for path in server.each_path(options.paths) for n in options.prompt_tokens)
        for prompt_tokens, path in lengths_and_paths:
            shape = Shape(
                prompt_tokens, options.removed, options.replacement, options.new_tokens, options.output_tokens
            )
            try:
                facts |= about(server, arguments, "evals.micro.edited_turn", commit=options.commit, seed=options.seed)
                measured = measure(server, shape, options, deadline)
            except (BenchError, OSError) as error:
                failed = True
                _say(str(error))
                measured = {"op": "edited_turn", "prompt_tokens": prompt_tokens, "error": str(error)}
            append_row(options.json_out, {**measured, **facts})
            if "arms" in measured:
                arms = measured["arms"].items()
                _say(
                    f"{prompt_tokens} tokens, {path}: "
                    + ", ".join(f"{arm} {a['first_token_p50_ms']} ms" for arm, a in arms)
                )
                _say(f"over a hit {measured['over_hit']}; bars {measured['bars']}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
