"""Whether edits disturb requests that decode meanwhile: `python -m evals.micro.under_load --url http://127.0.0.1:30000`.

Streams (plain requests, greedy, with log probabilities) are admitted as one batch and decode in lockstep, round after
round with the same prompts, while editors edit conversations. bfloat16 results depend on what a batch is made of, so
requests of editors end with the token that their prefill gives and never join a decode batch: every decode batch is the
streams and nothing else, in every round. The server counts its batches, and the row says whether that held.

Rounds: two quiet ones (their difference is the noise floor), one with plain prefills at the editors' pace (the traffic
without the splices), then with edits until there were `--splices`. Each is compared with the first quiet round. Prompts
of the conversations begin with those of the streams, so first edits copy rows that the streams are reading.

Of some conversations rows are read before and after an edit, and compared with a fresh prefill at the end (row_check).
The server needs this plugin, `server_plugin/leyline_rows` and, with dummy weights, weights that listen.
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evals.micro.bench_server import (
    PATHS,
    BenchError,
    Server,
    Talk,
    about,
    append_row,
    fresh,
    problems_in,
    say,
)
from evals.micro.load_ledger import Comparison, Decoded, Ledger, compare, faults, merge
from evals.micro.row_check import check_fresh, check_moved, kept_runs, relative_l2, rotate

REPLACEMENT_TOKENS = 10
KINDS = ("first", "later", "several", "later", "empty", "several", "later", "forget", "later", "several", "later")
"""The turns of a conversation. The first edit copies from the shared namespace, later ones move what is its own."""
_SPLICES = frozenset(KINDS) - {"forget"}
_COMMON_TOKENS = 64
"""All prompts begin with the same ones."""


def spans_of(kind: str, num_tokens: int) -> list[tuple[int, int, int]]:
    """Return what a turn of this kind replaces in a prompt of so many tokens: (start, end, replacement tokens)."""
    start = _COMMON_TOKENS + num_tokens // 10
    if kind == "several":
        length = num_tokens // 16
        starts = (start, num_tokens // 2, num_tokens * 7 // 10)
        return [(at, at + length, REPLACEMENT_TOKENS) for at in starts]
    if kind in ("first", "later", "empty"):
        return [(start, start + num_tokens // 10, 0 if kind == "empty" else REPLACEMENT_TOKENS)]
    return []


def edited(
    prompt: Sequence[int], spans: Sequence[tuple[int, int, int]], num_tokens: int, rng: random.Random
) -> list[int]:
    """Carry out the edits and append new tokens up to `num_tokens`, at least eight."""
    new: list[int] = []
    at = 0
    for start, end, replacement_tokens in spans:
        new += [*prompt[at:start], *fresh(rng, replacement_tokens)]
        at = end
    new += prompt[at:]
    return new + fresh(rng, max(8, num_tokens - len(new)))


@dataclass
class Load:
    """One run against one server."""

    server: Server
    options: argparse.Namespace
    stream_prompts: list[list[int]]
    pool: dict[str, Any]
    k_pe_floor: float
    """Of fresh keys in layer 0; see `row_check.Fresh`."""
    deadline: float
    target: int = 0
    """Editors stop at so many splices in all."""
    ledger: Ledger = field(default_factory=Ledger)
    rounds: int = 0

    def warm_up(self) -> None:
        """Cache the streams' prompts, compile every shape, and take each kind of turn once.

        Raises:
            BenchError: the server does not splice.
        """
        for prompt in self.stream_prompts:
            self.server.generate(prompt, 0)
        self._streams(8)
        ledger, self.ledger = self.ledger, Ledger()
        # With a prompt of its own: whatever it does to rows of others, the quiet rounds are to be without it.
        rng = random.Random(f"{self.options.seed} warm-up")
        self._conversation(fresh(rng, self.options.prompt_tokens), rng, lambda: False, checked=True)
        if self.ledger.not_done:
            raise BenchError(f"the server cannot do what is to be measured: {dict(self.ledger.not_done)}")
        self.ledger = ledger

    def round(self, mode: str) -> tuple[list[Decoded], dict[str, Any]]:
        """Decode all streams once, beside editors unless the mode is `quiet`; return what the server counted too."""
        self.rounds += 1
        before = self.ledger.total
        self.server.state(reset=True)
        started = time.monotonic()
        ended = threading.Event()
        num_editors = 0 if mode == "quiet" else self.options.editors
        with ThreadPoolExecutor(1 + num_editors) as pool:
            streams = pool.submit(self._streams, self.options.stream_tokens)
            while not streams.done() and not self.server.state()["decode_batches"]:
                time.sleep(0.005)
            editors = [pool.submit(self._edit, idx, mode, ended) for idx in range(num_editors)]
            try:
                decoded = streams.result()
                counted = self.server.state()
            finally:
                ended.set()
            for editor in editors:
                editor.result()
        return decoded, {
            "mode": mode,
            "seconds": round(time.monotonic() - started, 1),
            "splices": self.ledger.total - before,
            **{name: counted[name] for name in ("decode_batches", "prefill_batches", "prefill_tokens", "kernel_calls")},
        }

    def _edit(self, idx: int, mode: str, ended: threading.Event) -> None:
        """Be an editor: one conversation after another."""

        def stop() -> bool:
            enough = mode == "edits" and self.ledger.total >= self.target
            return ended.is_set() or time.monotonic() > self.deadline or enough

        rng = random.Random(f"{self.options.seed} round {self.rounds} editor {idx}")
        number = idx
        try:
            while not stop():
                if mode == "plain":
                    self._plain(rng, stop)
                else:
                    self._conversation(self._begun(rng), rng, stop, checked=number % self.options.check_every == 0)
                number += self.options.editors
        except Exception as error:
            # In a thread: what goes wrong is told in the row.
            self.ledger.add(f"editor {idx}: {type(error).__name__}: {error}")

    def _streams(self, num_tokens: int) -> list[Decoded]:
        results = self.server.generate_batch(self.stream_prompts, num_tokens, return_logprob=True)
        return [
            Decoded(
                tuple(result["output_ids"]),
                tuple(entry[0] for entry in result["meta_info"]["output_token_logprobs"]),
            )
            for result in results
        ]

    def _begun(self, rng: random.Random) -> list[int]:
        """Return the first prompt of a conversation, which begins as that of a stream does."""
        stream_prompt = rng.choice(self.stream_prompts)
        return [*stream_prompt, *fresh(rng, self.options.prompt_tokens - len(stream_prompt))]

    def _plain(self, rng: random.Random, stop: Callable[[], bool]) -> None:
        """Send what a conversation would, without notes."""
        prompt = self._begun(rng)
        self.server.generate(prompt, self.options.edit_tokens)
        for kind in KINDS:
            time.sleep(self.options.pause_s)
            if stop():
                return
            spans = spans_of(kind, self.options.prompt_tokens)
            prompt = edited(prompt, spans, self.options.prompt_tokens, rng)
            self.server.generate(prompt, self.options.edit_tokens)

    def _conversation(self, prompt: list[int], rng: random.Random, stop: Callable[[], bool], *, checked: bool) -> None:
        """Begin a conversation, take its turns, compare its rows and give it back."""
        talk = Talk(self.server, [])
        talk.turn(prompt, self.options.edit_tokens)
        self.ledger.conversations += 1
        moves = 0
        for kind in KINDS:
            # Between an editor's turns there is time to decode.
            time.sleep(self.options.pause_s)
            if stop():
                break
            moves += self._turn(talk, kind, rng, checked=checked)
            if checked and kind == "first" and moves:
                self._check_fresh(talk, moves)
        if checked and moves:
            self._check_fresh(talk, moves)
        talk.release()

    def _turn(self, talk: Talk, kind: str, rng: random.Random, *, checked: bool) -> int:
        """Take one turn and return how often it moved rows."""
        note: dict[str, Any] = {}
        if kind == "forget":
            note["forget"] = [rng.choice(talk.edit_ids[-3:])]
        spans = spans_of(kind, self.options.prompt_tokens)
        base = talk.prompt
        prompt = edited(base, spans, self.options.prompt_tokens, rng)
        own = {} if kind == "first" else {"conversation": talk.conversation_id}
        look = checked and kind in _SPLICES
        before = self.server.rows(base, **own) if look else None
        outcome = talk.turn(prompt, self.options.edit_tokens, **note).outcome
        done = self.ledger.turn(kind, outcome)
        if before is not None and done:
            after = self.server.rows(prompt, conversation=talk.conversation_id)
            runs = kept_runs(spans, len(base))
            shape = {"kv_lora_rank": self.pool["kv_lora_rank"], "is_neox_style": self.pool["is_neox_style"]}
            inv_freq = torch.tensor(self.pool["inv_freq"])
            self.ledger.rows(
                *(
                    check_moved(old, new, runs, inv_freq, **shape)
                    for old, new in ((before.first, after.first), (before.last, after.last))
                )
            )
        return int(done and kind in _SPLICES)

    def _check_fresh(self, talk: Talk, moves: int) -> None:
        prompt = talk.prompt[: -self.options.edit_tokens or None]
        rows = self.server.rows(prompt, conversation=talk.conversation_id).first
        salt = f"fresh-{secrets.token_hex(8)}"
        self.server.generate(prompt, 0, cache_salt=salt)
        self.ledger.rows(
            check_fresh(
                rows,
                self.server.rows(prompt, cache_salt=salt).first,
                kv_lora_rank=self.pool["kv_lora_rank"],
                moves=moves,
                floor=self.k_pe_floor,
            )
        )


def run(server: Server, options: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the row; rows of single rounds are written as they end."""
    deadline = time.monotonic() + options.limit_s
    log_start = options.log.stat().st_size if options.log else 0
    rng = random.Random(options.seed)
    common = fresh(rng, _COMMON_TOKENS)
    prompts = [[*common, *fresh(rng, options.stream_prompt_tokens - len(common))] for _ in range(options.streams)]
    server.flush()
    pool = server.state()
    _say("warming up")
    stock = _stock_noise(server, fresh(rng, options.stream_prompt_tokens), pool)
    load = Load(server, options, prompts, pool, stock["k_pe_floor"], deadline)
    load.warm_up()
    rounds: list[dict[str, Any]] = []
    comparisons: dict[str, list[Comparison]] = {"quiet": [], "plain": [], "edits": []}
    reference: list[Decoded] | None = None

    def take(mode: str, **more: Any) -> None:
        nonlocal reference
        decoded, counted = load.round(mode)
        round_row = {**counted, **more}
        if reference is None:
            reference = decoded
        else:
            comparison = compare(decoded, reference)
            comparisons[mode].append(comparison)
            round_row |= comparison.as_json()
        rounds.append(round_row)
        append_row(options.json_out, {"op": "under_load_round", **facts, **round_row})
        _say(f"{round_row}; {load.ledger.total} of {options.splices} splices")

    for mode in ("quiet", "quiet", *["plain"] * options.plain_rounds):
        take(mode)
    num_paths = len(options.paths or [None])
    for idx, path in enumerate(server.each_path(options.paths)):
        load.target = load.ledger.total + math.ceil((options.splices - load.ledger.total) / (num_paths - idx))
        while load.ledger.total < load.target and time.monotonic() < deadline and not load.ledger.errors:
            take("edits", path=path)
    balance = server.balance()
    row = {
        "op": "under_load",
        **{name: merge(compared).as_json() for name, compared in comparisons.items()},
        **load.ledger.as_json(),
        "splices_by_path": _sum({r["path"]: r["splices"]} for r in rounds if r.get("path")),
        "two_fresh_prefills": stock,
        "rounds": {mode: sum(r["mode"] == mode for r in rounds) for mode in comparisons},
        "decode_batches": _sum(r["decode_batches"] for r in rounds),
        "decode_batches_beside_edits": _sum(r["decode_batches"] for r in rounds if r["mode"] == "edits"),
        "kernel_calls": _sum(r["kernel_calls"] for r in rounds),
        "slots_lost": balance["lost"],
        "slots_protected": balance["protected"],
        "healthy": server.is_healthy(),
        "log_problems": problems_in(options.log, start=log_start)[:10],
        **{
            name: getattr(options, name)
            for name in ("streams", "stream_tokens", "stream_prompt_tokens", "prompt_tokens", "edit_tokens", "editors")
        },
    }
    wrong = faults(row, options.splices)
    return {**row, "holds": not wrong, "wrong": wrong, **facts}


