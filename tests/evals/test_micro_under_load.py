from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.micro import edited_turn, under_load
from evals.micro.bench_server import Server, problems_in
from evals.micro.load_ledger import Decoded, Ledger, compare, faults, merge
from evals.micro.row_check import Kept, check_fresh, check_moved, kept_runs, rotate
from evals.micro.under_load import KINDS, edited, spans_of
from evals.serving import serve
from leyline_agent.core.diff import diff_token_ids

RANK, ROPE = 8, 64
INV_FREQ = 10_000.0 ** -torch.linspace(0, 1, ROPE // 2)


# --- streams --------------------------------------------------------------------------------------------------------


def stream(*token_ids: int, logprobs: tuple[float, ...] | None = None) -> Decoded:
    return Decoded(token_ids, logprobs or tuple(-1.0 for _ in token_ids))


def test_equal_streams_are_counted_and_their_log_probabilities_compared() -> None:
    found = compare(
        [stream(1, 2, logprobs=(-1.0, -2.0)), stream(3, 4)], [stream(1, 2, logprobs=(-1.0, -2.5)), stream(3, 4)]
    )
    assert (found.streams, found.equal, found.max_logprob_difference, found.first_difference) == (2, 2, 0.5, None)


def test_log_probabilities_are_compared_up_to_the_first_token_that_differs() -> None:
    found = compare([stream(1, 2, 3, logprobs=(-1.0, -1.0, -9.0))], [stream(1, 5, 3, logprobs=(-1.25, -7.0, -1.0))])
    assert (found.equal, found.max_logprob_difference, found.first_difference) == (0, 0.25, 1)


def test_rounds_add_up() -> None:
    rounds = [compare([stream(1, 2)], [stream(1, 2)]), compare([stream(1, 2)], [stream(1, 3)])]
    merged = merge(rounds)
    assert (merged.streams, merged.equal, merged.first_difference) == (2, 1, 1)


# --- turns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [256, 1024])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"forget"}))
def test_the_server_finds_the_edits_that_were_made(kind: str, tokens: int) -> None:
    rng = random.Random(3)
    base = under_load.fresh(rng, tokens)
    spans = spans_of(kind, tokens)
    new = edited(base, spans, tokens, rng)
    directives = diff_token_ids(array("i", base), array("i", new))
    assert [(d.start, d.end, len(d.replacement_ids)) for d in directives] == spans


def test_an_edited_prompt_has_the_length_that_is_asked_for() -> None:
    rng = random.Random(3)
    base = under_load.fresh(rng, 300)
    assert len(edited(base, spans_of("several", 300), 300, rng)) == 300


def outcome(status: str, **more: Any) -> dict[str, Any]:
    return {"status": status, "reason": None, "moved_tokens": 10, "scheduler_ms": 1.0, "purge": None, **more}


def test_splices_are_counted_by_kind_and_what_was_refused_by_reason() -> None:
    ledger = Ledger()
    assert ledger.turn("later", outcome("spliced"))
    assert not ledger.turn("later", outcome("refused", reason="evicted", moved_tokens=0))
    assert ledger.turn("forget", outcome("reprefill", purge={"dropped_tokens": 3}))
    assert not ledger.turn("forget", outcome("reprefill"))
    row = ledger.as_json()
    assert row["splices_by_kind"] == {"later": 1}
    assert row["forgets"] == 1
    assert row["not_done"] == {"later: refused, evicted": 1, "forget: reprefill, None": 1}


# --- rows -----------------------------------------------------------------------------------------------------------


def test_what_edits_keep_of_a_sequence() -> None:
    assert kept_runs([(10, 20, 3), (40, 50, 0)], 60) == [Kept(0, 0, 10), Kept(20, 13, 20), Kept(50, 33, 10)]


def moved_rows(delta: int) -> tuple[torch.Tensor, torch.Tensor]:
    """200 bfloat16 rows of positions 20 on, and the same at positions 13 on, their keys turned by `delta`."""
    before = torch.randn(220, RANK + ROPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    after = torch.zeros(213, RANK + ROPE, dtype=torch.bfloat16)
    after[13:] = before[20:]
    keys = rotate(before[20:, RANK:], INV_FREQ, old_start=20, new_start=20 + delta, is_neox_style=False)
    after[13:, RANK:] = keys.bfloat16()
    return before, after


def check(before: torch.Tensor, after: torch.Tensor) -> Any:
    return check_moved(before, after, [Kept(20, 13, 200)], INV_FREQ, kv_lora_rank=RANK, is_neox_style=False)


def test_rows_turned_to_their_new_positions_hold() -> None:
    assert check(*moved_rows(-7)).holds


@pytest.mark.parametrize("delta", [0, -6, 57], ids=["not_turned", "one_off", "64_off"])
def test_rows_turned_by_another_delta_do_not_hold(delta: int) -> None:
    assert not check(*moved_rows(delta)).holds


def test_one_bit_of_one_latent_is_seen() -> None:
    before, after = moved_rows(-7)
    after[14, 2] = after[14, 2] * 1.01
    assert check(before, after).unequal_latents == 1


def test_no_rows_at_all_do_not_hold() -> None:
    before, _ = moved_rows(-7)
    assert not check(before, before[:0]).holds


@pytest.mark.parametrize(("moves", "bound"), [(1, 2.9e-3), (64, 1.5e-2)], ids=["one_move", "64_moves"])
def test_the_bound_against_a_fresh_row_is_that_of_its_roundings(moves: int, bound: float) -> None:
    rows = torch.ones(2, RANK + ROPE).bfloat16()
    found = check_fresh(rows, rows, kv_lora_rank=RANK, moves=moves, floor=2.3e-3)
    assert found.bound == pytest.approx(bound, rel=0.06)


def test_a_single_wrong_row_is_seen_among_a_thousand() -> None:
    fresh = torch.randn(1000, RANK + ROPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = fresh.clone()
    assert check_fresh(rows, fresh, kv_lora_rank=RANK, moves=1, floor=2.3e-3).holds
    rows[500, RANK:] = rows[500, RANK:] * 1.02
    assert not check_fresh(rows, fresh, kv_lora_rank=RANK, moves=1, floor=2.3e-3).holds


# --- the row of results ---------------------------------------------------------------------------------------------


def result(**changes: Any) -> dict[str, Any]:
    compared = {"streams_total": 8, "streams_equal": 8, "max_logprob_difference": 0.0}
    row = {
        "edits": compared,
        "decode_batches": {"8": 100},
        "streams": 8,
        "splices": 20,
        "not_done": {},
        "rows_moved": {"comparisons": 2, "hold": 2},
        "rows_fresh": {"comparisons": 2, "hold": 2},
        "slots_lost": 0,
        "slots_protected": 0,
        "healthy": True,
        "log_problems": [],
        "errors": [],
    }
    return row | changes


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        (
            {"edits": {"streams_total": 8, "streams_equal": 7, "max_logprob_difference": 0.0}},
            ["streams beside edits differ in token ids"],
        ),
        (
            {"edits": {"streams_total": 8, "streams_equal": 8, "max_logprob_difference": 2e-4}},
            ["log probabilities beside edits differ"],
        ),
        ({"decode_batches": {"8": 99, "9": 1}}, ["decode batches were not the streams alone"]),
        ({"splices": 19}, ["fewer splices than asked for"]),
        ({"not_done": {"later: refused, evicted": 1}}, ["turns that were not done"]),
        ({"rows_moved": {"comparisons": 2, "hold": 1}}, ["moved rows"]),
        ({"rows_fresh": {"comparisons": 0, "hold": 0}}, ["rows of layer 0 against a fresh prefill"]),
        ({"slots_lost": 1}, ["slots are lost or held"]),
        ({"healthy": False}, ["the server does not answer"]),
        ({"log_problems": ["Traceback"]}, ["errors in the log"]),
        ({"errors": ["editor 0"]}, ["errors of editors"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_hold_is_named(changes: dict[str, Any], wrong: list[str]) -> None:
    assert faults(result(**changes), 20) == wrong


def test_errors_of_a_log_are_those_since_the_run_began(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("Traceback (most recent call last):\n")
    start = log.stat().st_size
    assert problems_in(log, start=start) == []
    with log.open("a") as file:
        file.write("[now] ERROR: something\n[now] all well\n")
    assert problems_in(log, start=start) == ["[now] ERROR: something"]


# --- live -----------------------------------------------------------------------------------------------------------

PLUGIN = Path(under_load.__file__).parent / "server_plugin"
LOAD = {
    "splices": 6,
    "streams": 2,
    "stream-tokens": 40,
    "stream-prompt-tokens": 256,
    "prompt-tokens": 320,
    "editors": 2,
    "check-every": 1,
    "plain-rounds": 0,
}
BOTH = ["--paths", "one_step", "two_steps"]


@pytest.fixture(scope="module")
def bench_server(model_dir: Path) -> Iterator[Server]:
    with serve(model_dir, env={"PYTHONPATH": str(PLUGIN)}, fork=True) as running, Server(running.url) as server:
        yield server


@pytest.fixture
def faulty(bench_server: Server, request: pytest.FixtureRequest) -> Iterator[Server]:
    bench_server.post("/bench/fault", request.param)
    yield bench_server
    bench_server.post("/bench/fault", {})


def load(server: Server, out: Path, *more: str) -> dict[str, Any]:
    """Run the benchmark and return its row."""
    sizes = [f"--{name}={value}" for name, value in LOAD.items()]
    code = under_load.main([f"--url={server.url}", f"--json-out={out}", *sizes, *more])
    row = json.loads(out.read_text().splitlines()[-1])
    assert row["op"] == "under_load"
    assert code == (0 if row["holds"] else 1)
    return row


@pytest.mark.sglang
def test_edits_beside_streams_hold_on_a_live_server(bench_server: Server, tmp_path: Path) -> None:
    row = load(bench_server, tmp_path / "rows.jsonl", *BOTH)
    assert row["wrong"] == []
    assert all(row["splices_by_path"][path] for path in ("one_step", "two_steps"))


@pytest.mark.sglang
@pytest.mark.parametrize("faulty", [{"rotation": 64}, {"rotation": "none"}], indirect=True, ids=["64_off", "none"])
def test_a_wrong_rotation_is_seen_in_the_rows(faulty: Server, tmp_path: Path) -> None:
    assert load(faulty, tmp_path / "rows.jsonl")["wrong"] == ["moved rows", "rows of layer 0 against a fresh prefill"]


@pytest.mark.sglang
@pytest.mark.parametrize("faulty", [{"disturb": True}], indirect=True, ids=["sources_turned"])
def test_an_edit_that_touches_rows_of_others_is_seen_in_their_streams(faulty: Server, tmp_path: Path) -> None:
    assert "streams beside edits differ in token ids" in load(faulty, tmp_path / "rows.jsonl")["wrong"]


@pytest.mark.sglang
def test_an_edited_turn_is_timed_beside_a_hit_on_a_live_server(bench_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = {"prompt-tokens": 400, "removed": 100, "repeats": 3, "reprefills": 1, "warm-up": 1, "label": "here"}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    assert edited_turn.main([f"--url={bench_server.url}", f"--json-out={out}", *arguments, *BOTH]) == 0
    one_step, two_steps = map(json.loads, out.read_text().splitlines())
    for row in (one_step, two_steps):
        assert row["label"] == "here"
        assert {arm: figures["repeats"] for arm, figures in row["arms"].items()} == {
            **dict.fromkeys(("hit", "noted_hit", "copy", "in_place", "empty"), 3),
            **dict.fromkeys(("reprefill", "cold"), 1),
        }
        assert row["arms"]["copy"]["statuses"] == row["arms"]["in_place"]["statuses"] == {"spliced": 3}
    for arm, replaced in (("copy", 3), ("in_place", 3), ("empty", 0)):
        assert [row["arms"][arm]["prefilled_before"] for row in (one_step, two_steps)] == [0, replaced]
