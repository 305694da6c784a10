"""A served model as a benchmark sees it: requests by token ids, notes, rows, and what a row of results names.

The standard library and what SGLang itself needs, so that it runs wherever a server does. Knows `leyline_rows`'s
routes; starts no server.
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import torch

from evals.micro.result_rows import about as machine
from leyline_agent.errors import LeylineError

PATHS = ("one_step", "two_steps")

_TOKENS = (100, 2000)
"""Ids that random text is drawn from: none of them special."""
_IDLE_S = 2.0
"""A connection that was idle for longer is not used again: the server closes it after five seconds."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class BenchError(LeylineError):
    """The server did not answer as this benchmark needs it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request."""

    output_ids: list[int]
    meta_info: dict[str, Any]
    first_token_ms: float
    """From before the request was sent; equal to `ms` where it was not streamed."""
    ms: float

    @property
    def outcome(self) -> dict[str, Any]:
        """What became of the note."""
        outcome: dict[str, Any] = self.meta_info.get("leyline") or {}
        return outcome

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were served from the cache."""
        return int(self.meta_info["cached_tokens"])


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `[tokens, kv_lora_rank + qk_rope_head_dim]` of a cached prefix in two layers."""

    first: torch.Tensor
    last: torch.Tensor

    def __len__(self) -> int:
        return len(self.first)


