"""Middleware for `langchain.agents.create_agent`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise ImportError("the LangChain middleware needs: pip install 'leyline-agent[langgraph]'") from error
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage

from leyline_agent.conversation import Conversation, PolicyLike
from leyline_agent.conversation_pool import ConversationPool
from leyline_agent.integrations.chat_openai import ChatRequest, ChatTurn, ChatTurns, thread_id_of


class LeylineMiddleware(AgentMiddleware[Any, Any, Any]):
    """Applies a policy to each model request and lets the server keep its KV. The graph's state is left as it is.

    Put it last in `middleware`, so that it sees the request as it is sent, and give each agent its own. A thread is a
    conversation; without a thread id, a request belongs to the conversation that its messages go on from.

    Args:
        policy: a `Policy`, the name of one that comes along, or a path.
        key: a secret of 16 bytes or more that derives a conversation's id from its thread id, so that it survives a
            restart. By default ids are random and live as long as the middleware.
        strict: raise where a splice was refused; the answer is in `conversation(thread_id).last_answer`.
        max_conversations: how many to remember.
        options: `unexplained_changes`, `gate`, `scrub`, `plan` and `tokenizer`, as for `Conversation`.
    """

    def __init__(
        self,
        policy: PolicyLike = None,
        *,
        key: str | bytes | None = None,
        strict: bool = False,
        max_conversations: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__()
        self._pool = ConversationPool(policy, key=key, max_conversations=max_conversations, **options)
        self._turns = ChatTurns(self._pool, strict=strict)

    def conversation(self, thread_id: str) -> Conversation:
        """Return a thread's conversation: to edit it, or to read its last outcome and its telemetry."""
        return self._pool.of_thread(thread_id)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Edit the request, send it with a note, read the outcome."""
        turn = self._turns.begin(_chat_request(request), thread_id_of())
        return _finished(turn, handler(_overridden(request, turn)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As `wrap_model_call`."""
        turn = await self._turns.begin_async(_chat_request(request), thread_id_of())
        return _finished(turn, await handler(_overridden(request, turn)))


def _chat_request(request: ModelRequest[Any]) -> ChatRequest:
    messages: list[BaseMessage] = list(request.messages)
    if request.system_message is not None:
        messages.insert(0, request.system_message)
    settings = dict(request.model_settings)
    for name in ("tools", "tool_choice", "response_format"):
        if value := getattr(request, name):
            settings[name] = value
    return ChatRequest(request.model, messages, settings)


def _overridden(request: ModelRequest[Any], turn: ChatTurn) -> ModelRequest[Any]:
    messages: list[Any] = list(turn.messages)
    system_message: SystemMessage | None = None
    if request.system_message is not None and messages and isinstance(messages[0], SystemMessage):
        system_message = messages.pop(0)
    model: Any = turn.model
    return request.override(
        model=model,
        messages=messages,
        system_message=system_message,
        model_settings={**request.model_settings, **turn.settings},
    )


def _finished(turn: ChatTurn, response: ModelResponse[Any]) -> ModelResponse[Any]:
    """Commit the answer; a tool message that stands for a structured response may follow it."""
    result = list(response.result)
    for idx, message in enumerate(result):
        if isinstance(message, AIMessage):
            result[idx] = turn.finish(message)
            break
    return ModelResponse(result=result, structured_response=response.structured_response)
