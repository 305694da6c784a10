from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from evals.micro import concurrency, concurrency_bench
from evals.micro.bench_server import Answer, BenchError, Server
from evals.micro.concurrency_plan import Cell, Workload, parse_cell, schedule
from evals.micro.concurrency_rows import finished, read_rows
from evals.serving import serve
from tests.evals.recorded_agent import write_recording

ARMS = ("none", "reprefill", "splice", "splice_ungated")
PLUGIN = Path(concurrency.__file__).parent / "server_plugin"
SIZES = ["--cells=1000:2:2", "--turns=3", "--output-tokens=4", "--repeats=1"]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "agent.json", lines=12)


# --- what is run ----------------------------------------------------------------------------------------------------


class Healthy:
    def is_healthy(self) -> bool:
        return True


class ScriptedBench(concurrency_bench.Bench):
    """Stands for the server in tests of which runs are made: a run takes no time and measures the same each time."""

    def __init__(self, options: argparse.Namespace, workload: Workload, *, failing: str = "", run_s: float = 0.0):
        super().__init__(Healthy(), options, workload, None, "")  # type: ignore[arg-type]
        self.runs: list[tuple[Cell, str, int | str]] = []
        self._failing, self._run_s = failing, run_s

    def prepare(self, cell: Cell) -> None:
        pass

    def expected_s(self, cell: Cell) -> float:
        return self._run_s

    def run(self, cell: Cell, arm: str, repeat: int | str, turns: int) -> dict[str, Any]:
        self.runs.append((cell, arm, repeat))
        if arm == self._failing:
            raise BenchError("the stream ended without a token")
        turn = {"ms": 5.0, "first_token_ms": 2.0, "prompt": 100, "cached": 80, "ideal": 90, "edits": 1}
        row = {name: [[value] * turns] * cell.concurrency for name, value in turn.items()}
        noted = {"status": [["spliced"] * turns] * cell.concurrency, "moved_tokens": 1, "saved_ms": 1, "note_ms": 1}
        sums = {"prefill_tokens": 1, "prefill_batches": 1, "wall_s": 1.0, "client_cpu_s": 0.1}
        return row | sums | (noted if arm in concurrency_bench.GATES else {})


@pytest.fixture
def options(recording: Path, tmp_path: Path) -> argparse.Namespace:
    out = tmp_path / "rows.jsonl"
    arguments = [f"--trajectories={recording}", f"--json-out={out}", *SIZES, "--repeats=2"]
    return concurrency._parser().parse_args(arguments)


CELLS = [Cell(1000, 1, 2), Cell(1000, 2, 2)]


def measure(bench: ScriptedBench, **facts: Any) -> int:
    path = bench.options.json_out
    done = finished(read_rows(path))
    return concurrency.measure(bench, CELLS, {"model": "m", "label": "", "git": "a", "seed": 0, **facts}, done)


def test_every_arm_of_every_cell_is_run_in_each_repeat(options: argparse.Namespace) -> None:
    bench = ScriptedBench(options, Workload(options))
    assert measure(bench) == 0
    assert Counter(bench.runs) == {(cell, arm, repeat): 1 for cell in CELLS for arm in ARMS for repeat in range(2)}
    ops = [row["op"] for row in read_rows(options.json_out)]
    assert ops == [*["concurrency_run"] * 8, "concurrency"] * 2


def test_arms_take_turns_in_another_order_each_repeat(options: argparse.Namespace) -> None:
    options.repeats = 6
    runs = list(schedule(CELLS[0], options))
    orders = {tuple(arm for repeat, arm in runs if repeat == wanted) for wanted in range(6)}
    assert len(orders) > 2
    assert runs == list(schedule(CELLS[0], options))


def test_the_same_command_does_what_has_no_row_yet(options: argparse.Namespace) -> None:
    workload = Workload(options)
    measure(ScriptedBench(options, workload))
    lines = options.json_out.read_text().splitlines()
    lost = json.loads(lines[3])
    # What a killed run leaves: rows up to somewhere, and half a line.
    options.json_out.write_text("\n".join([*lines[:3], lines[3][:50], *lines[4:]]) + "\n")
    again = ScriptedBench(options, workload)
    assert measure(again) == 0
    assert again.runs == [(CELLS[0], lost["arm"], lost["repeat"])]
    once_more = ScriptedBench(options, workload)
    assert measure(once_more) == 0
    assert once_more.runs == []


@pytest.mark.parametrize("other", [{"git": "b"}, {"model": "n"}, {"label": "page64"}, {"seed": 1}], ids=str)
def test_rows_of_another_measurement_do_not_count(options: argparse.Namespace, other: dict[str, Any]) -> None:
    workload = Workload(options)
    measure(ScriptedBench(options, workload))
    again = ScriptedBench(options, workload)
    measure(again, **other)
    assert len(again.runs) == 16


