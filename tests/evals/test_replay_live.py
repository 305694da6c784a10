"""Replays through a real server: what the arms report, what the server counts and what the ideal says must fit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals.replay.demo import check
from evals.replay.progress import ReplayProgress
from evals.replay.record import DEMO_TRAJECTORY
from evals.replay.runner import ReplayRequest, keep_last_policy, replay
from evals.replay.trajectory import load_trajectory
from evals.serving import RunningServer

from ..recordings import RECORDINGS

pytestmark = pytest.mark.sglang


def _replay(file: Path, server: RunningServer, out: Path, **options: Any) -> dict[str, Any]:
    trajectory = load_trajectory(file)
    request = ReplayRequest(trajectory, keep_last_policy(2, trajectory), **options)
    with ReplayProgress(Console(file=io.StringIO())) as progress:
        return replay(request, url=server.url, out=out, progress=progress)


@pytest.fixture(scope="module")
def demo(cpu_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The first turns of the demo in all arms."""
    out = tmp_path_factory.mktemp("replay")
    return _replay(DEMO_TRAJECTORY, cpu_server, out, max_turns=14), out


def test_splices_happen_and_nothing_falls_back(demo: tuple[dict[str, Any], Path]) -> None:
    summary, _ = demo
    check(summary)
    assert summary["arms"]["splice"]["splices"] == 11
    assert summary["same_prompts"] is True


def test_one_request_a_turn_as_the_server_counts_them(demo: tuple[dict[str, Any], Path]) -> None:
    summary, _ = demo
    for totals in summary["arms"].values():
        assert totals["turns"] == totals["http_requests"] == 14
        assert totals["crosscheck"]["server"]["http_chat_requests"] == 14
        assert totals["crosscheck"]["agrees"] is True


def test_the_local_tokenizer_sees_the_servers_prompts(demo: tuple[dict[str, Any], Path]) -> None:
    summary, _ = demo
    assert [totals["tokenizer_mismatches"] for totals in summary["arms"].values()] == [0, 0, 0]


def test_splice_reaches_its_ideal_and_reprefill_does_not(demo: tuple[dict[str, Any], Path]) -> None:
    summary, out = demo
    splice = summary["arms"]["splice"]
    assert splice["ideal_gap"]["missed_tokens"] <= 0.01 * splice["prompt_tokens"]
    assert splice["hit_rate"] > summary["arms"]["reprefill"]["hit_rate"]
    rows = [json.loads(line) for line in (out / "turns.jsonl").read_text().splitlines()]
    for row in rows:
        # Where nothing is edited the definition is exact: all of the last prompt, one token less at most.
        if row["arm"] == "none" and row["turn"] > 1:
            assert row["ideal_cached_tokens"] == row["cached_tokens"]


def test_what_is_written_is_what_is_returned(demo: tuple[dict[str, Any], Path]) -> None:
    summary, out = demo
    assert json.loads((out / "summary.json").read_text()) == summary
    assert len((out / "turns.jsonl").read_text().splitlines()) == 3 * 14
    assert (out / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="set LEYLINE_TRAJECTORIES to a folder of recorded trajectories")
def test_other_recordings_replay_without_a_fallback(cpu_server: RunningServer, tmp_path: Path) -> None:
    files = sorted(RECORDINGS.glob("*.json"))
    assert files
    for file in files:
        # The one with the most evictions to gain from is compared with its re-prefill too.
        arms = ("reprefill", "splice") if file.stem == "debug_gym_astropy" else ("splice",)
        summary = _replay(file, cpu_server, tmp_path / file.stem, arms=arms)
        totals = summary["arms"]["splice"]
        if "reprefill" in arms:
            assert totals["hit_rate"] >= summary["arms"]["reprefill"]["hit_rate"] + 0.15
            assert abs(totals["hit_rate"] - totals["hit_rate_ideal"]) <= 0.01
        assert (file.name, totals["fallbacks"]) == (file.name, 0)
        assert totals["ideal_gap"]["missed_tokens"] <= 0.01 * totals["prompt_tokens"], file.name
        assert totals["crosscheck"]["agrees"] is True
