"""A server that answers by script, byte for byte, over real sockets; and a proxy that runs in a thread.

It stands where a real server cannot be made to answer at will: errors, broken streams, two hundred answers at once.
`test_live.py` has the real one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from leyline_agent import Policy
from leyline_agent.core.protocol import DirectiveOutcome, Outcome, Status, outcome_header
from leyline_agent.proxy.serve import listen, make_server
from leyline_agent.proxy.settings import ProxySettings

KEY = b"a key of the tests, not a secret"
CHAT = "/v1/chat/completions"

_ending: list[tuple[threading.Thread, socket.socket]] = []


@dataclass
class Received:
    """A request as it came."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def note(self) -> dict[str, Any] | None:
        params = self.json.get("custom_params") or {}
        return json.loads(params["leyline"]) if "leyline" in params else None

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass
class Reply:
    """What to answer. A body of several parts goes out in chunks, each in a packet of its own."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    is_chunked: bool = False
    gap_s: float = 0.0
    cut_after: int | None = None
    """Close the connection after so many parts."""
    hold: threading.Event | None = None
    """Wait for it before the answer."""
    hold_after: tuple[int, threading.Event] | None = None
    """Wait for it after so many parts."""


Script = Callable[[Received], Reply]


def answer_of(received: Received, text: str = "an answer", **more: Any) -> Reply:
    """Answer as SGLang with the plugin does: an outcome for a note, streamed where that is asked for."""
    request = received.json
    headers = []
    if received.note is not None:
        headers.append(("x-leyline", outcome_header(outcome_for(received.note))))
    message = {"role": "assistant", "content": text, **more}
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 80}}
    if not request.get("stream"):
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = json.dumps({"id": "r", "object": "chat.completion", "created": 0, "choices": choices, "usage": usage})
        return Reply(headers=[*headers, ("content-type", "application/json")], parts=[body.encode()])
    return Reply(
        headers=[*headers, ("content-type", "text/event-stream")], parts=events_of(message, usage), is_chunked=True
    )


def outcome_for(note: dict[str, Any]) -> Outcome:
    if note.get("base") is None:
        return Outcome(status=Status.UNCHANGED)
    done = DirectiveOutcome(start=1, end=9, replacement_tokens=2, edit_id=f"e-{note['turn']}")
    return Outcome(status=Status.SPLICED, directives=(done,), num_directives=1, kept_tokens=7, moved_tokens=30)


def events_of(message: dict[str, Any], usage: dict[str, Any] | None = None) -> list[bytes]:
    text = message.get("content") or ""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word + " "} for word in text.split(" ")[:-1]] + [{"content": text.split(" ")[-1]}]
    for idx, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        head = {"index": idx, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": function["name"], "arguments": ""}}]})
        half = len(function["arguments"]) // 2
        for part in (function["arguments"][:half], function["arguments"][half:]):
            deltas.append({"tool_calls": [{"index": idx, "function": {"arguments": part}}]})
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    frame = {"id": "r", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    chunks: list[dict[str, Any]] = [{**frame, "choices": [choice]} for choice in choices]
    if usage is not None:
        chunks.append({**frame, "choices": [], "usage": usage})
    events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    return [b": keep-alive\n\n", *events, b"data: [DONE]\n\n"]


class ScriptedUpstream:
    """Answers each request as `script` says, and remembers it."""

    def __init__(self) -> None:
        self.script: Script = answer_of
        self.received: list[Received] = []
        self.left = threading.Event()
        """Set once a caller has left before its answer's end."""
        self.url = ""

    @property
    def last(self) -> Received:
        return self.received[-1]

    @property
    def notes(self) -> list[dict[str, Any] | None]:
        return [received.note for received in self.received]

    async def serve(self, started: Callable[[], None]) -> None:
        server = await asyncio.start_server(self._serve_connection, "127.0.0.1", 0, backlog=512)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        started()
        async with server:
            await server.serve_forever()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Cancelled at the end of the test, which asyncio would log as an error.
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while await self._answer(await _receive(reader), reader, writer):
                    pass
        finally:
            writer.close()

    async def _answer(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.received.append(received)
        reply = self.script(received)
        if not await self._wait(reply.hold, reader):
            return False
        size = [] if reply.is_chunked else [("content-length", str(sum(map(len, reply.parts))))]
        framing = [("transfer-encoding", "chunked")] if reply.is_chunked else size
        lines = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in reply.headers + framing)]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        for idx, part in enumerate(reply.parts):
            if reply.cut_after is not None and idx >= reply.cut_after:
                await writer.drain()
                return False
            if reply.hold_after is not None and idx == reply.hold_after[0]:
                await self._wait(reply.hold_after[1], reader)
            writer.write(b"%x\r\n%s\r\n" % (len(part), part) if reply.is_chunked else part)
            await asyncio.sleep(reply.gap_s)
            if self._has_left(reader):
                return False
        if reply.is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _wait(self, event: threading.Event | None, reader: asyncio.StreamReader) -> bool:
        while event is not None and not event.is_set():
            await asyncio.sleep(0.002)
            if self._has_left(reader):
                return False
        return True

    def _has_left(self, reader: asyncio.StreamReader) -> bool:
        if reader.at_eof():
            self.left.set()
            return True
        return False


async def _receive(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *fields = head.rstrip().split("\r\n")
    method, path, _ = line.split(" ", 2)
    headers = [(name, value.strip()) for name, _, value in (one.partition(":") for one in fields)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Received(method, path, headers, await reader.readexactly(length))


@contextmanager
def in_thread(main: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run a coroutine in a thread and an event loop of its own until the context ends."""
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def until_stopped() -> None:
        loops.append(asyncio.get_running_loop())
        task = asyncio.ensure_future(main(started.set))
        await stop.wait()
        task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(until_stopped(),), daemon=True)
    thread.start()
    assert started.wait(20), "the server did not start"
    try:
        yield
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def running_proxy(upstream: str, policy: Policy, **options: Any) -> Iterator[str]:
    """Run a proxy; return its address, without `/v1`."""
    given = {"key": KEY, "policy_name": "of the test", "port": 0, **options}
    settings = ProxySettings(upstream=upstream, policy=policy, **given)
    server = make_server(settings)
    listening = listen(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    host, port = listening.getsockname()[:2]
    url = f"http://{host}:{port}"
    try:
        yield url
    finally:
        # uvicorn takes a fifth of a second to end, which no test has to wait for.
        server.should_exit = True
        _ending.append((thread, listening))


def join_proxies() -> None:
    """Return when every proxy that was started has ended."""
    while _ending:
        thread, listening = _ending.pop()
        thread.join(20)
        listening.close()
        assert not thread.is_alive(), "a proxy did not end"


def stats_of(proxy: str) -> Any:
    return httpx.get(f"{proxy}/leyline/proxy/stats", trust_env=False, verify=False).json()


def agent_messages(num_turns: int, salt: str = "", answer: str = "an answer") -> list[dict[str, Any]]:
    """The history of an agent whose answers were all the same, a tool call and its output between them."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are an agent. {salt}"}]
    for idx in range(num_turns):
        if idx:
            messages.append({"role": "assistant", "content": answer})
        call = {"id": f"c{idx}", "type": "function", "function": {"name": "cat", "arguments": "{}"}}
        messages.append({"role": "user", "content": f"Look at file {idx}."})
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{idx}", "content": f"output {idx} {salt}\n" * 20})
    return messages
