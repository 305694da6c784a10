"""A live server as the tests see it: requests with notes, rows, and the check that no slot is lost."""

from __future__ import annotations

import json
import random
import secrets
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

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


class Live:
    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=300)

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        params: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            **(sampling or {}),
        }
        if note is not None:
            params["custom_params"] = {"leyline": note if isinstance(note, str) else json.dumps(note)}
        answer = self.answer(self.http.post("/generate", json={"input_ids": ids, "sampling_params": params, **body}))
        self.assert_balanced()
        return answer

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

    def counts(self) -> dict[str, Any]:
        return self.http.post("/probe", json={}).json()

    def rows(self, ids: list[int], **namespace: Any) -> dict[str, Any]:
        """Rows of the cached prefix of `ids`; `conversation=` looks into that conversation's own namespace."""
        found = self.http.post("/probe", json={"ids": ids, **namespace}).json()
        return {**found, "rows": {int(layer): rows for layer, rows in found["rows"].items()}}

    def evict_all(self) -> None:
        """Drop every row that nobody holds, as a full pool would, while the memory of turns stays."""
        self.assert_conserved()
        self.http.post("/probe", json={"evict": True})

    def cached(self, ids: list[int], **namespace: Any) -> int:
        return len(self.rows(ids, **namespace)["slots"])

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
        """Every slot is free, evictable or protected, and nothing is protected once all requests have ended."""
        for _ in range(100):
            counts = self.counts()
            if counts["running"] == 0 and counts["protected"] == 0:
                break
            time.sleep(0.05)
        assert counts["running"] == 0, counts
        assert counts["protected"] == 0, counts
        assert counts["available"] + counts["evictable"] == counts["size"], counts
