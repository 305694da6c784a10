"""A recorded agent, short enough for tests: each step calls one tool and reads a few lines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def write_recording(file: Path, *, steps: int = 12, lines: int = 8, calls: int = 1) -> Path:
    """Write a trajectory whose calls have the same ids in every step."""
    rng = random.Random(steps)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You read files, one at a time."},
        {"role": "user", "content": "Which file has the answer?"},
    ]
    for step in range(steps):
        names = [f"call_{number}" for number in range(calls)]
        arguments = json.dumps({"path": f"notes/{step}.txt"})
        asked = [
            {"id": name, "type": "function", "function": {"name": "read", "arguments": arguments}} for name in names
        ]
        messages.append({"role": "assistant", "content": f"Next is file {step}.", "tool_calls": asked})
        for name in names:
            text = "\n".join(" ".join(rng.choices(_WORDS, k=6)) for _ in range(lines))
            messages.append({"role": "tool", "tool_call_id": name, "content": text})
    file.write_text(json.dumps({"messages": messages}))
    return file
