"""A live server as the tests see it: requests with notes, rows, faults at a chosen moment, and what must never leak."""

from __future__ import annotations

import http.client
import json
import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import httpx

from leyline_agent.core.protocol import CONVERSATION_HEADER

FIRST_ID = 10
"""Ids below are special tokens."""


def new_conversation() -> str:
    return secrets.token_urlsafe(24)


def note(conversation: str, turn: str, base: str | None = None, **more: Any) -> dict[str, Any]:
    return {"v": 1, "conversation": conversation, "turn": turn, **({"base": base} if base else {}), **more}


@dataclass
class Answer:
    status_code: int
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    outcome: dict[str, Any] | None
    body: Any = field(repr=False)


@dataclass(frozen=True)
class CachedToken:
    """One token in the tree, without its slot."""

    previous_slot: int
    """-1 for the first token of a sequence."""
    position: int
    num_locks: int
    """The Rust core tells only whether there is any."""
    key: tuple[str | None, str | None, int] | None
    """extra_key, cache_salt and token id; the Rust core does not tell."""
    row: str
    """A digest of the row in all layers."""


@dataclass(frozen=True)
class Snapshot:
    """All that a server has cached. Equal to another one iff tree, slots, locks and rows are the same."""

    counts: dict[str, int]
    free: str
    """A digest of the free slots."""
    cached: dict[int, CachedToken]
    """By slot. Where the tree has split its nodes does not show."""

    def namespaces(self) -> set[tuple[str | None, str | None]]:
        """What the Python core has keys of: pairs of extra_key and cache_salt."""
        return {token.key[:2] for token in self.cached.values() if token.key is not None}


