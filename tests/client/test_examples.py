from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import httpx

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "stale_tool_calls.py"


def test_stale_tool_calls_are_stubbed_and_stay_so(server: Any, capsys: Any) -> None:
    example = runpy.run_path(str(EXAMPLE))
    conversation = example["main"]("http://server", num_turns=3, transport=httpx.MockTransport(server))
    results = [[m["content"][:1] for m in body["messages"] if m["role"] == "tool"] for body in server.bodies]
    assert results == [["c"], ["[", "c"], ["[", "[", "c"]]
    assert [note.get("mode", "amortize") for note in server.notes] == ["amortize"] * 3
    assert conversation.telemetry.turns == 3
    assert "turn 2: unchanged" in capsys.readouterr().out