def test_a_run_that_failed_is_a_row_and_is_done_again(options: argparse.Namespace) -> None:
    workload = Workload(options)
    assert measure(ScriptedBench(options, workload, failing="splice")) == 1
    errors = [row for row in read_rows(options.json_out) if "error" in row]
    assert len(errors) == 4
    assert errors[0]["error"] == "BenchError: the stream ended without a token"
    again = ScriptedBench(options, workload)
    assert measure(again) == 0
    assert {arm for _, arm, _ in again.runs} == {"splice"}
    assert len(again.runs) == 4


def test_no_run_begins_that_would_end_too_late(options: argparse.Namespace) -> None:
    bench = ScriptedBench(options, Workload(options), run_s=options.limit_s + 1)
    assert measure(bench) == 3
    assert bench.runs == []


@pytest.mark.parametrize("text", ["16384", "16384:0", "a:b", "1:2:3:4"])
def test_a_cell_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected LENGTH:C or LENGTH:C:N"):
        parse_cell(text)


def test_a_dry_run_shows_what_would_be_sent(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert concurrency.main([f"--trajectories={recording}", *SIZES, "--dry-run"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    cell, base, first, last, edits, *_, spliced, reprefilled, unedited = line.replace(",", "").split()
    assert (cell, edits) == ("1000:2:2", "1.00")
    assert int(base) < 1000
    assert 800 < int(first) <= 1000
    assert int(last) > int(first)
    assert float(reprefilled[:-1]) < float(spliced[:-1]) < 100
    assert 0 < float(unedited[:-1]) < 100


def test_a_policy_that_edits_nothing_is_refused(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--trajectories={recording}", "--cells=1000:2:50", "--turns=3", "--dry-run"]
    assert concurrency.main(arguments) == 2
    assert "the policy edits nothing in 3 turns; keep fewer turns" in capsys.readouterr().err


# --- live -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench_server(model_dir: Path) -> Iterator[Server]:
    with serve(model_dir, env={"PYTHONPATH": str(PLUGIN)}, fork=True) as running, Server(running.url) as server:
        yield server


class RecordedTalk(concurrency_bench.Talk):
    """Keeps the ids of all conversations, and what their notes asked for."""

    ids: ClassVar[set[str]] = set()
    gates: ClassVar[Counter[str]] = Counter()

    def turn(self, prompt: Sequence[int], max_new_tokens: int = 1, *, stream: bool = False, **note: Any) -> Answer:
        self.ids.add(self.conversation_id)
        self.gates[note.get("gate", "")] += 1
        return super().turn(prompt, max_new_tokens, stream=stream, **note)


@pytest.mark.sglang
def test_conversations_are_timed_side_by_side_on_a_live_server(
    bench_server: Server,
    recording: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency_bench, "Talk", RecordedTalk)
    out = tmp_path / "rows.jsonl"
    arguments = [f"--url={bench_server.url}", f"--trajectories={recording}", f"--json-out={out}", *SIZES]
    assert concurrency.main(arguments) == 0
    *runs, summary = read_rows(out)
    assert sorted(run["arm"] for run in runs) == sorted(ARMS)
    arms = summary["arms"]
    for run in runs:
        assert [len(talk) for talk in run["ms"]] == [3, 3]
        for firsts, ends in zip(run["first_token_ms"], run["ms"], strict=True):
            assert all(0 < first <= end for first, end in zip(firsts, ends, strict=True))
    # Every edit is carried out where nobody weighs it, and the rows are those that a perfect cache would have.
    ungated = arms["splice_ungated"]
    assert ungated["spliced"] == ungated["edited_turns"] == 6
    assert ungated["hit_rate"] == pytest.approx(ungated["ideal_hit_rate"], abs=0.01)
    assert arms["none"]["hit_rate"] == pytest.approx(arms["none"]["ideal_hit_rate"], abs=0.01)
    # A prefix cache has less: what stands left of the edit, and nothing that another run has left there.
    assert arms["reprefill"]["hit_rate"] < ungated["hit_rate"] - 0.1
    assert arms["reprefill"]["prefill_tokens_per_run"] > 2 * ungated["prefill_tokens_per_run"]
    # A base, two turns of warm-up; a base, three turns; for two conversations. And one that asks for the vocabulary.
    assert RecordedTalk.gates == {"auto": 14, "off": 14, "": 1}
    assert bench_server.balance()["lost"] == 0
    for conversation_id in RecordedTalk.ids:
        headers = {"x-leyline-conversation": conversation_id}
        assert httpx.get(f"{bench_server.url}/leyline/conversation", headers=headers).status_code == 404
    capsys.readouterr()
    # All of it is there: nothing is run again, and the table comes from the file.
    assert concurrency.main(arguments) == 0
    assert len(read_rows(out)) == 5
    assert concurrency.main([f"--summarize={out}"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("splice_ungated") == 2
