"""The wire: the note in a chat request, the outcome that comes back, and the reasons for a refusal.

Imported by the client and by the server. Knows nothing of HTTP, of messages or of SGLang. The prose is in
`docs/wire-protocol.md`.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, model_validator

from leyline_agent.core.conversation_id import check_conversation_id

PROTOCOL_VERSION = 1
NOTE_KEY = "leyline"
"""Key of the note in `custom_params`; its value is a JSON string (nested values kill an unpatched scheduler)."""
OUTCOME_HEADER = "x-leyline"
CONVERSATION_HEADER = "x-leyline-conversation"
"""Request header of `GET /leyline/conversation`: the id, which must not stand in a URL."""
EXTRA_KEY_HEADER = "x-leyline-extra-key"
CACHE_SALT_HEADER = "x-leyline-cache-salt"
ROUTING_HEADER = "x-smg-routing-key"
"""The request header by which SGLang's gateway keeps a conversation on one worker."""
MAX_NOTE_BYTES = 1 << 20
"""Notes above this are refused before they are parsed. A million bytes hold about 150,000 replacement ids."""
MAX_DIRECTIVES = 4096
"""Explicit directives of one note or body; a server carries out fewer (`LEYLINE_MAX_DIRECTIVES`)."""
MAX_HEADER_BYTES = 4096
"""An outcome in a header is cut to this; many HTTP stacks cap a header line at 8 KiB."""

# Written as \\uXXXX a character is six bytes of ASCII, so this leaves the other fields room.
_MAX_HEADER_MESSAGE = 400


class Mode(StrEnum):
    """What a directive does to the KV downstream of it."""

    AMORTIZE = "amortize"
    """Keep it, at new positions; its values still reflect the removed text."""
    FORGET = "forget"
    """Drop it and prefill again."""


class Reason(StrEnum):
    """Why a splice was not (wholly) carried out. `docs/wire-protocol.md` explains each."""

    # The note itself.
    BAD_NOTE = "bad_note"
    WEAK_CONVERSATION_ID = "weak_conversation_id"
    UNSUPPORTED_VERSION = "unsupported_version"
    NOTE_TOO_LARGE = "note_too_large"
    BAD_DIRECTIVES = "bad_directives"
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"
    # What it refers to.
    UNKNOWN_CONVERSATION = "unknown_conversation"
    UNKNOWN_BASE = "unknown_base"
    STALE_BASE = "stale_base"
    # What the server finds cheaper.
    GATED = "gated"
    # What the server can do now.
    EVICTED = "evicted"
    POOL_FULL = "pool_full"
    DIFF_BUDGET = "diff_budget"
    TOO_MANY_DIRECTIVES = "too_many_directives"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    # What the server can do at all.
    UNSUPPORTED_REQUEST = "unsupported_request"
    UNSUPPORTED_SERVER = "unsupported_server"
    DISABLED = "disabled"
    INTERNAL_ERROR = "internal_error"


class Status(StrEnum):
    """What became of a note."""

    SPLICED = "spliced"
    """Every directive was carried out."""
    PARTIAL = "partial"
    """The directives left of the refused one were carried out; `reason` tells why not the rest."""
    UNCHANGED = "unchanged"
    """Nothing to do: a first turn, or a prompt that only grew."""
    REPREFILL = "reprefill"
    """The note asked for it, a `forget` left nothing to splice, or the server finds it cheaper (`reason`: `gated`)."""
    REFUSED = "refused"
    """Nothing was carried out; `reason` tells why. The prompt was prefilled as on any server."""


ConversationId = Annotated[str, Field(max_length=256), AfterValidator(check_conversation_id)]
"""A bearer secret; short and guessable ones are refused."""


class _Wire(BaseModel):
    # Errors would quote the input otherwise, and with it the conversation's id.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class _Reply(_Wire):
    """What a server says: a newer one may say more."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Directive(_Wire):
    """Replace the base's tokens `[start, end)` by `replacement_ids` (R)."""

    start: Annotated[StrictInt, Field(ge=0)]
    end: Annotated[StrictInt, Field(ge=0)]
    replacement_ids: tuple[Annotated[StrictInt, Field(ge=0)], ...] = ()
    mode: Mode = Mode.AMORTIZE

    @model_validator(mode="after")
    def _ordered(self) -> Directive:
        if self.end < self.start:
            raise ValueError(f"end ({self.end}) lies before start ({self.start})")
        return self

    @property
    def position_delta(self) -> int:
        """New minus old position of every token downstream: |R| - (end - start)."""
        return len(self.replacement_ids) - (self.end - self.start)


