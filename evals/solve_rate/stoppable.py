"""An httpx transport that a run's end interrupts: a model may think for minutes about one answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import httpx

_POLL_S = 0.2


class StoppableTransport(httpx.BaseTransport):
    """Passes requests on, and gives up waiting for an answer once `is_stopped` says so."""

    def __init__(self, inner: httpx.BaseTransport, is_stopped: Callable[[], bool]) -> None:
        self._inner, self._is_stopped = inner, is_stopped
        self._sockets: list[socket.socket] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and read its answer whole.

        Raises:
            httpx.TransportError: as the inner transport, or because the run is over.
        """
        # Clients send a request that broke again.
        self._raise_if_stopped(request)
        # httpcore tells of each connection that it opens.
        request.extensions = {**request.extensions, "trace": self._note_socket}
        answers: list[httpx.Response | Exception] = []

        def send() -> None:
            try:
                response = self._inner.handle_request(request)
                response.read()
                answers.append(response)
            except Exception as error:
                answers.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        while thread.is_alive():
            self._raise_if_stopped(request)
            thread.join(_POLL_S)
        (answer,) = answers
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _raise_if_stopped(self, request: httpx.Request) -> None:
        if self._is_stopped():
            # Closing alone would neither wake the thread that reads nor tell the server, which would go on generating.
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            raise httpx.ReadError("the run is over", request=request)

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def _note_socket(self, event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._sockets.append(info["return_value"].get_extra_info("socket"))
