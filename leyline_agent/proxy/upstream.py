"""Requests to the upstream, and which headers go from one side to the other.

Bytes come back as they are sent: nothing is decoded, followed or repeated here. The client is aiohttp: with 200
streams open, a chunk costs httpx and its pool 5 to 20 times as much (`python -m evals.micro.proxy` has what is left).
"""

from __future__ import annotations

import io
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from leyline_agent.core.protocol import CONVERSATION_HEADER
from leyline_agent.errors import SpliceTransportError
from leyline_agent.tokenizers import server_root

try:
    import aiohttp
    from multidict import CIMultiDict
    from yarl import URL
except ImportError as error:
    raise ImportError("the proxy needs aiohttp: pip install '/path/to/leyline[proxy]'") from error

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade"),
    )
)
# A conversation's name is for the proxy alone.
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", CONVERSATION_HEADER.encode("ascii")}
# Below the five seconds after which uvicorn, SGLang's server, closes an idle connection.
_KEEPALIVE_S = 4.0
_READ_BYTES = 1 << 16
_PART_BYTES = 1 << 18


class UpstreamError(SpliceTransportError):
    """The upstream gave no answer, or broke it off; `code` says which for programs, the text for people."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class UpstreamResponse:
    """An answer whose body is still to come."""

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._response, self._url = response, url
        self.status = response.status
        self.headers: Headers = end_to_end(response.raw_headers, _HOP_BY_HOP)

    def header(self, name: str) -> str | None:
        """Return a header's value, whatever the case of its name."""
        return self._response.headers.get(name)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Return the body as it comes.

        Raises:
            UpstreamError: it came to no end.
        """
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _broken_off(self._url, error) from error

    async def read(self) -> bytes:
        """Return the whole body. Raises as `chunks`."""
        return b"".join([chunk async for chunk in self.chunks()])


class Upstream:
    """Connections to one server. Made and used within one event loop."""

    def __init__(self, base_url: str, *, timeout_s: float, connect_timeout_s: float) -> None:
        self.root = server_root(base_url)
        self._timeout_s = timeout_s
        # A pseudonym of this proxy alone, as RFC 9110, 7.6.3 lets it be.
        self._name = b"leyline-" + secrets.token_hex(8).encode()
        self._session = aiohttp.ClientSession(
            # As many as there are clients: a limit would have one conversation wait for another.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=timeout_s),
            # One client's cookies are no other's.
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    @asynccontextmanager
    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncIterator[UpstreamResponse]:
        """Send a request and return its answer once the headers are there. Leaving early ends the request upstream.

        Args:
            method: GET or POST.
            path: as the client sent it, quoted, with its query.
            headers: those to send.
            body: empty for none.

        Raises:
            UpstreamError: there is no answer.
        """
        url = self.root + path
        headers = [*headers, (b"via", b"1.1 " + self._name)]
        sent: CIMultiDict[str] = CIMultiDict((name.decode("ascii"), _text(value)) for name, value in headers)
        try:
            response = await self._session.request(
                method,
                URL(url, encoded=True),
                headers=sent,
                # Longer ones in parts, so that writing one does not hold up the others.
                data=io.BytesIO(body) if len(body) > _PART_BYTES else body or None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unreachable(url, error) from error
        try:
            yield UpstreamResponse(response, url)
        finally:
            # Gives the connection back where the body was read to its end.
            response.close() if not response.content.at_eof() else response.release()

    def has_sent(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request with these headers has been sent by this very proxy, however many were between."""
        return any(name.lower() == b"via" and self._name in value for name, value in headers)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def _unreachable(self, url: str, error: Exception) -> UpstreamError:
        where = url.partition("?")[0]
        if isinstance(error, aiohttp.ClientConnectorError):
            return UpstreamError(
                "upstream_unreachable",
                f"the proxy cannot connect to its upstream {where} ({_reason(error)}); is "
                "the server up, and is --upstream its address?",
            )
        if isinstance(error, TimeoutError):
            return UpstreamError(
                "upstream_timeout",
                f"the proxy's upstream {where} did not answer in time ({type(error).__name__}); a longer prefill needs "
                f"a longer --timeout (it is {self._timeout_s:g} s)",
            )
        return UpstreamError(
            "upstream_error",
            f"the proxy's upstream {where} gave no answer that can be read ({_reason(error)}); look at its log, then "
            "send the request again",
        )


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] = _NOT_FORWARDED) -> Headers:
    """Return the headers that are not about one connection, their names in lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lower if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in lower if name not in dropped and name not in named]


def with_headers(headers: Headers, more: Mapping[str, str]) -> Headers:
    """Return the headers and those of `more` that are not among them."""
    there = {name for name, _ in headers}
    added = [(name.encode("ascii"), value.encode("ascii")) for name, value in more.items()]
    return headers + [(name, value) for name, value in added if name not in there]


def without_headers(headers: Headers, *names: bytes) -> Headers:
    """Return the headers less those of these names."""
    return [(name, value) for name, value in headers if name not in names]


def _text(value: bytes) -> str:
    """Return a header's value as aiohttp takes it, which sends UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _reason(error: Exception) -> str:
    """Return what an error is. Its own text may quote the upstream, or the request's query."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        # The operating system's words.
        return error.os_error.strerror or type(error.os_error).__name__
    status = getattr(error, "status", None)
    return f"{type(error).__name__}, status {status}" if status else type(error).__name__


def _broken_off(url: str, error: Exception) -> UpstreamError:
    return UpstreamError(
        "upstream_broke_off", f"the answer of {url.partition('?')[0]} broke off: {type(error).__name__}"
    )
