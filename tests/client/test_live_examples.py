"""The examples of the docs that need a server, against a real one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from evals.serving import RunningServer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = pytest.mark.sglang


def test_the_openai_package_is_spliced(cpu_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "openai_agent.py"))
    conversation = example["main"](cpu_server.url, EXAMPLES.parents[1] / "leyline_agent" / "core")
    # Of six files the outputs of the last two stay, so each of the last four turns replaces one.
    assert conversation.telemetry.splices == 4
    assert not conversation.telemetry.fallbacks
    assert conversation.telemetry.moved_tokens > 0
    assert "hit rate: " in capsys.readouterr().out
