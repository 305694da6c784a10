from __future__ import annotations

import json

import pytest

from leyline_agent.core.messages import Message, messages_from_openai

from ..recordings import recording


@pytest.fixture(
    params=["debug_gym_astropy", "debug_gym_pandas", "openhands_ponyc", "swe_marshmallow_fc", "swe_pydicom_text"]
)
def trajectory(request: pytest.FixtureRequest) -> list[Message]:
    """A recorded conversation."""
    return messages_from_openai(json.loads(recording(request.param).read_text(encoding="utf-8"))["messages"])
