"""Reads an answer along while its bytes go to the client, to say when it is whole and what it was."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from leyline_agent.answers import ChatReply, StreamedAnswer, read_reply
from leyline_agent.errors import SpliceTransportError

# What a longer answer said is not worth its memory: its conversation starts anew.
_MAX_ANSWER_BYTES = 64 << 20
_UNREADABLE = (SpliceTransportError, AttributeError, KeyError, TypeError, ValueError, RecursionError, zlib.error)


class AnswerReader:
    """Takes the chunks of one answer with status 200, a JSON object or an event stream.

    Args:
        headers: the answer's, with names in lower case.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        encoding = headers.get("content-encoding", "identity").strip().lower()
        # We ask for no encoding; a server or a front that uses one all the same may use one of these.
        self._decoder = zlib.decompressobj(47) if encoding in ("gzip", "deflate") else None
        self._is_readable = self._decoder is not None or encoding in ("", "identity")
        length = headers.get("content-length", "")
        self._missing_bytes = int(length) if length.isdecimal() else None
        self._num_bytes = 0
        self._streamed = StreamedAnswer(headers)
        self._rest = b""
        self._parts: list[bytes] = []

    @property
    def is_finished(self) -> bool:
        """Whether a streamed answer came to its end, though perhaps not its stream."""
        return self._is_stream and self._streamed.finished

    def take(self, chunk: bytes) -> bool:
        """Read one chunk; tell whether whoever has it too knows the whole answer."""
        if self._missing_bytes is not None:
            self._missing_bytes -= len(chunk)
        is_whole = self._missing_bytes is not None and self._missing_bytes <= 0
        if not self._is_readable:
            return is_whole
        try:
            text = self._decoder.decompress(chunk, _MAX_ANSWER_BYTES) if self._decoder else chunk
            self._num_bytes += len(text)
            if self._num_bytes > _MAX_ANSWER_BYTES:
                self._give_up()
            elif self._is_stream:
                is_whole = self._take_lines(text) or is_whole
            else:
                self._parts.append(text)
        except _UNREADABLE:
            self._give_up()
        return is_whole

    def reply(self) -> ChatReply | None:
        """Return what was read; None where that is no whole answer."""
        if not self._is_readable:
            return None
        try:
            if not self._is_stream:
                return read_reply(self._headers, json.loads(b"".join(self._parts)))
            self._streamed.add_line(self._rest.decode())
            return self._streamed.reply() if self._streamed.finished else None
        except _UNREADABLE:
            return None

    def _take_lines(self, text: bytes) -> bool:
        *lines, self._rest = (self._rest + text).split(b"\n")
        is_whole = False
        for line in lines:
            self._streamed.add_line(line.decode())
            is_whole = is_whole or (line.startswith(b"data:") and line[5:].strip() == b"[DONE]")
        return is_whole

    def _give_up(self) -> None:
        self._is_readable = False
        self._parts, self._rest = [], b""