class Server:
    """One connection for each thread that uses it; `with` closes them all."""

    def __init__(self, url: str, *, timeout_s: float = 300) -> None:
        parts = urlsplit(url)
        if parts.hostname is None:
            raise BenchError(f"--url: got {url!r}, expected something like http://127.0.0.1:30000")
        self._address = (parts.hostname, parts.port or 80)
        self.url = url
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        for connection in self._connections:
            connection.close()

    def generate(self, token_ids: Sequence[int], max_new_tokens: int, note: Any = None, **body: Any) -> Answer:
        """Send one request and wait for all of it."""
        started = time.perf_counter()
        result = self.post("/generate", _body(token_ids, max_new_tokens, note) | body)
        ms = (time.perf_counter() - started) * 1e3
        return Answer(result["output_ids"], result["meta_info"], ms, ms)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **body: Any
    ) -> list[dict[str, Any]]:
        """Send prompts in one message, so that the scheduler admits them together."""
        results: list[dict[str, Any]] = self.post("/generate", _body([*map(list, prompts)], max_new_tokens) | body)
        return results

    def stream(self, token_ids: Sequence[int], max_new_tokens: int, note: Any = None, **body: Any) -> Answer:
        """Send one request and time its first token too."""
        # Of many threads that send at once, one writes JSON at a time: it has to be fast.
        payload = orjson.dumps(_body(token_ids, max_new_tokens, note) | {"stream": True} | body)
        started = time.perf_counter()
        response = self._send("POST", "/generate", payload)
        first_ms, last = 0.0, None
        # To the end of the body, so that the connection can be used again.
        for line in response:
            if line.startswith(b"data: {"):
                first_ms = first_ms or (time.perf_counter() - started) * 1e3
                last = line
        ms = (time.perf_counter() - started) * 1e3
        if last is None:
            raise BenchError("/generate: the stream ended without a token")
        result = json.loads(last[len(b"data: ") :])
        if "error" in result:
            raise BenchError(f"/generate: {result['error']}")
        return Answer(result.get("output_ids", []), result["meta_info"], first_ms, ms)

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON answer.

        Raises:
            BenchError: the status is not 200; with the body's beginning.
        """
        return json.loads(self._send("POST", path, json.dumps(body)).read())

    def rows(self, token_ids: Sequence[int], **namespace: Any) -> Rows:
        """Read the cached prefix; `cache_salt=` or `conversation=` say where."""
        found = self.post("/bench/rows", {"ids": list(token_ids), **namespace})
        if not found["tokens"]:
            empty = torch.empty(0, found["row_width"], dtype=_DTYPES[found["dtype"]])
            return Rows(empty, empty)
        first, last = (
            torch.frombuffer(bytearray(base64.b64decode(rows)), dtype=_DTYPES[found["dtype"]]).view(
                found["tokens"], found["row_width"]
            )
            for rows in found["rows"]
        )
        return Rows(first, last)

    def check_plugin(self) -> None:
        """Raise `BenchError` unless the server can splice."""
        capabilities = json.loads(self._send("GET", "/leyline/capabilities", None).read())
        if not capabilities["supported"] or not capabilities["enabled"]:
            raise BenchError(f"this server does not splice: {capabilities['unsupported']}")

    def model_name(self) -> str:
        """Return the last part of the path or name of the model that is served."""
        path: str = json.loads(self._send("GET", "/model_info", None).read())["model_path"]
        return Path(path).name

    def state(self, *, reset: bool = False) -> dict[str, Any]:
        """Return slots by state, the pool's shape, and what was counted since the last reset."""
        state: dict[str, Any] = self.post("/bench/state", {"reset": reset})
        return state

    def balance(self, *, timeout_s: float = 10) -> dict[str, Any]:
        """Wait until nothing runs; return the slots that are unaccounted for (`lost`) beside the state."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state()
            lost = state["size"] - state["available"] - state["evictable"] - state["protected"]
            if (not state["running"] and not lost and not state["protected"]) or time.monotonic() > deadline:
                return {**state, "lost": lost}
            time.sleep(0.05)

    def flush(self, *, timeout_s: float = 10) -> None:
        """Empty the cache, and with it the memory of conversations, as soon as nothing runs."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._send("POST", "/flush_cache", None).read()
                return
            except BenchError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def take_path(self, path: str) -> None:
        """Have R computed in the batch of its request (`one_step`), or before it (`two_steps`).

        Raises:
            BenchError: the server cannot do it in one step.
        """
        wanted = path == "one_step"
        if self.post("/bench/path", {"one_step": wanted})["one_step"] != wanted:
            raise BenchError(f"{path}: this server cannot; /leyline/capabilities says why")

    def each_path(self, paths: Sequence[str] | None) -> Iterator[str | None]:
        """Take one path after the other, and at the end the one that it was; None stays with that."""
        before = PATHS[0] if self.state()["one_step"] else PATHS[1]
        try:
            chosen: Sequence[str | None] = paths or (None,)
            for path in chosen:
                if path:
                    self.take_path(path)
                yield path
        finally:
            if paths:
                self.take_path(before)

    def is_healthy(self) -> bool:
        """Whether the server still generates."""
        try:
            self._send("GET", "/health", None).read()
        except (BenchError, OSError, http.client.HTTPException):
            return False
        return True

    def _send(self, method: str, path: str, payload: str | bytes | None) -> http.client.HTTPResponse:
        local = self._local
        connection: http.client.HTTPConnection | None = getattr(local, "connection", None)
        if connection is None or time.monotonic() - local.used > _IDLE_S:
            if connection is not None:
                connection.close()
            connection = local.connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
            self._connections.append(connection)
        local.used = time.monotonic()
        try:
            connection.request(method, path, payload, {"content-type": "application/json"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException):
            # Never sent again: a noted request has effects. The next one gets a fresh connection.
            connection.close()
            local.connection = None
            raise
        if response.status != 200:
            raise BenchError(f"{path}: HTTP {response.status}: {response.read()[:500].decode(errors='replace')}")
        return response


@dataclass
class Talk:
    """A conversation: what was last sent and answered, and the ids of the edits that it made."""

    server: Server
    prompt: list[int]
    """The last prompt with its answer."""
    conversation_id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    num_turns: int = 0
    edit_ids: list[str] = field(default_factory=list)

    def turn(self, prompt: Sequence[int], max_new_tokens: int = 1, *, stream: bool = False, **note: Any) -> Answer:
        """Send the next prompt as a turn whose base is the last one."""
        whole = {"v": 1, "conversation": self.conversation_id, "turn": str(self.num_turns), "gate": "off", **note}
        if self.num_turns:
            whole["base"] = str(self.num_turns - 1)
        send = self.server.stream if stream else self.server.generate
        answer = send(prompt, max_new_tokens, whole)
        if not answer.outcome:
            raise BenchError("the answer has no outcome: this server has no Leyline plugin")
        self.num_turns += 1
        self.prompt = [*prompt, *answer.output_ids]
        self.edit_ids += [d["edit_id"] for d in answer.outcome["directives"] if d.get("edit_id")]
        return answer

    def release(self) -> None:
        """Give back what the server has cached of it in its own namespace."""
        self.server.post("/leyline/release", {"v": 1, "conversation": self.conversation_id})


def fresh(rng: random.Random, num_tokens: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(*_TOKENS) for _ in range(num_tokens)]


def about(server: Server, arguments: Sequence[str], module: str, *, commit: str | None, seed: int) -> dict[str, Any]:
    """Return what every row of results names: command, hardware, versions, the pool, and any fault switched on."""
    server.check_plugin()
    state = server.state()
    names = ("device", "dtype", "layers", "kv_lora_rank", "qk_rope_head_dim", "overlap", "fault", "one_step")
    return {
        **{name: state[name] for name in names},
        **machine(commit, " ".join(["python -m", module, *arguments])),
        "seed": seed,
    }


def append_row(path: Path | None, row: dict[str, Any]) -> None:
    """Write a row at once, so that a run which is cut keeps what it has; to standard output where there is no path."""
    line = json.dumps(row)
    if path is None:
        print(line, flush=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")


def problems_in(log: Path | None, *, start: int = 0) -> list[str]:
    """Return lines of a server's log that tell of an error, from byte `start` on; none where there is no log."""
    if log is None:
        return []
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    return [line[:300] for line in lines if re.search(r"Traceback|\bERROR\b|leyline: .*failed", line)]


def say(name: str, text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {name}: {text}", file=sys.stderr, flush=True)


def _body(token_ids: Any, max_new_tokens: int, note: Any = None) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    if note is not None:
        params["custom_params"] = {"leyline": json.dumps(note)}
    return {"input_ids": list(token_ids), "sampling_params": params}
