"""Recorded trajectories, not in the repository: tests that need them skip, and say so, where there are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data" / "trajectories"
RECORDINGS = Path(os.environ.get("LEYLINE_TRAJECTORIES", _BESIDE))


def recording(name: str) -> Path:
    """Return the file of a recording, or skip the test."""
    file = RECORDINGS / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"no {file.name}; set LEYLINE_TRAJECTORIES to a folder of recorded conversations")
    return file
