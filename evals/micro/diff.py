"""Time the token diff: `python -m evals.micro.diff [--json]`.

One row for each shape of text and kind of edit. Before it is timed each diff is applied and compared with the new ids,
so that no wrong diff has a time.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.plan import apply_directives

_VOCABULARY = 100_000
_APPENDED_TOKENS = 400
# (removed, replaced by): short and long outputs by a stub, and the rare edit that puts in more than it takes.
_EDITS = ((37, 12), (1500, 12), (10, 40))


def _fresh(rng: random.Random, num_tokens: int, vocabulary: int = _VOCABULARY) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(num_tokens)]


def _agent_turns(rng: random.Random, num_tokens: int) -> list[int]:
    """Build turns of equal framing, a call and an output; every other output is the same stub already."""
    framing, stub = _fresh(rng, 8), _fresh(rng, 14)
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        output = stub if rng.random() < 0.5 else _fresh(rng, rng.choice([30, 500, 2000]))
        token_ids += framing + _fresh(rng, 60) + framing + output
    return token_ids[:num_tokens]


def _equal_bodies(rng: random.Random, num_tokens: int) -> list[int]:
    """Build the same output of 480 tokens behind headers of 20 that differ."""
    body = _fresh(rng, 480)
    return [token for _ in range(-(-num_tokens // 500)) for token in _fresh(rng, 20) + body][:num_tokens]


_SHAPES: dict[str, Callable[[random.Random, int], list[int]]] = {
    "random text": _fresh,
    "agent turns": _agent_turns,
    "equal bodies": _equal_bodies,
    "repeated block of 500": lambda rng, n: (_fresh(rng, 500) * (n // 500 + 1))[:n],
    "period of 7": lambda rng, n: (_fresh(rng, 7) * (n // 7 + 1))[:n],
    "period of 2": lambda rng, n: (_fresh(rng, 2) * (n // 2 + 1))[:n],
    "all equal": lambda rng, n: _fresh(rng, 1) * n,
    "vocabulary of 2": lambda rng, n: _fresh(rng, n, 2),
}


def edited(
    rng: random.Random, old_ids: Sequence[int], *, num_edits: int, removed_tokens: int, replacement_tokens: int
) -> tuple[list[int], int]:
    """Return new ids after `num_edits` evenly spread edits and an appended tail, and how many old tokens are left."""
    stub = _fresh(rng, replacement_tokens)
    stride = len(old_ids) // num_edits
    if removed_tokens > stride // 2:
        raise ValueError(f"{num_edits} edits of {removed_tokens} tokens need a longer text than {len(old_ids)} tokens")
    new_ids: list[int] = []
    at = 0
    for idx in range(num_edits):
        cut = idx * stride + rng.randrange(stride // 2)
        new_ids += [*old_ids[at:cut], *stub]
        at = cut + removed_tokens
    new_ids += [*old_ids[at:], *_fresh(rng, _APPENDED_TOKENS)]
    return new_ids, len(old_ids) - num_edits * removed_tokens


def measure(
    shape: str, *, num_tokens: int, num_edits: int, removed_tokens: int, replacement_tokens: int, repeats: int
) -> dict[str, Any]:
    """Return one row: the diff's milliseconds, and the kept share of the tokens that the edits left.

    The share may pass 1 where the text repeats and what was removed stands elsewhere too.
    """
    rng = random.Random(0)
    old_ids = _SHAPES[shape](rng, num_tokens)
    new_ids, left = edited(
        rng,
        old_ids,
        num_edits=num_edits,
        removed_tokens=removed_tokens,
        replacement_tokens=replacement_tokens,
    )
    directives = diff_token_ids(old_ids, new_ids)
    result = apply_directives(old_ids, directives)
    if result != new_ids[: len(result)]:
        raise AssertionError(f"the diff of {shape!r} is wrong, so it is not timed")
    kept = len(result) - sum(len(directive.replacement_ids) for directive in directives)
    times_ms = []
    for _ in range(repeats):
        start = time.perf_counter()
        diff_token_ids(old_ids, new_ids)
        times_ms.append((time.perf_counter() - start) * 1e3)
    p20, p50, p80 = (statistics.quantiles(times_ms, n=10, method="inclusive")[i] for i in (1, 4, 7))
    return {
        "op": "diff_token_ids",
        "shape": shape,
        "tokens": num_tokens,
        "edits": num_edits,
        "removed_tokens": removed_tokens,
        "replacement_tokens": replacement_tokens,
        "directives": len(directives),
        "kept_share": round(kept / left, 4),
        "p20_ms": round(p20, 3),
        "p50_ms": round(p50, 3),
        "p80_ms": round(p80, 3),
        "python": platform.python_version(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each shape and size of edit."""
    parser = argparse.ArgumentParser(prog="python -m evals.micro.diff", description="Time the token diff.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--tokens", type=int, default=32_000, help="length of the old text (default: 32000)")
    parser.add_argument("--edits", type=int, default=10, help="edits in it (default: 10)")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs a row (default: 20)")
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error(f"--repeats: percentiles need 2 runs or more, got {options.repeats}")
    if not options.json:
        print(f"{'shape':24}{'removed':>9}{'directives':>12}{'kept':>8}{'p20 ms':>9}{'p50 ms':>9}{'p80 ms':>9}")
    for shape in _SHAPES:
        for removed_tokens, replacement_tokens in _EDITS:
            try:
                row = measure(
                    shape,
                    num_tokens=options.tokens,
                    num_edits=options.edits,
                    removed_tokens=removed_tokens,
                    replacement_tokens=replacement_tokens,
                    repeats=options.repeats,
                )
            except ValueError as error:
                parser.error(str(error))
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{shape:24}{removed_tokens:9}{row['directives']:12}{row['kept_share']:8.3f}"
                    f"{row['p20_ms']:9.2f}{row['p50_ms']:9.2f}{row['p80_ms']:9.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
