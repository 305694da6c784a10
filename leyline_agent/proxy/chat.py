"""`/v1/chat/completions`: a turn of a conversation, with the note, and without it where the upstream takes none."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from weakref import WeakValueDictionary

from starlette.types import Receive, Scope, Send

from leyline_agent.core.protocol import CONVERSATION_HEADER, OUTCOME_HEADER
from leyline_agent.noted_server import RETRY_S, NotedServer
from leyline_agent.proxy.along import AnswerReader
from leyline_agent.proxy.relay import relay, send_whole, while_connected
from leyline_agent.proxy.stats import Stats
from leyline_agent.proxy.turns import Turn, Turns, UneditedError
from leyline_agent.proxy.upstream import (
    Headers,
    Upstream,
    UpstreamError,
    UpstreamResponse,
    end_to_end,
    with_headers,
    without_headers,
)

_CREDENTIALS = (b"authorization", b"api-key", b"x-api-key")
# A shorter request is read and edited within a millisecond or two, about what a thread costs beside the event loop; one
# of two thousand empty messages in 14.
_INLINE_BYTES = 32 << 10
# They share one interpreter; several, so that a long history does not hold up the short ones behind it.
_NUM_THREADS = 4
_UNREAD_REQUEST = (400, 422)


def unedited_header(reason: str) -> Headers:
    """Return the header that tells a client that its request went through as it came."""
    return [(b"x-leyline-proxy", f"unedited: {reason}".encode("ascii"))]


class Chat:
    """Answers chat requests."""

    def __init__(self, turns: Turns, upstream: Upstream, stats: Stats) -> None:
        self._turns, self._upstream, self._stats = turns, upstream, stats
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="leyline-edit")
        self._free_threads = asyncio.Semaphore(_NUM_THREADS)
        # By API key: its long requests are edited one after another, so that those of others find a free thread.
        self._editing: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self.notes = NotedServer()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)

    async def answer(self, scope: Scope, receive: Receive, send: Send, path: str, raw: bytes) -> None:
        """Answer one request, unless its client leaves.

        Raises:
            UpstreamError: nothing, or not all, was answered.
        """
        self._stats.requests += 1
        await while_connected(receive, self._answer(scope, send, path, raw))

    async def _answer(self, scope: Scope, send: Send, path: str, raw: bytes) -> None:
        headers = end_to_end(scope["headers"])
        given = dict(headers)
        name = dict(scope["headers"]).get(CONVERSATION_HEADER.encode(), b"").strip() or None
        credentials = tuple(given.get(header, b"") for header in _CREDENTIALS)
        try:
            if b"content-encoding" in given:
                raise UneditedError("encoded")
            turn = await self._begin(raw, credentials, name)
        except UneditedError as unedited:
            reason = unedited.reason
            self._stats.add_unedited(
                reason, "a chat request goes through unedited (%s); further ones are counted, see docs/proxy.md", reason
            )
            await self._pass_on(path, headers, raw, send, reason)
            return
        # So that the answer can be read along.
        headers = [*without_headers(headers, b"accept-encoding"), (b"accept-encoding", b"identity")]
        headers = with_headers(headers, turn.prepared.headers)
        try:
            await self._take_turn(turn, path, headers, send)
        finally:
            self._turns.abandon(turn)

    async def _pass_on(self, path: str, headers: Headers, raw: bytes, send: Send, reason: str) -> None:
        async with self._upstream.send("POST", path, headers, raw) as response:
            await relay(response, send, more_headers=unedited_header(reason))

    async def _take_turn(self, turn: Turn, path: str, headers: Headers, send: Send) -> None:
        if not turn.has_note or not self.notes.takes_notes:
            if turn.has_note:
                self._stats.without_note[self.notes.state] += 1
            async with self._upstream.send("POST", path, headers, turn.plain_body) as response:
                await self._relay(turn, response, send, note_was_sent=False)
            return
        async with self._upstream.send("POST", path, headers, turn.noted_body) as response:
            if response.status not in _UNREAD_REQUEST:
                await self._relay(turn, response, send, note_was_sent=True)
                return
            refusal = response
            body = await response.read()
        has_outcome = refusal.header(OUTCOME_HEADER) is not None
        if has_outcome:
            self.notes.add_taken(has_outcome=True)
        if has_outcome or not self.notes.may_be_refused(body):
            self._turns.abandon(turn)
            await send_whole(send, refusal.status, refusal.headers, body)
            return
        await self._send_without_note(turn, path, headers, send, refusal, body)

    async def _send_without_note(
        self, turn: Turn, path: str, headers: Headers, send: Send, refusal: UpstreamResponse, body: bytes
    ) -> None:
        """Send the turn again, once. Whatever it is answered now is about the client's own request."""
        has_started = False
        try:
            async with self._upstream.send("POST", path, headers, turn.plain_body) as response:
                has_started = True
                if response.status < 400:
                    self._stats.without_note["refused"] += 1
                if response.status < 400 and self.notes.add_refused():
                    self._stats.tell_once(
                        "notes refused",
                        "the upstream refuses the field custom_params (it answered %d): the policy alone is applied, "
                        "and no note is sent for %.0f minutes, then one to see whether that has changed",
                        refusal.status,
                        RETRY_S / 60,
                    )
                await self._relay(turn, response, send, note_was_sent=False)
        except UpstreamError:
            if has_started:
                raise
            self._turns.abandon(turn)
            await send_whole(send, refusal.status, refusal.headers, body)

    async def _relay(self, turn: Turn, response: UpstreamResponse, send: Send, *, note_was_sent: bool) -> None:
        if not 200 <= response.status < 300:
            # First, since the client may send the turn again as soon as it knows.
            self._turns.abandon(turn)
            await relay(response, send, more_headers=[])
            return
        names = ("content-type", "content-encoding", "content-length", "x-leyline")
        reader = AnswerReader({name: value for name in names if (value := response.header(name)) is not None})

        def commit(reader: AnswerReader) -> None:
            reply = reader.reply()
            has_outcome = None if reply is None else reply.outcome is not None
            if note_was_sent and self.notes.add_taken(has_outcome=has_outcome):
                words = "the upstream ignores notes: none is sent for %.0f minutes, then one to see"
                self._stats.tell_once("notes ignored", words, RETRY_S / 60)
            if reply is None:
                self._stats.unread_answers += 1
                self._turns.abandon(turn)
                return
            self._turns.commit(turn, reply, note_was_sent=note_was_sent)

        await relay(response, send, more_headers=[], reader=reader, on_whole=commit)

    async def _begin(self, raw: bytes, credentials: tuple[bytes, ...], name: bytes | None) -> Turn:
        """Read and edit a request: a long one in a thread, one at a time of an API key."""
        if len(raw) <= _INLINE_BYTES:
            return self._turns.begin(raw, credentials, name)
        scope = self._turns.recogniser.scope(credentials)
        async with self._editing.setdefault(scope, asyncio.Lock()), self._free_threads:
            # Lets a client that has left be noticed before any work is done for it.
            await asyncio.sleep(0)
            job = asyncio.get_running_loop().run_in_executor(self._threads, self._turns.begin, raw, credentials, name)
            try:
                return await asyncio.shield(job)
            except asyncio.CancelledError:
                # A thread cannot be stopped: the client has left, and the next one waits for its end all the same.
                with suppress(UneditedError):
                    self._turns.abandon(await job)
                raise
