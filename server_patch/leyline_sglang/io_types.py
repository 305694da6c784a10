"""The two messages between the tokenizer process and the scheduler, on SGLang's own IPC (pickle or msgpack).

Token ids travel as the bytes of an int64 array, as the radix cache wants them: a list of 50,000 ints costs
milliseconds to encode, the bytes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sglang.srt.managers.io_struct import BaseReq


def pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids as native int64 bytes."""
    return array("q", token_ids).tobytes()


def unpack(packed: bytes) -> array[int]:
    """Return the ids that `pack` took."""
    token_ids = array("q")
    token_ids.frombytes(packed)
    return token_ids


class CacheRequest(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """Look up what is cached of two sequences in two namespaces, and optionally move one kept run first."""

    base: bytes = b""
    """The edited sequence; empty where there is none."""
    new: bytes = b""
    """The request's prompt."""
    extra_key: str | None = None
    shared_salt: str | None = None
    """The caller's own namespace."""
    own_salt: str | None = None
    """The conversation's namespace; None looks into the shared one alone."""
    move: bool = False
    """Whether to splice: the fields below count only then."""
    base_salt: str | None = None
    """Namespace to read the kept run from."""
    head_salt: str | None = None
    """Namespace to read the head `new[:dst_start]` from."""
    src_start: int = 0
    src_end: int = 0
    """The kept run in the base."""
    dst_start: int = 0
    """Its first position in the new prompt; everything left of it (the head) must be cached."""
    capabilities: bool = False
    """Report what this server cannot serve, as JSON in `message`."""


class CacheReply(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """Cached lengths in tokens after whatever was done, and what became of the move."""

    base_shared: int = 0
    base_own: int = 0
    new_shared: int = 0
    new_own: int = 0
    moved: int = 0
    """Rows of the kept run that were copied and rotated now."""
    copied: int = 0
    """Rows of the head that were copied into the conversation's namespace now."""
    reason: str = ""
    """A `protocol.Reason`, or empty."""
    message: str = ""
