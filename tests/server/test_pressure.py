"""Requests that take each other's place: what is preempted or retracted while others edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def shared_live(serve_probed: Callable[..., AbstractContextManager[Live]]) -> Iterator[Live]:
    """A server that takes three requests at a time, and of those with a higher priority first."""
    with serve_probed(
        "--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "0", "--max-running-requests", "3"
    ) as live:
        yield live


def test_a_turn_of_higher_priority_preempts_once(live: Live) -> None:
    """It takes the slot that was freed for it, also where its R would need another one."""
    conversation, base = new_conversation(), live.ids(200, 1)
    live.generate(base, note(conversation, "1"))
    others = [live.send(live.ids(20, 2 + idx), max_new_tokens=400, priority=0) for idx in range(3)]
    live.wait_until(lambda: live.counts()["running"] == 3)
    edited = base[:50] + live.ids(3, 9) + base[60:] + [77]
    answer = live.generate(edited, note(conversation, "2", "1"), priority=10)
    assert not any(other.done() for other in others)
    assert len(answer.output_ids) == 4
    assert sum(other.result().body["meta_info"]["num_retractions"] for other in others) == 1
