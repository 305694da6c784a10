"""What a proxy is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from leyline_agent.policy.schema import Policy

_MIN_KEY_BYTES = 16
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Options of one proxy.

    Raises:
        ValueError: a value is out of its range; the text says which.
    """

    upstream: str
    """The server's root, with or without `/v1`."""
    policy: Policy
    policy_name: str
    """For people."""
    key: bytes = field(repr=False)
    """Conversation ids are HMACs under it: 16 secret bytes or more."""
    host: str = "127.0.0.1"
    port: int = 8100
    """0 takes a free one."""
    max_conversations: int = 1024
    """Remembered; the least recently used goes first and starts anew, which costs a re-prefill."""
    max_remembered_bytes: int = 512 << 20
    """The same for the sum of their last requests' bodies and 1 KiB a message."""
    max_body_bytes: int = 64 << 20
    """Of one request; a longer one is answered 413."""
    timeout_s: float = 600.0
    """How long the upstream may be silent, before and within an answer."""
    connect_timeout_s: float = 10.0
    stats_key: str | None = field(default=None, repr=False)
    """Asked of whoever reads the stats, where there is one."""
    scrub: bool = False
    """As for `Conversation`, and so are the next two."""
    gate: Literal["auto", "off"] = "auto"
    template_changes: Literal["amortize", "reprefill"] = "amortize"

    def __post_init__(self) -> None:
        if not self.upstream.startswith(("http://", "https://")):
            raise ValueError(f"upstream: got {self.upstream!r}, expected a URL such as http://127.0.0.1:30000")
        if {"@", "?", "#"} & set(self.upstream):
            raise ValueError(
                "upstream: expected a URL without a user, a password or a query; keys are the clients' own"
            )
        if not _has_host(self.upstream):
            raise ValueError(f"upstream: got {self.upstream!r}, expected a host too: http://127.0.0.1:30000")
        if self.upstream.rstrip("/").endswith("/completions"):
            raise ValueError(
                f"upstream: got {self.upstream!r}, expected the server's root, with or without /v1: the proxy adds the "
                "rest"
            )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: got {self.port}, expected 0 to 65535")
        if len(self.key) < _MIN_KEY_BYTES:
            raise ValueError(
                f"the proxy's key has {len(self.key)} bytes, expected {_MIN_KEY_BYTES} random ones or more: who can "
                "guess it can name every conversation; make one with `openssl rand -hex 32`"
            )
        for name in ("max_conversations", "max_remembered_bytes", "max_body_bytes", "timeout_s", "connect_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected more than 0")

    @property
    def is_public(self) -> bool:
        """Whether others than this machine may reach it."""
        return self.host not in _LOOPBACK


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading it checks the port.
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
