from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evals.replay import record as recording
from evals.replay.debugging_session import STEPS
from evals.replay.record import BROKEN_PACKAGE, DEMO_TRAJECTORY, Workbench, record


@pytest.fixture
def workbench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def test_the_package_is_broken(workbench: Workbench) -> None:
    assert re.search(r"\d\d failed, \d\d passed", workbench.run("pytest", {"arguments": "--tb=no"}))


def test_tools_work_on_a_copy(workbench: Workbench) -> None:
    before = (BROKEN_PACKAGE / "stockroom" / "errors.py").read_text()
    edited = workbench.run("edit", {"path": "stockroom/errors.py", "old": "OutOfStock", "new": "SoldOut"})
    assert edited == "edited stockroom/errors.py at line 20: 1 -> 1 lines"
    assert "SoldOut" in workbench.run("grep", {"pattern": "SoldOut", "paths": "stockroom/*.py"})
    assert (BROKEN_PACKAGE / "stockroom" / "errors.py").read_text() == before


def test_an_edit_that_does_not_match_changes_nothing(workbench: Workbench) -> None:
    before = workbench.run("cat", {"path": "stockroom/errors.py"})
    refused = workbench.run("edit", {"path": "stockroom/errors.py", "old": "no such text", "new": "x"})
    assert refused.startswith("error: the text to replace occurs 0 times")
    assert workbench.run("cat", {"path": "stockroom/errors.py"}) == before


def test_failures_show_their_exit_code(workbench: Workbench) -> None:
    assert workbench.run("cat", {"path": "none"}).endswith("[exit code 1]")


def test_a_tool_that_hangs_is_stopped(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "TOOL_TIMEOUT_S", 0.3)
    assert workbench.run("python", {"code": "import time; time.sleep(60)"}) == "[stopped after 0 s]"


def _shape(trajectory: dict[str, Any]) -> list[tuple[Any, ...]]:
    """All but what the machine adds: outputs are compared by their number of lines."""
    return [
        (message["role"], len(message["content"].splitlines()))
        if message["role"] == "tool"
        else (message["role"], message["content"], json.dumps(message.get("tool_calls")))
        for message in trajectory["messages"]
    ]


def test_recording_again_gives_the_committed_trajectory() -> None:
    recorded = record()
    assert _shape(recorded) == _shape(json.loads(DEMO_TRAJECTORY.read_text()))
    assert len(STEPS) >= 50
