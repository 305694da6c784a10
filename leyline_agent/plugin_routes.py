"""Requests to the plugin's own routes and what they answer. Knows nothing of connections.

The conversation's id goes in a body or a header, never into a URL, which servers and proxies log.
"""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from leyline_agent.conversation import Conversation, routing_key
from leyline_agent.core.conversation_id import check_conversation_id
from leyline_agent.core.protocol import (
    CACHE_SALT_HEADER,
    CONVERSATION_HEADER,
    EXTRA_KEY_HEADER,
    ROUTING_HEADER,
    ReleaseRequest,
    SpliceRequest,
)
from leyline_agent.errors import SpliceRejectedError, SpliceTransportError, UnsupportedServerError

SPLICE = "/leyline/splice"
RELEASE = "/leyline/release"
CONVERSATION = "/leyline/conversation"
CAPABILITIES = "/leyline/capabilities"

_Reply = TypeVar("_Reply", bound=BaseModel)


def splice_arguments(request: SpliceRequest) -> dict[str, Any]:
    """Return the arguments of the HTTP request for an explicit splice."""
    return {"json": _dumped(request)}


def release_arguments(
    conversation: Conversation | str, *, extra_key: str | None, cache_salt: str | None, scrub: bool
) -> dict[str, Any]:
    """Return those for the release of a conversation."""
    conversation_id = _id_of(conversation)
    request = ReleaseRequest(conversation=conversation_id, extra_key=extra_key, cache_salt=cache_salt, scrub=scrub)
    return {"json": _dumped(request), "headers": {ROUTING_HEADER: routing_key(conversation_id)}}


def state_arguments(
    conversation: Conversation | str, *, extra_key: str | None, cache_salt: str | None
) -> dict[str, Any]:
    """Return those for a conversation's state.

    Raises:
        ValueError: a value cannot stand in a header.
    """
    conversation_id = _id_of(conversation)
    headers = {CONVERSATION_HEADER: conversation_id, ROUTING_HEADER: routing_key(conversation_id)}
    for header, value in ((EXTRA_KEY_HEADER, extra_key), (CACHE_SALT_HEADER, cache_salt)):
        if not value:
            continue
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise ValueError(f"the value for {header} must be printable ASCII without spaces at its ends")
        headers[header] = value
    return {"headers": headers}


def read_plugin_reply(model: type[_Reply], response: httpx.Response) -> _Reply:
    """Read what one of the routes answered.

    Raises:
        SpliceRejectedError: the server refused, with its reason.
        UnsupportedServerError: the server has no such route.
        SpliceTransportError: the answer is not readable.
    """
    _raise_refusal(response)
    _require_route(response)
    try:
        return model.model_validate(json_of(checked(response)))
    except ValidationError as error:
        raise SpliceTransportError(f"{response.request.url.path} answered {response.text!r:.200}: {error}") from error


def read_capabilities(response: httpx.Response) -> dict[str, Any]:
    """Read what the plugin says it can do. Raises as `read_plugin_reply`, but for a refusal."""
    _require_route(response)
    capabilities = json_of(checked(response))
    if not isinstance(capabilities, dict):
        raise SpliceTransportError(f"{CAPABILITIES} answered {capabilities!r:.200}, expected an object")
    return capabilities


def checked(response: httpx.Response) -> httpx.Response:
    """Return a response that is no error.

    Raises:
        SpliceTransportError: it is one.
    """
    try:
        return response.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise SpliceTransportError(
            f"{response.request.method} {response.request.url.path} answered {response.status_code}: "
            f"{response.text:.500}"
        ) from error


def json_of(response: httpx.Response) -> Any:
    """Return a response's JSON.

    Raises:
        SpliceTransportError: it has none.
    """
    try:
        return response.json()
    except ValueError as error:
        raise SpliceTransportError(
            f"{response.request.url.path} answered {response.text!r:.200}, expected JSON"
        ) from error


def _id_of(conversation: Conversation | str) -> str:
    return conversation.id if isinstance(conversation, Conversation) else check_conversation_id(conversation)


def _dumped(request: BaseModel) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_defaults=True)


def _raise_refusal(response: httpx.Response) -> None:
    """Raise if the plugin itself said no, which it does as `{reason, message}`."""
    if not response.is_client_error:
        return
    try:
        refusal = response.json()
    except ValueError:
        return
    if isinstance(refusal, dict) and isinstance(refusal.get("reason"), str):
        raise SpliceRejectedError(
            f"the server refused {response.request.url.path} ({refusal['reason']}): {refusal.get('message')}",
            reason=refusal["reason"],
        )


def _require_route(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.NOT_FOUND:
        raise UnsupportedServerError(
            f"{response.request.url.path} is not found: the server runs no Leyline plugin, or a gateway hides the route"
        )