class Note(_Wire):
    """What a client says about how a prompt came about; the JSON string in `custom_params["leyline"]`."""

    v: Literal[1] = 1
    conversation: ConversationId
    """A bearer secret of 128 random bits or more (22 characters of base64url)."""
    turn: Annotated[str, Field(min_length=1, max_length=128)]
    """The client's id of this request; the same one twice is one turn."""
    base: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The turn that this prompt edits."""
    mode: Literal["amortize", "reprefill", "forget"] = "amortize"
    """`reprefill`: splice nothing this turn. `forget`: nor leave anything cached that this conversation had right of
    the first difference from the base."""
    forget: tuple[str, ...] | Literal["all"] = ()
    """Edit ids of earlier outcomes whose influence must go, or "all"."""
    scrub: bool = False
    """With a forget of either kind: also zero every row of the pool that nothing refers to."""
    gate: Literal["auto", "off"] = "auto"
    """`auto`: the server prefills again where it has measured that to be quicker. Explicit directives are carried out
    either way."""
    template_changes: Literal["amortize", "reprefill"] = "amortize"
    """Where the answer of the base is rendered to other tokens than were generated: `reprefill` splices nothing from
    there on. Explicit directives are carried out either way."""
    directives: Annotated[tuple[Directive, ...], Field(max_length=MAX_DIRECTIVES)] | None = None
    """Explicit directives; None leaves the diff to the server."""
    base_len: Annotated[StrictInt, Field(ge=0)] | None = None
    """With explicit directives: how many tokens of the base they refer to."""
    base_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """With explicit directives: `hash_token_ids` of those tokens."""

    @model_validator(mode="after")
    def _explicit_is_whole(self) -> Note:
        given = [self.directives is not None, self.base_len is not None, self.base_hash is not None]
        if any(given) and not (all(given) and self.base is not None):
            raise ValueError("explicit directives need base, base_len and base_hash together")
        return self


class DirectiveOutcome(_Reply):
    """What became of one directive."""

    start: int
    end: int
    replacement_tokens: int
    mode: Mode = Mode.AMORTIZE
    edit_id: str | None = None
    """Names the edit in a later note's `forget`; None where the directive was not carried out."""
    in_answer: bool = False
    """It reaches into the answer of the base, as the model generated it, or replaces the tokens right before it."""


class Purge(_Reply):
    """What a `forget` or a release did to the rows that the conversation had cached. In tokens, one slot each."""

    dropped_tokens: int = 0
    """Dropped from the cache; their slots are free."""
    held_tokens: int = 0
    """Held by running requests; they are dropped (and scrubbed, if that was asked) as soon as those end."""
    shared_tokens: int = 0
    """Left in the caller's own namespace because sequences of others go on from them."""
    scrubbed_tokens: int = 0
    """Slots that were zeroed: every one that neither the cache nor a running request refers to."""


class Outcome(_Reply):
    """What the server did with a note. Tokens are those of this request's prompt."""

    v: int = PROTOCOL_VERSION
    status: Status
    reason: Reason | None = None
    message: str | None = None
    """For people: what was found, what was expected, what to do."""
    turn: str | None = None
    directives: tuple[DirectiveOutcome, ...] = ()
    num_directives: int = 0
    """All of them; a header may list fewer than this."""
    answer_directives: int = 0
    """Of these, the ones within the answer of the base (`DirectiveOutcome.in_answer`)."""
    kept_tokens: int = 0
    """Where rows were moved: what lies left of the first difference and was cached. 0 elsewhere, where the response's
    own count of cached tokens says it."""
    moved_tokens: int = 0
    """Right of it, rotated to new positions instead of being prefilled, in their slots or in copies."""
    answer_moved_tokens: int = 0
    """Of these, what lies right of the first directive within the answer of the base."""
    prefilled_tokens: int = 0
    """What the splice itself prefilled (the R's). The response counts them as cached; subtract them."""
    saved_ms: float | None = None
    """What the prefill of the moved tokens would have taken, as this server has measured its prefill so far, less `ms`.
    None where nothing was moved, and before batches of comparable sizes were measured."""
    purge: Purge | None = None
    """What a `forget` did to the cached rows; None where nothing was to be forgotten."""
    ms: float = 0.0
    """Milliseconds between the note's arrival and the hand-over of the request itself."""
    scheduler_ms: float = 0.0
    """Of these, what the scheduler spent on the edits, while no batch ran; not the prefill of the R's."""
    stages_ms: dict[str, float] = {}
    """Of `ms`, by stage: `diff`, and where R is prefilled before the request `prefill` of R and `wait` for the
    scheduler; of `scheduler_ms` `match`, `allocate`, `admit` (of what computes R beside the request), `rotate`,
    `insert`, `record` and `look`. Host time: on a GPU what is launched runs on meanwhile."""