def _sum(counts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _stock_noise(server: Server, prompt: list[int], pool: dict[str, Any]) -> dict[str, Any]:
    """Compare fresh prefills of the same ids in layer 0, which a splice has no part in.

    `latent_error` and `unequal_latents` are those of the prompt prefilled in parts and whole; `k_pe_floor` those of its
    keys at other positions, turned exactly to where they stand.
    """
    rank = pool["kv_lora_rank"]

    def rows(ids: list[int], *ends: int) -> torch.Tensor:
        salt = f"stock-{secrets.token_hex(8)}"
        for end in (*ends, len(ids)):
            server.generate(ids[:end], 0, cache_salt=salt)
        return server.rows(ids, cache_salt=salt).first

    third = len(prompt) // 3
    whole = rows(prompt)
    parts = rows(prompt, third, third + REPLACEMENT_TOKENS, 2 * third)
    check = check_fresh(parts, whole, kv_lora_rank=rank, moves=0, floor=0.0)
    floors = []
    for shift in (REPLACEMENT_TOKENS, third):
        shifted = rows([*prompt[:shift], *prompt])[shift:]
        turned = rotate(
            shifted[:, rank:],
            torch.tensor(pool["inv_freq"]),
            old_start=shift,
            new_start=0,
            is_neox_style=pool["is_neox_style"],
        )
        floors.append(relative_l2(turned, whole[: len(turned), rank:]))
    return {
        "unequal_latents": check.unequal_latents,
        "latent_error": check.latent_error,
        "k_pe_error": check.k_pe_error,
        "k_pe_floor": max(floors),
    }


def _say(text: str) -> None:
    say("under_load", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one row for each round and one for all; exit 1 where something does not hold."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m evals.micro.under_load", description="Exactness under load.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--splices", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=8, help="requests that decode (default: 8)")
    parser.add_argument("--stream-tokens", type=int, default=1500, help="tokens of each, a round (default: 1500)")
    parser.add_argument("--stream-prompt-tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of a conversation (default: 1024)")
    parser.add_argument(
        "--paths", nargs="+", choices=PATHS, help="one after the other, a part of the splices each; default: as started"
    )
    parser.add_argument("--edit-tokens", type=int, default=1, choices=(0, 1), help="generated by an edited turn")
    parser.add_argument("--editors", type=int, default=4, help="conversations at a time (default: 4)")
    parser.add_argument("--pause-s", type=float, default=0.02, help="between an editor's turns (default: 0.02)")
    parser.add_argument("--plain-rounds", type=int, default=1, help="rounds beside requests without notes (default: 1)")
    parser.add_argument("--check-every", type=int, default=8, help="check the rows of one conversation in so many")
    parser.add_argument("--limit-s", type=float, default=300, help="edit no longer (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="the server's log, to be searched for errors")
    parser.add_argument("--json-out", type=Path, help="append rows to this file; default: standard output")
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    if options.prompt_tokens < 4 * _COMMON_TOKENS:
        parser.error(f"--prompt-tokens: at least {4 * _COMMON_TOKENS}, so that three edits have runs between them")
    ((_, end, _),) = spans_of("first", options.prompt_tokens)
    if not end + _COMMON_TOKENS <= options.stream_prompt_tokens <= options.prompt_tokens:
        parser.error(
            f"--stream-prompt-tokens: {end + _COMMON_TOKENS} to {options.prompt_tokens}, so that a first edit moves "
            "copies of rows that a stream reads"
        )
    facts: dict[str, Any] = {}
    try:
        # The streams of a round are one request, which may last as long as the editors keep the server busy.
        with Server(options.url, timeout_s=options.limit_s + 300) as server:
            facts = about(server, arguments, "evals.micro.under_load", commit=options.commit, seed=options.seed)
            row = run(server, options, facts)
    except (BenchError, OSError) as error:
        append_row(options.json_out, {"op": "under_load", "error": str(error), **facts})
        _say(str(error))
        return 1
    append_row(options.json_out, row)
    _say("everything holds" if row["holds"] else f"wrong: {'; '.join(row['wrong'])}")
    return 0 if row["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
