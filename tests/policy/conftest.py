from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from leyline_agent.core.messages import Message, messages_from_openai

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(
    params=["debug_gym_astropy", "debug_gym_pandas", "openhands_ponyc", "swe_marshmallow_fc", "swe_pydicom_text"]
)
def trajectory(request: pytest.FixtureRequest) -> list[Message]:
    """A recorded conversation, from `$LEYLINE_TRAJECTORIES` or the data folder beside the checkout."""
    folder = Path(os.environ.get("LEYLINE_TRAJECTORIES", _ROOT.parent / "shared" / "data" / "trajectories"))
    file = folder / f"{request.param}.json"
    if not file.is_file():
        pytest.skip(f"no {file}; set LEYLINE_TRAJECTORIES to a folder of recorded conversations")
    return messages_from_openai(json.loads(file.read_text(encoding="utf-8"))["messages"])
