"""The pure half: messages, edits, token diff, splice plan and the wire models. No HTTP, torch, clock or disk."""

from leyline_agent.core.conversation_id import check_conversation_id
from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.edits import Edit, apply_edits
from leyline_agent.core.messages import Message, ToolCall, messages_from_openai
from leyline_agent.core.plan import KeptRun, SplicePlan, SpliceStep, apply_directives, check_directives, make_plan
from leyline_agent.core.protocol import Directive, Mode, Note, Outcome, Purge, Reason, Status, hash_token_ids
from leyline_agent.core.spans import Span

__all__ = [
    "Directive",
    "Edit",
    "KeptRun",
    "Message",
    "Mode",
    "Note",
    "Outcome",
    "Purge",
    "Reason",
    "Span",
    "SplicePlan",
    "SpliceStep",
    "Status",
    "ToolCall",
    "apply_directives",
    "apply_edits",
    "check_conversation_id",
    "check_directives",
    "diff_token_ids",
    "hash_token_ids",
    "make_plan",
    "messages_from_openai",
]
