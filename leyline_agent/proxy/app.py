"""The proxy's routes. Whatever is not listed here is answered 404, the server's routes for operators among it."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline_agent.proxy.chat import Chat, unedited_header
from leyline_agent.proxy.relay import (
    BodyTooLargeError,
    ClientLeftError,
    read_body,
    relay,
    send_error,
    while_connected,
)
from leyline_agent.proxy.settings import ProxySettings
from leyline_agent.proxy.stats import Stats
from leyline_agent.proxy.turns import Turns
from leyline_agent.proxy.upstream import Upstream, UpstreamError, end_to_end

logger = logging.getLogger("leyline_agent.proxy")

CHAT = "/v1/chat/completions"
STATS = "/leyline/proxy/stats"

_PASSED_ON = {
    "/v1/models": "GET",
    "/v1/models/{name:path}": "GET",
    "/health": "GET",
    "/leyline/capabilities": "GET",
    "/v1/embeddings": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/responses/{name}": "GET",
    "/v1/responses/{name}/cancel": "POST",
}
_UNEDITED = ("/v1/responses", "/v1/messages", "/v1/completions")
"""They carry a conversation, too, in a form that policies do not know."""


class Proxy:
    """One proxy's parts, made as its server starts."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self.stats = Stats()
        self.turns = Turns(settings, self.stats)
        self.upstream = Upstream(
            settings.upstream, timeout_s=settings.timeout_s, connect_timeout_s=settings.connect_timeout_s
        )
        self.chat = Chat(self.turns, self.upstream, self.stats)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of one of the routes that go upstream."""
        has_started = False

        async def sending(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            raw = await read_body(scope, receive, self._settings.max_body_bytes)
            await self._answer(scope, receive, sending, raw)
        except ClientLeftError:
            return
        except BodyTooLargeError:
            limit = self._settings.max_body_bytes
            message = f"the request's body is longer than {limit} bytes, this proxy's --max-body-mb"
            await send_error(send, 413, "invalid_request_error", "request_too_large", message)
        except UpstreamError as error:
            self.stats.failures[error.code] += 1
            logger.warning("%s", error)
            # Where an answer has begun, the connection is closed without its end, as the upstream did.
            if not has_started:
                await send_error(send, 502, "upstream_error", error.code, str(error))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, raw: bytes) -> None:
        if self.upstream.has_sent(scope["headers"]):
            message = (
                f"the proxy's upstream {self.upstream.root} leads back to this proxy; start it with the server's "
                "address as --upstream"
            )
            logger.error("%s", message)
            await send_error(send, 508, "upstream_error", "upstream_loop", message)
            return
        path = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            path += "?" + scope["query_string"].decode("latin-1")
        if scope["path"] == CHAT:
            await self.chat.answer(scope, receive, send, path, raw)
            return
        more = []
        if scope["path"] in _UNEDITED:
            more = unedited_header("path")
            words = "%s goes through unedited: the policy is applied to " + CHAT + " alone"
            self.stats.add_unedited(scope["path"], words, scope["path"])

        async def pass_on() -> None:
            headers = end_to_end(scope["headers"])
            async with self.upstream.send(scope["method"], path, headers, raw) as response:
                await relay(response, send, more_headers=more)

        await while_connected(receive, pass_on())

    async def close(self) -> None:
        """End threads and connections."""
        self.chat.close()
        await self.upstream.close()

    def stats_response(self, request: Request) -> JSONResponse:
        """Answer with counts; they name no conversation but by the hash that stands in the server's log."""
        key = self._settings.stats_key
        if key is None and self._settings.is_public:
            message = "stats are off: this proxy listens beyond its machine and was given no LEYLINE_PROXY_STATS_KEY"
            return _error(403, "permission_error", "stats_off", message)
        given = request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            message = "the key of the stats is missing or wrong; `leyline stats` takes it from LEYLINE_API_KEY"
            return _error(401, "authentication_error", "invalid_api_key", message)
        about = {
            "policy": self._settings.policy_name,
            "upstream": self.upstream.root,
            "notes": self.chat.notes.state,
        }
        return JSONResponse({**about, **self.stats.as_json(self.turns.recogniser.remembered())})


def make_app(settings: ProxySettings) -> ASGIApp:
    """Return the proxy as an ASGI application."""
    proxy: Proxy

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        nonlocal proxy
        proxy = Proxy(settings)
        yield
        await proxy.close()

    class Passage:
        """A route that leads upstream. A class, since Starlette takes a function for something else."""

        def __init__(self, method: str) -> None:
            self._methods = ("GET", "HEAD") if method == "GET" else (method,)

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if {".", ".."} & set(scope["path"].split("/")):
                await _not_found(scope, receive, send)
            elif scope["method"] not in self._methods:
                message = f"{scope['path']} takes {' and '.join(self._methods)}, got {scope['method']}"
                await send_error(send, 405, "invalid_request_error", "method_not_allowed", message)
            else:
                await proxy.answer(scope, receive, send)

    async def stats(request: Request) -> JSONResponse:
        return proxy.stats_response(request)

    passages = {CHAT: "POST", **dict.fromkeys(_UNEDITED, "POST"), **_PASSED_ON}
    routes = [Route(path, Passage(method)) for path, method in passages.items()]
    return Router(
        [*routes, Route(STATS, stats, methods=["GET"])], redirect_slashes=False, default=_not_found, lifespan=lifespan
    )


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        message = f"the proxy has no route {scope['method']} {scope['path'][:200]}; docs/proxy.md lists those it has"
        await send_error(send, 404, "invalid_request_error", "unknown_url", message)


def _error(status: int, kind: str, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
