"""The ASGI side: a request's body within its limit, an answer's bytes as they come, and a client that leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from leyline_agent.proxy.along import AnswerReader
from leyline_agent.proxy.upstream import Headers, UpstreamResponse


class BodyTooLargeError(Exception):
    """A request's body is above the limit."""


class ClientLeftError(Exception):
    """The client has closed its connection."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return a request's body.

    Raises:
        BodyTooLargeError: it is too long; the rest of it was not read.
        ClientLeftError: it did not come to its end.
    """
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLargeError
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise BodyTooLargeError
        if not message.get("more_body", False):
            return b"".join(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; cancel it if the client leaves before it is done."""
    doing = asyncio.current_task()
    assert doing is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        doing.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        await work
    except asyncio.CancelledError:
        # Not so where the server itself is told to end.
        if not has_left:
            raise
        doing.uncancel()
    finally:
        watching.cancel()


async def relay(
    response: UpstreamResponse,
    send: Send,
    *,
    more_headers: Headers,
    reader: AnswerReader | None = None,
    on_whole: Callable[[AnswerReader], None] = lambda reader: None,
) -> None:
    """Send an answer on as it comes. `on_whole` is called before the client can know that the answer is whole.

    Raises:
        UpstreamError: the answer came to no end; the client's must not either.
    """
    start = {"type": "http.response.start", "status": response.status, "headers": response.headers + more_headers}
    await send(start)
    try:
        async for chunk in response.chunks():
            if reader is not None and reader.take(chunk):
                on_whole(reader)
                reader = None
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except asyncio.CancelledError:
        # A client may leave once it has the last words, before the end of the stream.
        if reader is not None and reader.is_finished:
            on_whole(reader)
        raise
    if reader is not None:
        on_whole(reader)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send an answer that was read before."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, status: int, kind: str, code: str, message: str) -> None:
    """Send an error of the proxy's own in the form of OpenAI's."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send_whole(send, status, headers, body)
