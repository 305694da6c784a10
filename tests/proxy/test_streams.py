"""Two hundred answers at once: none lost, none mixed up, every byte the upstream's. Times are the benchmark's."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from leyline_agent.core.protocol import outcome_header
from tests.proxy.scripted import (
    CHAT,
    Received,
    Reply,
    ScriptedUpstream,
    agent_messages,
    events_of,
    outcome_for,
    stats_of,
)

NUM_STREAMS = 200
NUM_TURNS = 3


def _reply(received: Received) -> Reply:
    """Answer with events that no other stream has, cut into packets anywhere."""
    name, turn = received.header("x-stream"), received.header("x-turn")
    rng = random.Random(f"{name} {turn}")
    words = " ".join(f"{name}-{turn}-{rng.randrange(1 << 30)}-é" for _ in range(rng.randrange(5, 25)))
    whole = b"".join(events_of({"role": "assistant", "content": words}))
    cuts = sorted(rng.sample(range(1, len(whole)), 20))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    headers = [("content-type", "text/event-stream"), ("x-to", f"{name} {turn}")]
    if received.body and received.note is not None:
        headers.append(("x-leyline", outcome_header(outcome_for(received.note))))
    return Reply(headers=headers, parts=parts, is_chunked=True, gap_s=rng.random() / 50)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["header", "prefix"])
def test_two_hundred_streams_at_once(by: str, upstream: ScriptedUpstream, start_proxy: Callable[..., str]) -> None:
    upstream.script = _reply
    proxy = start_proxy()

    async def run(session: aiohttp.ClientSession, idx: int) -> None:
        # With a prefix, half of the agents have an opening that others have too.
        messages = agent_messages(3, "shared" if by == "prefix" and idx % 2 else str(idx))
        for turn in range(NUM_TURNS):
            headers = {"x-stream": str(idx), "x-turn": str(turn)}
            if by == "header":
                headers["x-leyline-conversation"] = str(idx)
            body = {"model": "m", "stream": True, "messages": messages}
            async with session.post(proxy + CHAT, json=body, headers=headers) as response:
                got = await response.read()
                assert response.headers["x-to"] == f"{idx} {turn}"
            assert got == b"".join(_reply(Received("POST", CHAT, list(headers.items()), b"")).parts)
            said = "".join(
                choice["delta"].get("content", "")
                for line in got.decode().splitlines()
                if line.startswith("data: {")
                for choice in json.loads(line[6:])["choices"]
            )
            messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": f"on {turn}"}]

    async def run_all() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(run(session, idx) for idx in range(NUM_STREAMS)))

    asyncio.run(run_all())

    assert len(upstream.received) == NUM_STREAMS * NUM_TURNS
    turns: dict[str | None, list[Any]] = defaultdict(list)
    for received in upstream.received:
        turns[received.header("x-stream")].append(received.note or {})
    # Each agent's turns are one conversation, and each turn's base is the one before it.
    for of_one in turns.values():
        assert len({note["conversation"] for note in of_one}) == 1
        assert [note.get("base") for note in of_one] == [None, *(note["turn"] for note in of_one[:-1])]
    assert len({of_one[0]["conversation"] for of_one in turns.values()}) == NUM_STREAMS
    stats = stats_of(proxy)
    assert (stats["totals"]["turns"], stats["failures"]) == (NUM_STREAMS * NUM_TURNS, {})
