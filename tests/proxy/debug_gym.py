"""Runs debug-gym's client in the environment that `make debug-gym` creates."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GYM_PYTHON = ROOT / ".venv-debug-gym" / "bin" / "python"


def run_debug_gym(
    proxy: str, model: str, name: str, home: Path, turns: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Take the turns of one conversation with debug-gym's client; return what it prints of each."""
    if not GYM_PYTHON.exists():
        pytest.skip("no .venv-debug-gym: `make debug-gym` creates it, with a Python 3.12")
    command = [str(GYM_PYTHON), "-m", "tests.proxy.debug_gym_client", proxy + "/v1", model, name]
    # debug-gym writes into the home folder as it is imported.
    env = {**os.environ, "HOME": str(home), "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, input=json.dumps(turns), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