class SpliceRequest(_Wire):
    """Body of `POST /leyline/splice`: carry out explicit directives outside of a request."""

    v: Literal[1] = 1
    conversation: ConversationId
    base_ids: Annotated[tuple[Annotated[StrictInt, Field(ge=0)], ...], Field(min_length=1)]
    """Token ids of the cached sequence to edit."""
    directives: Annotated[tuple[Directive, ...], Field(min_length=1, max_length=MAX_DIRECTIVES)]
    extra_key: str | None = None
    cache_salt: str | None = None
    scrub: bool = False
    """With a directive that forgets: as in a note."""


class SpliceReply(_Reply):
    """Answer of `POST /leyline/splice`. A 4xx carries `{reason, message}` instead."""

    outcome: Outcome
    token_ids: tuple[int, ...]
    """The edited sequence as far as it is cached now for the conversation."""


class ReleaseRequest(_Wire):
    """Body of `POST /leyline/release`: free what the conversation has in its own namespace, and forget its turns."""

    v: Literal[1] = 1
    conversation: ConversationId
    extra_key: str | None = None
    cache_salt: str | None = None
    scrub: bool = False
    """Also zero every row of the pool that nothing refers to."""


class AdminReleaseRequest(_Wire):
    """Body of `POST /leyline/admin/release`: the same for an operator, who knows the hash that stands in logs."""

    v: Literal[1] = 1
    conversation_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    scrub: bool = False


class ReleaseReply(_Reply):
    """Answer of `POST /leyline/release`."""

    conversation_hash: str
    purge: Purge


class PastEdit(_Reply):
    """An amortized edit that still acts on what is cached. Positions and lengths, no text."""

    edit_id: str
    turn: str | None
    """The turn that made it; None for an explicit splice."""
    position: int
    """Where it stands in the sequence of the turn that lists it."""
    removed_tokens: int
    replacement_tokens: int


class TurnState(_Reply):
    """One remembered turn."""

    turn: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Of prompt and output, in the namespace that the turn was served from."""
    own_namespace: bool
    edits: tuple[PastEdit, ...] = ()


class ConversationState(_Reply):
    """Answer of `GET /leyline/conversation`, newest turn last."""

    conversation_hash: str
    own_tokens: int
    """Slots that the conversation's own namespace holds now."""
    turns: tuple[TurnState, ...] = ()
    explicit_edits: tuple[PastEdit, ...] = ()
    """Made by `POST /leyline/splice`; positions are those of the sequence that each was made for."""


def hash_token_ids(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 hex digest of the ids as little-endian int32."""
    packed = array("i", token_ids)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return hashlib.sha256(packed.tobytes()).hexdigest()


def outcome_header(outcome: Outcome) -> str:
    """Return the outcome as one line of ASCII JSON of at most `MAX_HEADER_BYTES`.

    A long message is cut, and directives from the right until it fits; `num_directives` still counts them all.
    """
    message = outcome.message
    if message is not None and len(message) > _MAX_HEADER_MESSAGE:
        message = message[:_MAX_HEADER_MESSAGE] + "…"
    fitting = outcome.model_copy(update={"message": message})
    while True:
        line = fitting.model_dump_json(exclude_defaults=True, exclude={"v"}, ensure_ascii=True)
        if len(line) <= MAX_HEADER_BYTES or not fitting.directives:
            return line
        fitting = fitting.model_copy(update={"directives": fitting.directives[: len(fitting.directives) // 2]})
