"""What a policy does to a recorded conversation, turn by turn, before it is switched on. Needs no server."""

from leyline_agent.errors import RenderError
from leyline_agent.explain.conversation_file import ConversationFileError, RecordedConversation, read_conversation
from leyline_agent.explain.meters import EstimatedMeter, ExactMeter, Meter
from leyline_agent.explain.preview import Preview, PreviewTurn, preview
from leyline_agent.explain.reuse import Change, Reuse

__all__ = [
    "Change",
    "ConversationFileError",
    "EstimatedMeter",
    "ExactMeter",
    "Meter",
    "Preview",
    "PreviewTurn",
    "RecordedConversation",
    "RenderError",
    "Reuse",
    "preview",
    "read_conversation",
]
