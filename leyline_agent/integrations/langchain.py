"""Middleware for `langchain.agents.create_agent`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

try:
    from langchain.agents.middleware import (
        AgentMiddleware,
        ExtendedModelResponse,
        ModelRequest,
        ModelResponse,
    )
except ImportError as error:
    raise ImportError("the LangChain middleware needs: pip install '/path/to/leyline[langgraph]'") from error
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langgraph.types import Command

from leyline_agent.conversation import Conversation, PolicyLike
from leyline_agent.conversation_pool import ConversationPool
from leyline_agent.integrations.chat_turn import REFUSALS, ChatRequest, ChatTurn, ChatTurns, Finished, caller_of
from leyline_agent.integrations.tracing import tell, tell_async

_Result = ModelResponse[Any] | ExtendedModelResponse[Any]


class LeylineMiddleware(AgentMiddleware[Any, Any, Any]):
    """Applies a policy to each model request and lets the server keep its KV. The graph's state is left as it is.

    Put it last in `middleware`, so that it sees the request as it is sent, and give each agent its own. A thread is a
    conversation, and each subgraph and each branch in it another; without a thread id, a request belongs to the
    conversation that its messages go on from.

    Args:
        policy: a `Policy`, the name of one that comes along, or a path.
        key: a secret of 16 bytes or more that derives a conversation's id from thread id, node and server, so that it
            survives a restart. By default ids are random and live as long as the middleware.
        persist: write the edits into the graph's state, so that checkpoints hold the edited history. No other node of
            the same step may remove or replace messages.
        strict: raise where a splice was refused; the answer is in `conversation(thread_id).last_answer`.
        max_conversations: how many threads to remember.
        options: `unexplained_changes`, `template_changes`, `gate`, `scrub`, `counter`, `plan` and `tokenizer`, as for
            `Conversation`.
    """

    def __init__(
        self,
        policy: PolicyLike = None,
        *,
        key: str | bytes | None = None,
        persist: bool = False,
        strict: bool = False,
        max_conversations: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__()
        self._pool = ConversationPool(policy, key=key, max_conversations=max_conversations, **options)
        self._turns = ChatTurns(self._pool, strict=strict)
        self._persist = persist

    def conversation(self, thread_id: str) -> Conversation:
        """Return a thread's conversation, the last used one: to read its last outcome and its telemetry, or to edit it.

        Edits by hand are those of all conversations of the thread.
        """
        return self._pool.of_thread(thread_id)

    def conversations(self, thread_id: str) -> list[Conversation]:
        """Return all conversations of a thread: those of its subgraphs and of its branches are among them."""
        return self._pool.all_of_thread(thread_id)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> _Result:
        """Edit the request, send it with a note, read the outcome."""
        turn = self._turns.begin(_chat_request(request), caller_of())
        try:
            with turn.listening():
                response = handler(_overridden(request, turn))
        except REFUSALS as error:
            turn = turn.without_note(error)
            response = handler(_overridden(request, turn))
        finished = self._finish(turn, request, response)
        if finished.attributes:
            tell(finished.attributes)
        self._turns.check(finished)
        return _result(response, finished)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> _Result:
        """As `wrap_model_call`."""
        turn = await self._turns.begin_async(_chat_request(request), caller_of())
        try:
            with turn.listening():
                response = await handler(_overridden(request, turn))
        except REFUSALS as error:
            turn = turn.without_note(error)
            response = await handler(_overridden(request, turn))
        finished = self._finish(turn, request, response)
        if finished.attributes:
            await tell_async(finished.attributes)
        self._turns.check(finished)
        return _result(response, finished)

    def _finish(self, turn: ChatTurn, request: ModelRequest[Any], response: ModelResponse[Any]) -> Finished:
        """Commit the answer; a tool message that stands for a structured response may follow it."""
        state_ids = None
        if self._persist:
            state_ids = frozenset(str(message.id) for message in request.state["messages"])
        answer = next((message for message in response.result if isinstance(message, AIMessage)), None)
        return Finished() if answer is None else turn.finish(answer, state_ids)


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
    return request.override(
        messages=messages,
        system_message=system_message,
        model_settings={**request.model_settings, **turn.settings},
    )


def _result(response: ModelResponse[Any], finished: Finished) -> _Result:
    if not finished.updates:
        return response
    return ExtendedModelResponse(response, Command(update={"messages": finished.updates}))
