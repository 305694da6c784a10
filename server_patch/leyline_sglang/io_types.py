"""The messages between the tokenizer process and the scheduler, on SGLang's own IPC (pickle or msgpack).

Token ids travel as the bytes of an int64 array, as the radix cache wants them: a list of 50,000 ints costs
milliseconds to encode, the bytes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from sglang.srt.managers.io_struct import BaseReq


def pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids as native int64 bytes."""
    return np.asarray(token_ids, dtype=np.int64).tobytes()


def unpack(packed: bytes) -> array[int]:
    """Return the ids that `pack` took."""
    token_ids = array("q")
    token_ids.frombytes(packed)
    return token_ids


class CacheRequest(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """Edit a conversation's part of the radix cache, then look up what is cached of two sequences in two namespaces.

    Done in this order, each only if asked for: the namespaces in `close` are emptied, one kept run is moved, the
    lookup. All of it in one call, so nothing changes in between.
    """

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
    """Whether to move a kept run: the fields below count only then."""
    from_own: bool = False
    """The run is read from the conversation's namespace; else from the shared one."""
    head_from_own: bool = False
    """The head `new[:dst_start]` is read from the conversation's namespace; else from the shared one."""
    removed_start: int = 0
    """Where the removed span left of the run starts in the base. A move in place takes everything from here on."""
    src_start: int = 0
    src_end: int = 0
    """The kept run in the base."""
    dst_start: int = 0
    """Its first position in the new prompt; everything left of it (the head) must be cached."""
    more_follow: bool = False
    """Whether a run further right is to be moved by a later request: it is parked meanwhile, if this one moves in
    place."""
    parked_from: int | None = None
    """What the reply to the move before said, where that left the rest of the base parked."""
    in_place: bool = True
    """Whether rows may be moved where they are; else they are copied."""
    drop_parked: bool = False
    """Drop what an earlier move left parked: the one that was to follow was given up."""

    close: tuple[str, ...] = ()
    """Namespaces of this conversation that nobody may be served from any more: they are emptied. The first
    `keep_tokens` of `new` are kept from the last of them: they move to `own_salt`."""
    keep_tokens: int = 0
    forget: bool = False
    """Also drop what this conversation has in the shared namespace, as far as it differs from `new` and nobody else
    builds on it."""
    scrub: bool = False
    """Also zero every row that neither the cache nor a running request refers to."""

    count_own: bool = False
    """Report `own_tokens`."""
    capabilities: bool = False
    """Report what this server cannot serve, as JSON in `message`."""


class AdmissionRequest(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """What is to be done when the scheduler admits a request that comes after this: the edits of its base, if any.

    Then the request is served from where more of it is cached.

    Each step is a move as in `CacheRequest`, except that what is missing of its head is computed in the batch of the
    request itself.
    """

    request_id: str
    cancel: bool = False
    """The request will not come any more."""
    prompt_tokens: int = 0
    """Length of its prompt: one that the engine has given up has another."""
    base: bytes = b""
    shared_salt: str | None = None
    own_salt: str = ""
    has_namespace: bool = False
    """Whether there was anything under `own_salt` before."""
    from_own: bool = False
    in_place: bool = True
    num_fills: int = 0
    """Steps with an R, each of which takes a request slot."""
    fill_tokens: int = 0
    """Tokens of all of their R's."""
    passed_over: int = 0
    """How often the request was not admitted for want of room; counted alike on every rank."""
    steps: list[tuple[int, int, int, int]] = []  # noqa: RUF012 - msgspec copies the default
    """`removed_start`, `src_start`, `src_end` and `dst_start` of each, left to right."""


class CacheReply(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """Cached lengths in tokens after whatever was done, and what became of it."""

    base_shared: int = 0
    base_own: int = 0
    new_shared: int = 0
    new_own: int = 0
    own_tokens: int = 0
    """Slots in the conversation's namespace."""
    moved: int = 0
    """Rows of the kept run that now stand at their new positions: copied and rotated, or rotated in place."""
    copied: int = 0
    """Rows of the head that were copied into the conversation's namespace now."""
    filled: int = 0
    """Rows of R that are computed in the batch of the request itself."""
    moved_in_place: bool = False
    parked_from: int | None = None
    """Base position from which on the rest of the base is parked; None where nothing is."""
    dropped: int = 0
    held: int = 0
    shared: int = 0
    scrubbed: int = 0
    """As in `protocol.Purge`."""
    ms: float = 0.0
    """The scheduler's share: from taking the request up to this reply."""
    stages_ms: dict[str, float] = {}  # noqa: RUF012 - msgspec copies the default
    """Of these, by stage."""
    prefill_cost: tuple[float, ...] | None = None
    """What prefill costs on this server (`prefill_cost.Cost`), once it has measured that."""
    reason: str = ""
    """A `protocol.Reason`, or empty."""
    message: str = ""


class AdmissionReply(CacheReply, kw_only=True):  # type: ignore[call-arg]
    """What became of an `AdmissionRequest`, sent as the request's batch begins; the counts are sums over its steps."""

    request_id: str = ""
    steps_done: int = 0
