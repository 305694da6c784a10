"""Which cache namespace a conversation's rows live in.

Rows downstream of an amortized edit are no function of their token ids, so they must never answer anybody else. They
live under a `cache_salt` that only this server can derive. The shared namespace is the caller's own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_PREFIX = "leyline-"
_PARKED = "-parked"


def new_nonce() -> str:
    """Return what makes a namespace new: a conversation whose rows must not be reached again gets another one."""
    return secrets.token_hex(16)


def own_salt(secret: str, *, conversation_hash: str, caller_salt: str | None, nonce: str) -> str:
    """Return the `cache_salt` of a conversation's own namespace.

    HMAC-SHA256 under the server's secret over the caller's salt, the hashed conversation id and a nonce. The nonce is
    random and dies with the memory of the conversation, so that a namespace forgotten or closed is never met again.
    """
    fields = "\x00".join(("leyline", caller_salt or "", conversation_hash, nonce))
    return _PREFIX + hmac.new(secret.encode(), fields.encode(), hashlib.sha256).hexdigest()


def is_own_salt(cache_salt: str | None) -> bool:
    """Whether a `cache_salt` is one of those that this server derives. No client may name one."""
    return cache_salt is not None and cache_salt.startswith(_PREFIX)


def parked_salt(own: str) -> str:
    """Return where a splice of several runs keeps what it has not placed yet; no request is ever served from there."""
    return own + _PARKED
