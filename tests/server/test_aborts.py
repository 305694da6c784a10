"""A caller who leaves or is aborted in the middle of a splice: nothing leaks, nobody gets another's answer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import suppress

import httpx
import pytest

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang

LONG_R = 1500
"""Long enough a replacement that its prefill is still running when the abort comes."""


def _params(their_note: dict[str, object], max_new_tokens: int) -> dict[str, object]:
    return {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
        "custom_params": {"leyline": json.dumps(their_note)},
    }


def test_an_abort_during_the_prefill_of_r_is_not_lost(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(300, 1)
    live.generate(base, note(conversation, "1"))
    edited = base[:100] + live.ids(LONG_R, 2) + base[120:] + live.ids(4, 3)
    answers: list[httpx.Response] = []
    body = {"input_ids": edited, "rid": "mine", "sampling_params": _params(note(conversation, "2", "1"), 2000)}
    thread = threading.Thread(target=lambda: answers.append(live.http.post("/generate", json=body)))
    thread.start()
    while live.counts()["running"] == 0:
        time.sleep(0.002)
    live.http.post("/abort_request", json={"rid": "mine"})
    thread.join(timeout=60)
    assert not thread.is_alive(), "the abort was lost and 2,000 tokens are being generated"
    meta = answers[0].json().get("meta_info", {})
    assert answers[0].status_code != 200 or meta["finish_reason"]["type"] == "abort", meta
    assert len(answers[0].json().get("output_ids", [])) < 1000
    live.assert_conserved()
    later = live.generate(base[:20] + base[90:] + [77], note(conversation, "3", "1"))
    assert later.outcome is not None
    assert later.outcome["status"] == "spliced"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_callers_who_leave_at_any_moment(live: Live, stream: bool) -> None:
    """Thirty edits are cut off after 1 to 60 ms, others run on beside them; each gets its own answer."""
    conversation, base = new_conversation(), live.ids(300, 4)
    live.generate(base, note(conversation, "1"))

    async def leave(client: httpx.AsyncClient, idx: int) -> None:
        edited = base[: 50 + idx] + live.ids(40, 10 + idx) + base[100 + idx :]
        body = {
            "input_ids": edited,
            "stream": stream,
            "sampling_params": _params(note(conversation, f"cut {idx % 4}", "1"), 50),
        }
        with suppress(TimeoutError, httpx.HTTPError):
            await asyncio.wait_for(client.post("/generate", json=body), 0.001 + 0.002 * idx)

    async def stay(client: httpx.AsyncClient, idx: int) -> tuple[str, int]:
        own, mine = new_conversation(), live.ids(200, 100 + idx)
        first = {"input_ids": mine, "sampling_params": _params(note(own, "1"), 4)}
        await client.post("/generate", json=first)
        edited = mine[:30] + mine[60 + idx :] + [77]
        second = {"input_ids": edited, "sampling_params": _params(note(own, "2", "1"), 4)}
        response = await client.post("/generate", json=second)
        outcome = json.loads(response.headers["x-leyline"])
        return outcome["status"], outcome["moved_tokens"] - (200 - 60 - idx)

    async def run() -> list[tuple[str, int]]:
        async with httpx.AsyncClient(base_url=live.url, timeout=120) as client:
            leaving = [leave(client, idx) for idx in range(30)]
            staying = [stay(client, idx) for idx in range(6)]
            return (await asyncio.gather(*leaving, *staying))[30:]  # type: ignore[return-value]

    assert asyncio.run(run()) == [("spliced", 0)] * 6
    live.assert_conserved()
    again = live.generate(base[:20] + base[90:] + [77], note(conversation, "3", "1"))
    assert again.outcome is not None
    assert again.outcome["status"] == "spliced"


def test_the_same_turn_twice_at_once(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(300, 5)
    live.generate(base, note(conversation, "1"))
    edited = base[:20] + live.ids(10, 6) + base[90:] + [77]
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(live.generate(edited, note(conversation, "2", "1"))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {result.outcome["status"] for result in results if result.outcome} == {"spliced"}
    assert sum(result.outcome.get("moved_tokens", 0) for result in results if result.outcome) == 210
    assert len({tuple(result.output_ids) for result in results}) == 1
