"""The OpenAI-style client in a chat model: which server it asks, and what came back for a call.

LangChain shows the headers of an answer only to who asks for them, not for every request, and then to everybody. So
the outcome is read where the client's HTTP connection hands it over. Private names of the OpenAI SDK stand here alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from leyline_agent.core.protocol import ROUTING_HEADER

# These answer 400 to a field that they do not know, and have no business with a conversation's id.
_FOREIGN_HOSTS = ("openai.com", "azure.com", "azure.us")


@dataclass(slots=True)
class Heard:
    """What was heard of one call."""

    routing_key: str | None
    """Of the call's note: its responses are those to requests with this header. None for a call without one."""
    headers: Mapping[str, str] | None = None
    """Of the last response to the call; None where none was heard."""
    is_success: bool = False
    """Whether that one was no error."""
    is_connected: bool = False
    """Whether anything could be heard: not with a client that brings its own kind of connection."""


_heard: ContextVar[Heard | None] = ContextVar("leyline_heard", default=None)


def server_of(model: object) -> str | None:
    """Return the base URL that a chat model asks through an OpenAI-style client; None where it has none.

    None for OpenAI's own servers, too. It has no credentials and no query; a gateway may have other servers behind
    other paths.
    """
    for client in _clients(model):
        url = urlsplit(str(client.base_url))
        host = url.hostname or ""
        if any(host == foreign or host.endswith("." + foreign) for foreign in _FOREIGN_HOSTS):
            return None
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path.rstrip('/')}"
    return None


@contextmanager
def listening(model: object, routing_key: str | None) -> Iterator[Heard]:
    """Hear the responses to a call that is made within, in this thread or task or one that inherits its context."""
    heard = Heard(routing_key)
    for client in _clients(model):
        heard.is_connected |= _attach(getattr(client, "_client", None))
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


def _clients(model: object) -> list[Any]:
    """Return the OpenAI-style clients that a chat model holds, whole or as their `chat.completions`."""
    found: dict[int, Any] = {}
    for name in ("root_client", "root_async_client", "client", "async_client"):
        held = getattr(model, name, None)
        for client in (held, getattr(held, "_client", None)):
            completions = getattr(getattr(client, "chat", None), "completions", None)
            if hasattr(completions, "create") and hasattr(client, "base_url"):
                found.setdefault(id(client), client)
                break
    return list(found.values())


def _attach(connection: object) -> bool:
    """Have a connection tell its responses, once, and only those to calls of ours; return whether it can."""
    hook: Any
    if isinstance(connection, httpx.Client):
        hook = _hear
    elif isinstance(connection, httpx.AsyncClient):
        hook = _hear_async
    else:
        return False
    hooks = connection.event_hooks["response"]
    if hook not in hooks:
        hooks.append(hook)
    return True


def _hear(response: httpx.Response) -> None:
    heard = _heard.get()
    if heard is not None and response.request.headers.get(ROUTING_HEADER) == heard.routing_key:
        heard.headers, heard.is_success = dict(response.headers), response.is_success


async def _hear_async(response: httpx.Response) -> None:
    _hear(response)
