"""Runs the proxy with uvicorn."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import sys
from pathlib import Path

from leyline_agent.conversation import Conversation
from leyline_agent.errors import LeylineError
from leyline_agent.proxy.settings import ProxySettings

try:
    import uvicorn

    from leyline_agent.proxy.app import make_app
    from leyline_agent.proxy.headers import LimitedHeadersProtocol
except ImportError as error:
    raise ImportError(
        f"the proxy needs more than is installed ({error}): pip install '/path/to/leyline[proxy]'"
    ) from error

KEY_VARIABLE = "LEYLINE_PROXY_KEY"
STATS_KEY_VARIABLE = "LEYLINE_PROXY_STATS_KEY"

_BACKLOG = 2048
_SHUTDOWN_S = 5
# Longer than clients keep an idle connection, so that it is they who close it and never while they send.
_KEEP_ALIVE_S = 75
# How long a thread that edits may hold the interpreter while chunks wait; Python's own default is 5 ms.
_SWITCH_INTERVAL_S = 0.0005
# Remembered conversations are hundreds of thousands of objects, and a full collection walks through all of them while
# every stream waits. They hold no cycles; with Python's own thresholds half the time of 200 streams went into it.
_GC_THRESHOLDS = (10_000, 10, 100)


def read_key(key_file: str | None) -> tuple[bytes, bool]:
    """Return the proxy's key, and whether it will be the same after a restart.

    Raises:
        ValueError: the file cannot be read.
    """
    if key_file is not None:
        try:
            return Path(key_file).read_bytes().strip(), True
        except OSError as error:
            raise ValueError(f"--key-file {key_file}: cannot read it: {error.strerror}") from error
    if given := os.environ.get(KEY_VARIABLE):
        return given.encode(), True
    return secrets.token_bytes(32), False


def listen(settings: ProxySettings) -> socket.socket:
    """Return a socket that listens where the proxy is to.

    Raises:
        LeylineError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise LeylineError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error


def make_server(settings: ProxySettings) -> uvicorn.Server:
    """Return the server; run it with the socket of `listen`.

    Raises:
        PolicyError: the policy compares with a context window that it does not give.
    """
    # Told now, not to the first request.
    Conversation(settings.policy)
    config = uvicorn.Config(
        make_app(settings),
        # Request lines and headers are nobody's to read, and the upstream's own headers are passed on.
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        http=LimitedHeadersProtocol,
        ws="none",
        lifespan="on",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    return uvicorn.Server(config)


def serve(server: uvicorn.Server, listening: socket.socket) -> None:
    """Answer requests until interrupted."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with listening:
        server.run(sockets=[listening])
