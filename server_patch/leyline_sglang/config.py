"""Settings of the plugin, read once from `LEYLINE_*` environment variables."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyline_agent.core.protocol import MAX_NOTE_BYTES
from leyline_agent.errors import LeylineError

PREFIX = "LEYLINE_"
_ELSEWHERE = (
    "api_key",
    "cache",
    "cache_salt",
    "conversation",
    "debug_gym_python",
    "mini_nightmare",
    "proxy_key",
    "proxy_stats_key",
    "trajectories",
)
"""Variables of the same prefix that the client side, the evals and the tests read."""


class Config(BaseModel):
    """Every setting; the variable is the field's name in capitals behind `LEYLINE_`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    """Off: notes are taken off the requests and answered `disabled`; nothing is spliced or remembered."""
    secret: str = Field(default_factory=lambda: secrets.token_hex(32), min_length=16, repr=False)
    """Key of the namespaces. Random for each process unless given; their nonces are random in any case."""
    max_note_bytes: int = Field(default=MAX_NOTE_BYTES, gt=0)
    """Longer notes and bodies are refused before they are parsed."""
    max_directives: int = Field(default=256, gt=0)
    """Directives of one turn that are carried out, from the left; what lies right of them is prefilled."""
    diff_budget: int = Field(default=4_000_000, gt=0)
    """Elementary steps of one diff; past them the turn is re-prefilled."""
    in_place: bool = True
    """Move rows that nobody else needs where they are. Off: every splice copies, and the edited turn stays cached."""
    one_step: bool = True
    """Compute R in the batch of the request that reads it, where the attention backend allows. Off: in one before."""
    gate: bool = True
    """Prefill an edited turn again where that is the quicker way, unless its note says `gate: off`. Off: splice all."""
    turns_per_conversation: int = Field(default=8, gt=0)
    """Sequences remembered for each conversation, so that a branch or a retry finds its own base."""
    max_conversations: int = Field(default=65_536, gt=0)
    """Conversations remembered, whether or not they have turns; the least recently used goes first."""
    conversation_memory_tokens: int = Field(default=1_048_576, gt=0)
    """Token ids remembered of one conversation; its oldest turn goes first."""
    memory_tokens: int = Field(default=16_777_216, gt=0)
    """Token ids remembered in all, 4 bytes each; the least recently used conversation goes first."""
    scope_memory_tokens: int = Field(default=4_194_304, gt=0)
    """The same for each (extra_key, cache_salt), so that one tenant cannot push out the others."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long a request waits for the scheduler's answer, or for a diff in a thread, before it is served plain."""


def load_config(environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings.

    Raises:
        LeylineError: a variable is unknown or has a wrong value; the message names it.
    """
    environ = os.environ if environ is None else environ
    given = {name[len(PREFIX) :].lower(): text for name, text in environ.items() if name.startswith(PREFIX)}
    for elsewhere in _ELSEWHERE:
        given.pop(elsewhere, None)
    try:
        return Config.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        known = ", ".join(PREFIX + each.upper() for each in Config.model_fields)
        # This is logged and served. What an unknown variable holds may be somebody's secret.
        got = "" if field == "secret" or field not in Config.model_fields else f", got {first['input']!r}"
        raise LeylineError(f"{PREFIX}{field.upper()}: {first['msg']}{got}; the settings are {known}") from None
