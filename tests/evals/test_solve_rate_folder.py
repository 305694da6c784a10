"""Rows, and what a run makes of a folder that has some: resumed, refused, or removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.mini_tasks import MiniTask
from evals.solve_rate.cli import main
from evals.solve_rate.mini_task_suite import MiniTaskSuite
from evals.solve_rate.rows import Row, RowsFile, SolveRateError, read_rows
from evals.solve_rate.runner import tokens_of

from .solve_rate_runs import Quiet, a_config, a_server, play, rows_of

CARRY = {"type": "mini_tasks", "kinds": ["carry"], "lengths": ["short"]}
POLICY = "version: 1\nrules:\n- {name: old, select: {role: tool, older_than: {turns: 2}}, replace: gone}\n"


def _row(**more: Any) -> Row:
    said = {"run": "r", "suite": "mini_tasks", "task": "t", "arm": "none", "policy": "none", "execution": "none"}
    rest = {"seed": 0, "status": "solved", "model": "m", "agent": "langgraph", "started": "2026-01-01T00:00:00+00:00"}
    return Row(**{**said, **rest, **more})


def _config(**more: Any) -> Any:
    """One episode a seed, of one model call."""
    return a_config(**{"suite": CARRY, "executions": ["none"], "limits": {"max_turns": 1}, **more})


def test_the_newest_row_of_an_episode_counts(tmp_path: Path) -> None:
    with RowsFile(tmp_path) as file:
        file.append(_row(status="error", reason="the server went away"))
        file.append(_row(task="other"))
        file.append(_row(status="failed"))
    assert [(row.task, row.status) for row in read_rows(tmp_path)] == [("t", "failed"), ("other", "solved")]


def test_what_a_kill_left_of_a_row_is_passed_over_and_then_cut_off(tmp_path: Path) -> None:
    with RowsFile(tmp_path) as file:
        file.append(_row())
    rows_file = tmp_path / "rows.jsonl"
    # In the middle of a letter, too.
    rows_file.write_bytes(rows_file.read_bytes() + b'{"v": 1, "run": "r", "task": "\xc3')
    assert [row.task for row in read_rows(tmp_path)] == ["t"]
    with RowsFile(tmp_path) as file:
        file.append(_row(task="other"))
    assert [row.task for row in read_rows(tmp_path)] == ["t", "other"]


def test_a_line_that_is_no_row_is_told_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"v": 2}) + "\n")
    with pytest.raises(SolveRateError, match=r"rows\.jsonl:1: no row of a run"):
        read_rows(tmp_path)


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with a_server() as url, RowsFile(tmp_path):
        for fresh in (False, True):
            with pytest.raises(SolveRateError, match="another run is writing to it"):
                play(_config(), tmp_path, url, fresh=fresh)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_folder_takes_the_same_run_again_with_more_time_but_no_other(tmp_path: Path) -> None:
    with a_server() as url:
        assert play(_config(seeds=[0, 1], limits={"max_turns": 1, "total_tokens": 1}), tmp_path, url).num_left == 1
        assert play(_config(seeds=[0, 1], jobs=2, server={"url": url}), tmp_path, url).num_left == 0
        with pytest.raises(SolveRateError, match=r"limits\.max_turns \(1 there, 3 here\)"):
            play(_config(seeds=[0, 1], limits={"max_turns": 3}), tmp_path, url)
        with pytest.raises(SolveRateError, match=r"model\.scripted"):
            play(_config(seeds=[0, 1], model={"scripted": "failing"}), tmp_path, url)


def test_a_run_is_not_gone_on_with_on_another_model_or_with_a_changed_policy(tmp_path: Path) -> None:
    policy, folder = tmp_path / "mine.yaml", tmp_path / "run"
    policy.write_text(POLICY)
    config = _config(executions=["reprefill"], policies=[str(policy)])
    with a_server() as url:
        play(config, folder, url)
        play(config, folder, url)
        policy.write_text(POLICY.replace("turns: 2", "turns: 5"))
        with pytest.raises(SolveRateError, match=r"begun otherwise.* policies\.mine/reprefill\.rules"):
            play(config, folder, url)
    policy.write_text(POLICY)
    with a_server(model="other") as url, pytest.raises(SolveRateError, match=r"model \('m' there, 'other' here\)"):
        play(config, folder, url)
    assert len(json.loads((folder / "run.json").read_text())) == 2


def test_beginning_anew_removes_what_a_run_wrote_once_it_can_begin(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(_config().model_dump(mode="json")))
    with a_server() as url:
        play(_config(), folder, url)
        (folder / "notes.txt").write_text("mine")
        (folder / "transcripts" / "old.json").write_text("{}")
        before = (folder / "rows.jsonl").read_text()
        command = ["run", str(file), "--out", str(folder), "--fresh", "--url"]
        assert main([*command, "http://127.0.0.1:9"]) == 2
        assert (folder / "rows.jsonl").read_text() == before
        # Other seeds: another run, and no reason to refuse.
        assert main([*command, url, "--seeds", "2"]) == 0
    assert sorted(row.seed for row in read_rows(folder)) == [0, 1]
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "transcripts" / "old.json").exists()
    assert len(json.loads((folder / "run.json").read_text())) == 1


def test_a_folder_that_is_no_runs_is_neither_written_to_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    with a_server() as url, pytest.raises(SolveRateError, match="no config of a run"):
        play(_config(), tmp_path, url, fresh=True)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with a_server() as url, pytest.raises(SolveRateError, match=r"no folder can be made there .* --out"):
        play(_config(), tmp_path / "file" / "run", url)


def test_a_server_that_goes_away_ends_the_run(tmp_path: Path) -> None:
    gone: list[str] = []
    with a_server(is_gone=gone) as url:
        finished = play(a_config(), tmp_path, url)
    assert gone == ["/v1/chat/completions"]
    assert (finished.num_left, finished.num_errors) == (11, 1)
    assert finished.stopped_by == f"the server at {url} answers no more"


def test_a_world_that_cannot_be_made_is_an_error_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(MiniTaskSuite):
        def make(self, task: str, seed: int) -> MiniTask:
            if seed == 0:
                raise OSError("no more processes")
            return super().make(task, seed)

    monkeypatch.setattr("evals.solve_rate.runner.MiniTaskSuite", Breaks)
    with a_server() as url:
        assert play(_config(seeds=[0, 1]), tmp_path, url).num_errors == 1
    assert [(row.status, row.reason) for row in rows_of(tmp_path).values()] == [
        ("error", "OSError: no more processes"),
        ("failed", None),
    ]


def test_errors_that_were_done_again_count_for_the_budget(tmp_path: Path) -> None:
    config = _config(model={"scripted": "erring"}, limits={"max_turns": 5})
    with a_server() as url:
        play(config, tmp_path, url)
        spent = sum(map(tokens_of, read_rows(tmp_path)))
        play(config, tmp_path, url)
        assert spent > 0
        watcher = Quiet()
        capped = _config(model={"scripted": "erring"}, limits={"max_turns": 5, "total_tokens": 2 * spent})
        finished = play(capped, tmp_path, url, watcher)
    assert watcher.rows == []
    assert finished.stopped_by == f"total_tokens: {2 * spent} of {2 * spent} are spent"


def test_only_notes_that_were_sent_can_fall_back(tmp_path: Path) -> None:
    # A server without the plugin, a policy that edits nothing, and one that would.
    config = _config(executions=["splice"], policies=["none", "keep_last_tool_outputs"])
    with a_server() as url:
        play(config, tmp_path, url)
    assert {row.policy: row.fallbacks for row in rows_of(tmp_path).values()} == {
        "none": {},
        "keep_last_tool_outputs": {"no_outcome": 1},
    }


def test_arguments_that_are_no_json_are_the_models_mistake(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "visit", "arguments": '{"room": '}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    with a_server(message=message) as url:
        play(_config(model={}, limits={"max_turns": 2}), tmp_path, url)
    (row,) = rows_of(tmp_path).values()
    assert (row.status, row.ended, row.turns) == ("failed", "turns", 2)
    assert row.transcript is not None
    said = json.loads((tmp_path / row.transcript).read_text())["messages"]
    (answer, *_) = [each["content"] for each in said if each["role"] == "tool"]
    assert "visit: unknown argument 'not_a_json_object'" in answer