class Live:
    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=300)
        self._threads = ThreadPoolExecutor(16)

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()
        self.http.close()

    def ids(self, count: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(FIRST_ID, 2000) for _ in range(count)]

    def generate(
        self,
        ids: list[int],
        note: Any = None,
        *,
        max_new_tokens: int = 4,
        sampling: dict[str, Any] | None = None,
        **body: Any,
    ) -> Answer:
        params = {"max_new_tokens": max_new_tokens, **(sampling or {})}
        answer = self.answer(self.http.post("/generate", json=self.body(ids, note, sampling=params, **body)))
        self.assert_balanced()
        return answer

    def body(
        self, ids: list[int], note: Any = None, *, sampling: dict[str, Any] | None = None, **body: Any
    ) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, **(sampling or {})}
        if note is not None:
            params["custom_params"] = {"leyline": note if isinstance(note, str) else json.dumps(note)}
        return {"input_ids": ids, "sampling_params": params, **body}

    def send(self, ids: list[int], note: Any = None, **more: Any) -> Future[Answer]:
        """As `generate`, in a thread."""
        return self._threads.submit(self.generate, ids, note, **more)

    @contextmanager
    def caller(self, ids: list[int], note: Any = None, **more: Any) -> Iterator[None]:
        """Send a request as a caller who leaves, without an answer, as the context ends."""
        url = httpx.URL(self.url)
        connection = http.client.HTTPConnection(url.host, url.port)
        body = json.dumps(self.body(ids, note, **more))
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        try:
            yield
        finally:
            connection.close()

    @contextmanager
    def stopped(self, point: str, *, skip: int = 0) -> Iterator[Stop]:
        """Stop the next request that comes to a point of the probe's (`_Pauses`) until the context ends."""
        stop = Stop(self, point)
        self.http.post("/probe", json={"pause": point, "skip": skip}).raise_for_status()
        try:
            yield stop
        finally:
            stop.let_go()

    def answer(self, response: httpx.Response) -> Answer:
        body = response.json()
        header = response.headers.get("x-leyline")
        meta = body.get("meta_info", {}) if isinstance(body, dict) else {}
        return Answer(
            response.status_code,
            body.get("output_ids", []) if isinstance(body, dict) else [],
            meta.get("prompt_tokens", 0),
            meta.get("cached_tokens", 0),
            json.loads(header) if header else None,
            body,
        )

    def flush(self) -> None:
        for _ in range(100):
            if self.http.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.05)
        raise AssertionError("the cache could not be flushed: requests never ended")

    def state(self, conversation: str) -> dict[str, Any]:
        """What the server tells of a conversation."""
        response = self.http.get("/leyline/conversation", headers={CONVERSATION_HEADER: conversation})
        response.raise_for_status()
        return response.json()

    def turn(self, conversation: str, turn: str) -> dict[str, Any]:
        """What it tells of a remembered turn."""
        (found,) = (known for known in self.state(conversation)["turns"] if known["turn"] == turn)
        return found

    def counts(self) -> dict[str, Any]:
        return self.http.post("/probe", json={}).json()

    def rows(self, ids: list[int], **namespace: Any) -> dict[str, Any]:
        """Rows of the cached prefix of `ids`; `conversation=` looks into that conversation's own namespace."""
        found = self.http.post("/probe", json={"ids": ids, **namespace}).json()
        return {**found, "rows": {int(layer): rows for layer, rows in found["rows"].items()}}

    def evict_all(self) -> None:
        """Drop every row that nobody holds, as a full pool would, while the memory of turns stays."""
        self.assert_conserved()
        self._probe("evict")

    def evict(self, ids: list[int], from_token: int, **namespace: Any) -> None:
        """Drop the end of one cached sequence."""
        evicted = self._probe("evict", ids=ids, from_token=from_token, **namespace)["evicted"]
        assert evicted, "nothing was evicted: the sequence is not cached, held, or gone on from"

    @contextmanager
    def locked(self, ids: list[int], **namespace: Any) -> Iterator[None]:
        """Hold a cached sequence as a running request would."""
        self._probe("lock", ids=ids, **namespace)
        try:
            yield
        finally:
            self._probe("unlock")

    def break_kernel(self, *, skip: int = 0) -> None:
        """Have the next copy of rows fail half-way, after `skip` that do not."""
        self._probe("break_kernel", skip=skip)

    def snapshot(self) -> Snapshot:
        found = self._probe("snapshot")
        cached = {int(slot): CachedToken(*token) for slot, token in found["cached"].items()}
        cached = {slot: replace(token, key=token.key and tuple(token.key)) for slot, token in cached.items()}
        return Snapshot(found["counts"], found["free"], cached)

    def _probe(self, do: str, **what: Any) -> Any:
        response = self.http.post("/probe", json={"do": do, **what})
        response.raise_for_status()
        return response.json()

    def cached(self, ids: list[int], **namespace: Any) -> int:
        return len(self.rows(ids, **namespace)["slots"])

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return when something has come about."""
        for _ in range(1000):
            if holds():
                return
            time.sleep(0.02)
        raise AssertionError("it did not come about")

    def assert_balanced(self) -> None:
        """After any call: every slot is free, evictable or protected, unless other requests hold some right now."""
        for _ in range(100):
            counts = self.counts()
            if counts["running"] or counts["available"] + counts["evictable"] + counts["protected"] == counts["size"]:
                return
            # Between two states of a batch a request's slots are in none of the three.
            time.sleep(0.02)
        raise AssertionError(f"slots are lost: {counts}")

    def assert_conserved(self) -> None:
        """Once all requests have ended every slot is free or evictable, and none of them has left anything behind."""
        left = ("running", "protected", "announced", "requests", "edited_requests", "messages", "locks")
        for _ in range(200):
            counts = self.counts()
            if not any(counts[name] for name in left):
                break
            time.sleep(0.05)
        assert {name: counts[name] for name in left} == dict.fromkeys(left, 0), counts
        assert counts["available"] + counts["evictable"] == counts["size"], counts


@dataclass
class Stop:
    """A place where the next request stops."""

    _live: Live
    _point: str
    _is_over: bool = False

    def wait(self) -> None:
        """Return when a request has come here."""
        response = self._live.http.post("/probe", json={"wait": self._point, "timeout_s": 60})
        assert response.json() is True, f"no request came to {self._point!r}"

    def let_go(self) -> None:
        """Let the request go on."""
        if not self._is_over:
            self._is_over = True
            # A server that was killed meanwhile holds nobody up.
            with suppress(httpx.TransportError):
                self._live.http.post("/probe", json={"resume": self._point}).raise_for_status()
