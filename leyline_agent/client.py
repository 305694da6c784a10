"""Chat requests of a conversation over HTTP, sync and async: the note in, the outcome out, one request a turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx

from leyline_agent.answers import ChatReply, StreamedAnswer, read_reply
from leyline_agent.conversation import Conversation
from leyline_agent.core.protocol import ConversationState, ReleaseReply, SpliceReply, SpliceRequest
from leyline_agent.errors import SpliceTransportError
from leyline_agent.plugin_routes import (
    CAPABILITIES,
    CONVERSATION,
    RELEASE,
    SPLICE,
    checked,
    json_of,
    read_capabilities,
    read_plugin_reply,
    release_arguments,
    splice_arguments,
    state_arguments,
)
from leyline_agent.prepared_turn import PreparedTurn
from leyline_agent.telemetry import raise_fallback
from leyline_agent.tokenizers import server_root

_CHAT = "/v1/chat/completions"


class ChatStream:
    """A streamed turn: iterate over its chunks; when they end, `reply` is the whole answer and the turn is committed.

    Breaking off leaves the turn unanswered: the next one is compared with the turn before.
    """

    def __init__(self, response: httpx.Response, conversation: Conversation, prepared: PreparedTurn, strict: bool):
        self._response, self._conversation = response, conversation
        self._prepared, self._strict = prepared, strict
        self._answer = StreamedAnswer(response.headers)
        self.outcome = self._answer.outcome
        """Known before the first chunk."""
        self.reply: ChatReply | None = None

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        try:
            for line in self._response.iter_lines():
                if (chunk := self._answer.add_line(line)) is not None:
                    yield chunk
        except httpx.HTTPError as error:
            raise _unreachable("POST", _CHAT, error) from error
        self._end()

    async def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]:
        try:
            async for line in self._response.aiter_lines():
                if (chunk := self._answer.add_line(line)) is not None:
                    yield chunk
        except httpx.HTTPError as error:
            raise _unreachable("POST", _CHAT, error) from error
        self._end()

    def _end(self) -> None:
        if not self._answer.finished:
            raise SpliceTransportError("the stream ended before the answer did; send the turn again")
        self.reply = self._answer.reply()
        _commit(self._conversation, self._prepared, self.reply, self._strict)


class Client:
    """A connection to a server, for any number of conversations and threads.

    Args:
        base_url: the server's root, with or without `/v1`.
        api_key: sent as a bearer token.
        timeout: seconds, or an `httpx.Timeout`.
        transport: for tests and special networks.
        strict: raise where a note was not wholly carried out; the answer is in `Conversation.last_answer` then.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 600.0,
        transport: httpx.BaseTransport | None = None,
        strict: bool = False,
    ) -> None:
        self._http = httpx.Client(
            base_url=server_root(base_url), headers=_auth(api_key), timeout=timeout, transport=transport
        )
        self._strict = strict

    def chat(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], **body: Any) -> ChatReply:
        """Send one turn and return its answer. `body` holds the other fields of the chat request, `model` among them.

        Raises:
            SpliceTransportError: no readable answer came; the turn may be sent again.
            SpliceRejectedError: with `strict`, the splice was refused.
            UnsupportedServerError: with `strict`, the server runs no plugin.
        """
        prepared = conversation.prepare(_chat_body(messages, body))
        response = self._send("POST", _CHAT, json=prepared.body, headers=prepared.headers)
        reply = read_reply(checked(response).headers, json_of(response))
        _commit(conversation, prepared, reply, self._strict)
        return reply

    @contextmanager
    def stream(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], **body: Any
    ) -> Iterator[ChatStream]:
        """Send one turn and stream its answer. Raises as `chat`, partly while the chunks are read."""
        prepared = conversation.prepare({**_chat_body(messages, body), "stream": True})
        with ExitStack() as stack:
            # Not around the yield: an error of httpx in the caller's own block is the caller's.
            try:
                request = self._http.stream("POST", _CHAT, json=prepared.body, headers=prepared.headers)
                response = stack.enter_context(request)
                if response.is_error:
                    response.read()
            except httpx.HTTPError as error:
                raise _unreachable("POST", _CHAT, error) from error
            yield ChatStream(checked(response), conversation, prepared, self._strict)

    def splice(self, request: SpliceRequest) -> SpliceReply:
        """Carry out explicit directives outside of a turn.

        Raises:
            SpliceRejectedError: the server refused, with its reason.
            UnsupportedServerError: the server has no such route.
            SpliceTransportError: no readable answer came.
        """
        return read_plugin_reply(SpliceReply, self._send("POST", SPLICE, **splice_arguments(request)))

    def release(
        self,
        conversation: Conversation | str,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        scrub: bool = False,
    ) -> ReleaseReply:
        """Free the namespace that a conversation has on the server, and have its turns forgotten there.

        The conversation may go on; its next turn is prefilled as a first one is. This is no forget: what it has in the
        caller's own namespace stays cached there.

        Args:
            conversation: it, or its id.
            extra_key: that of its chat requests, if they have one.
            cache_salt: likewise.
            scrub: also zero every row of the server's pool that nothing refers to.

        Raises:
            SpliceRejectedError: the server refused; the reason is `unknown_conversation` where it has no such one.
            UnsupportedServerError: the server has no such route.
            SpliceTransportError: no readable answer came.
        """
        request = release_arguments(conversation, extra_key=extra_key, cache_salt=cache_salt, scrub=scrub)
        reply = read_plugin_reply(ReleaseReply, self._send("POST", RELEASE, **request))
        _released(conversation)
        return reply

    def conversation_state(
        self, conversation: Conversation | str, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> ConversationState:
        """Return what the server remembers of a conversation, and how much of it is cached. Arguments as `release`.

        Raises:
            ValueError: `extra_key` or `cache_salt` cannot stand in a header.
            SpliceRejectedError: the server refused; the reason is `unknown_conversation` where it has no such one.
            UnsupportedServerError: the server has no such route.
            SpliceTransportError: no readable answer came.
        """
        request = state_arguments(conversation, extra_key=extra_key, cache_salt=cache_salt)
        return read_plugin_reply(ConversationState, self._send("GET", CONVERSATION, **request))

    def capabilities(self) -> dict[str, Any]:
        """Return what the server's plugin says it can do.

        Raises:
            UnsupportedServerError: the server has no such route.
            SpliceTransportError: no readable answer came.
        """
        return read_capabilities(self._send("GET", CAPABILITIES))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_details: object) -> None:
        self.close()

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise _unreachable(method, path, error) from error


