"""Edit an agent's history by policy and let the serving engine keep its KV cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyline_agent.answers import ChatReply
    from leyline_agent.client import AsyncClient, ChatStream, Client
    from leyline_agent.conversation import Conversation
    from leyline_agent.conversation_pool import ConversationPool
    from leyline_agent.core.protocol import (
        ConversationState,
        Mode,
        Outcome,
        Purge,
        Reason,
        ReleaseReply,
        SpliceReply,
        SpliceRequest,
        Status,
    )
    from leyline_agent.errors import (
        LeylineError,
        PlanError,
        PolicyError,
        RenderError,
        SpliceRejectedError,
        SpliceTransportError,
        UnsupportedServerError,
    )
    from leyline_agent.policy.loader import load_policy
    from leyline_agent.policy.schema import Policy
    from leyline_agent.prepared_turn import PreparedTurn
    from leyline_agent.telemetry import Telemetry, Usage, turn_attributes

__all__ = [
    "AsyncClient",
    "ChatReply",
    "ChatStream",
    "Client",
    "Conversation",
    "ConversationPool",
    "ConversationState",
    "LeylineError",
    "Mode",
    "Outcome",
    "PlanError",
    "Policy",
    "PolicyError",
    "PreparedTurn",
    "Purge",
    "Reason",
    "ReleaseReply",
    "RenderError",
    "SpliceRejectedError",
    "SpliceReply",
    "SpliceRequest",
    "SpliceTransportError",
    "Status",
    "Telemetry",
    "UnsupportedServerError",
    "Usage",
    "load_policy",
    "turn_attributes",
]

_MODULES = {
    "answers": ("ChatReply",),
    "client": ("AsyncClient", "ChatStream", "Client"),
    "conversation": ("Conversation",),
    "conversation_pool": ("ConversationPool",),
    "core.protocol": (
        "ConversationState",
        "Mode",
        "Outcome",
        "Purge",
        "Reason",
        "ReleaseReply",
        "SpliceReply",
        "SpliceRequest",
        "Status",
    ),
    "errors": (
        "LeylineError",
        "PlanError",
        "PolicyError",
        "RenderError",
        "SpliceRejectedError",
        "SpliceTransportError",
        "UnsupportedServerError",
    ),
    "policy.loader": ("load_policy",),
    "policy.schema": ("Policy",),
    "prepared_turn": ("PreparedTurn",),
    "telemetry": ("Telemetry", "Usage", "turn_attributes"),
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the server's plugin imports `leyline_agent.core` and must not pull in an HTTP client.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
