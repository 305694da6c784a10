"""HTTP: explicit splices, release, what is cached, capabilities, and the outcome as a response header."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from leyline_agent.core.protocol import (
    CACHE_SALT_HEADER,
    CONVERSATION_HEADER,
    EXTRA_KEY_HEADER,
    OUTCOME_HEADER,
    AdminReleaseRequest,
    Mode,
    Outcome,
    Reason,
    ReleaseRequest,
    SpliceRequest,
    outcome_header,
)
from leyline_agent.errors import PlanError
from leyline_sglang import compat, conversations
from leyline_sglang.capabilities import capabilities_body
from leyline_sglang.note import first_problem, reason_of
from leyline_sglang.noted_request import META_KEY, SCOPE_KEY
from leyline_sglang.serving import Serving

Body = TypeVar("Body", bound=BaseModel)

logger = logging.getLogger(__name__)

_HTTP_STATUS = {
    Reason.NOTE_TOO_LARGE: 413,
    Reason.UNKNOWN_CONVERSATION: 404,
    Reason.EVICTED: 409,
    Reason.POOL_FULL: 409,
    Reason.ABORTED: 409,
    Reason.DISABLED: 409,
    Reason.UNSUPPORTED_SERVER: 409,
    Reason.TIMEOUT: 408,
    Reason.INTERNAL_ERROR: 500,
}


def add_routes(app: FastAPI, serving: Serving, installed: list[str]) -> None:
    """Add `/leyline/*` and the outcome header to the server's app. Its API key covers them all."""

    async def answer(reply: Awaitable[BaseModel]) -> JSONResponse:
        try:
            return JSONResponse((await reply).model_dump(mode="json"))
        except PlanError as error:
            return _error(Reason(error.reason), str(error))
        except TimeoutError:
            return _error(Reason.TIMEOUT, serving.late())
        except Exception as error:
            logger.exception("leyline: a request to one of our routes failed")
            return _error(Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")

    @app.post("/leyline/splice")
    async def splice(request: Request) -> JSONResponse:
        async def reply() -> BaseModel:
            asked = await _read(request, SpliceRequest, serving.config.max_note_bytes)
            return await conversations.splice(serving, compat.tokenizer_manager(), request, asked)

        return await answer(reply())

    @app.post("/leyline/release")
    async def release(request: Request) -> JSONResponse:
        async def reply() -> BaseModel:
            asked = await _read(request, ReleaseRequest, serving.config.max_note_bytes)
            found = conversations.find(serving, asked.conversation, (asked.extra_key, asked.cache_salt or None))
            return await conversations.release(serving, compat.tokenizer_manager(), found, scrub=asked.scrub)

        return await answer(reply())

    @app.get("/leyline/conversation")
    async def conversation(request: Request) -> JSONResponse:
        async def reply() -> BaseModel:
            headers = request.headers
            if CONVERSATION_HEADER not in headers:
                raise PlanError(
                    f"name the conversation in the header {CONVERSATION_HEADER}; never in the URL, which is logged",
                    reason=Reason.BAD_NOTE,
                )
            scope = (headers.get(EXTRA_KEY_HEADER), headers.get(CACHE_SALT_HEADER) or None)
            found = conversations.find(serving, headers[CONVERSATION_HEADER], scope)
            return await conversations.state(serving, compat.tokenizer_manager(), found)

        return await answer(reply())

    @app.post("/leyline/admin/release")
    @compat.for_admins
    async def admin_release(request: Request) -> JSONResponse:
        async def reply() -> BaseModel:
            asked = await _read(request, AdminReleaseRequest, serving.config.max_note_bytes)
            found = conversations.find_hashed(serving, asked.conversation_hash)
            return await conversations.release(serving, compat.tokenizer_manager(), found, scrub=asked.scrub)

        return await answer(reply())

    @app.get("/leyline/admin/conversation")
    @compat.for_admins
    async def admin_conversation(conversation_hash: str) -> JSONResponse:
        async def reply() -> BaseModel:
            return await conversations.state(
                serving, compat.tokenizer_manager(), conversations.find_hashed(serving, conversation_hash)
            )

        return await answer(reply())

    @app.get("/leyline/capabilities")
    async def capabilities() -> JSONResponse:
        try:
            unsupported = await serving.unsupported(compat.tokenizer_manager())
        except TimeoutError:
            unsupported = [f"{serving.late()}; is the plugin in it?"]
        return JSONResponse(
            capabilities_body(
                enabled=serving.config.enabled,
                unsupported=unsupported,
                installed=installed,
                modes=[mode.value for mode in Mode],
                not_in_one_step=serving.not_in_one_step(),
                settings=serving.config.model_dump(exclude={"secret"}),
                conversations=len(serving.memory),
                remembered_tokens=serving.memory.num_tokens,
            )
        )

    app.add_middleware(OutcomeHeader)


def put_outcome_in_metadata(response: Any, _serving: Any, _request: Any, outputs: list[Any], *_rest: Any) -> Any:
    """Copy the outcome into `metadata.leyline` of a non-streaming chat response."""
    outcome = outputs[0]["meta_info"].get(META_KEY)
    if outcome is not None and hasattr(response, "metadata"):
        response.metadata = {**(response.metadata or {}), META_KEY: outcome}
    return response


class OutcomeHeader:
    """ASGI middleware: put the outcome into the header `x-leyline`, streaming or not.

    SGLang makes the first chunk of a stream before the headers go out, so the outcome is known by then.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Pass the request on; add the header as the response starts."""

        async def send_with_header(message: MutableMapping[str, Any]) -> None:
            outcome: Outcome | None = scope.get(SCOPE_KEY)
            if message["type"] == "http.response.start" and outcome is not None:
                header = (OUTCOME_HEADER.encode(), outcome_header(outcome).encode())
                message["headers"] = [*message.get("headers", []), header]
            await send(message)

        await self._app(scope, receive, send_with_header if scope["type"] == "http" else send)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read a body of at most `max_bytes`, and no more of a longer one."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise PlanError(f"the body has more than {max_bytes} bytes", reason=Reason.NOTE_TOO_LARGE)
    return body


async def _read(request: Request, model: type[Body], max_bytes: int) -> Body:
    """Read and check a body.

    Raises:
        PlanError: it is too large, or not what was expected; with the reason.
    """
    body = await _read_body(request, max_bytes)
    try:
        # Parsed off the event loop: a large body would stop every stream meanwhile.
        return await asyncio.to_thread(model.model_validate_json, body)
    except ValidationError as error:
        expected = ", ".join(model.model_fields)
        raise PlanError(f"{first_problem(error)}; the fields are {expected}", reason=reason_of(error)) from error


def _error(reason: Reason, message: str) -> JSONResponse:
    return JSONResponse({"reason": reason.value, "message": message}, _HTTP_STATUS.get(reason, 400))
