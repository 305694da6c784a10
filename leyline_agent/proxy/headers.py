"""uvicorn's HTTP protocol with a limit on what it holds before a request, or a part of its body, is there."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
"""Of the request line and the headers together."""

_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedHeadersProtocol(HttpToolsProtocol):
    """Closes a connection on which headers, trailers or a chunk's extensions come to no end: httptools keeps them all.

    What arrives in one read together with their end is not counted.
    """

    _num_open_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what was read."""
        self._num_open_bytes += len(data)
        super().data_received(data)
        if self._num_open_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            # Not into an answer that has begun.
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSAL)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Begin the request."""
        self._num_open_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self._num_open_bytes = 0
        super().on_message_complete()