class AsyncClient:
    """As `Client`, for asyncio."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
        strict: bool = False,
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=server_root(base_url), headers=_auth(api_key), timeout=timeout, transport=transport
        )
        self._strict = strict

    async def chat(self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], **body: Any) -> ChatReply:
        """As `Client.chat`."""
        prepared = await conversation.prepare_async(_chat_body(messages, body))
        response = await self._send("POST", _CHAT, json=prepared.body, headers=prepared.headers)
        reply = read_reply(checked(response).headers, json_of(response))
        _commit(conversation, prepared, reply, self._strict)
        return reply

    @asynccontextmanager
    async def stream(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], **body: Any
    ) -> AsyncIterator[ChatStream]:
        """As `Client.stream`; iterate with `async for`."""
        prepared = await conversation.prepare_async({**_chat_body(messages, body), "stream": True})
        async with AsyncExitStack() as stack:
            try:
                request = self._http.stream("POST", _CHAT, json=prepared.body, headers=prepared.headers)
                response = await stack.enter_async_context(request)
                if response.is_error:
                    await response.aread()
            except httpx.HTTPError as error:
                raise _unreachable("POST", _CHAT, error) from error
            yield ChatStream(checked(response), conversation, prepared, self._strict)

    async def splice(self, request: SpliceRequest) -> SpliceReply:
        """As `Client.splice`."""
        return read_plugin_reply(SpliceReply, await self._send("POST", SPLICE, **splice_arguments(request)))

    async def release(
        self,
        conversation: Conversation | str,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        scrub: bool = False,
    ) -> ReleaseReply:
        """As `Client.release`."""
        request = release_arguments(conversation, extra_key=extra_key, cache_salt=cache_salt, scrub=scrub)
        reply = read_plugin_reply(ReleaseReply, await self._send("POST", RELEASE, **request))
        _released(conversation)
        return reply

    async def conversation_state(
        self, conversation: Conversation | str, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> ConversationState:
        """As `Client.conversation_state`."""
        request = state_arguments(conversation, extra_key=extra_key, cache_salt=cache_salt)
        return read_plugin_reply(ConversationState, await self._send("GET", CONVERSATION, **request))

    async def capabilities(self) -> dict[str, Any]:
        """As `Client.capabilities`."""
        return read_capabilities(await self._send("GET", CAPABILITIES))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_details: object) -> None:
        await self.close()

    async def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise _unreachable(method, path, error) from error


def _chat_body(messages: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("stream"):
        raise ValueError("got stream=True, expected a call of stream() for that")
    return {**body, "messages": messages}


def _commit(conversation: Conversation, prepared: PreparedTurn, reply: ChatReply, strict: bool) -> None:
    conversation.commit(prepared, reply.message, reply.outcome, reply.usage)
    if strict and prepared.note is not None:
        raise_fallback(reply.outcome)


def _released(conversation: Conversation | str) -> None:
    if isinstance(conversation, Conversation):
        conversation.released()


def _auth(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _unreachable(method: str, path: str, error: httpx.HTTPError) -> SpliceTransportError:
    return SpliceTransportError(f"{method} {path} got no answer: {type(error).__name__}: {error}")
