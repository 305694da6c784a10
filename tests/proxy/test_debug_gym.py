from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.proxy.debug_gym import run_debug_gym
from tests.proxy.scripted import Received, Reply, ScriptedUpstream, answer_of


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "Let me see."])
def test_its_own_form_of_an_answer_that_calls_a_tool_is_recognised(
    text: str | None, upstream: ScriptedUpstream, proxy: str, tmp_path: Path
) -> None:
    """It sends a null content back as the string "None", and the arguments written anew."""

    def script(received: Received) -> Reply:
        idx = len(upstream.received)
        function = {"name": "cat", "arguments": f'{{"path":   "{idx}.py"}}'}
        call = {"id": f"call_{idx}", "type": "function", "function": function}
        return answer_of(received, text, tool_calls=[call])  # type: ignore[arg-type]

    upstream.script = script
    output: list[dict[str, Any]] = [{"role": "tool", "name": "cat", "content": "a long output\n" * 20}]
    turns: list[list[dict[str, Any]]] = [[{"role": "user", "content": "Repair it."}]]
    turns += [[{**output[0], "tool_call_id": f"call_{idx}"}] for idx in (1, 2, 3, 4)]
    answers = run_debug_gym(proxy, "m", "-", tmp_path, turns)

    assert [answer["message"]["content"] for answer in answers] == [text or "None"] * 5
    notes = [note or {} for note in upstream.notes]
    assert [note.get("base") for note in notes] == [None, *(note["turn"] for note in notes[:-1])]
    assert len({note["conversation"] for note in notes}) == 1
    assert [message["content"] for message in upstream.last.json["messages"] if message["role"] == "tool"][:2] == [
        "[gone]",
        "[gone]",
    ]
