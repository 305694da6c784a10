"""For a hand-built `StateGraph`: a model to call in a node in the place of the bare one."""

from __future__ import annotations

from typing import Any

try:
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages
    from langchain_core.prompt_values import PromptValue
    from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
except ImportError as error:
    raise ImportError("the LangGraph adapter needs: pip install 'leyline-agent[langgraph]'") from error

from leyline_agent.conversation import Conversation, PolicyLike
from leyline_agent.conversation_pool import ConversationPool
from leyline_agent.integrations.chat_openai import ChatRequest, ChatTurn, ChatTurns, thread_id_of, unwrap


class LeylineModel(Runnable[LanguageModelInput, AIMessage]):
    """A `ChatOpenAI` whose history is edited on the way out. Made by `with_leyline`; safe in several nodes and threads.

    It streams where the graph does (`stream_mode="messages"`), as the bare model would.
    """

    def __init__(self, model: Runnable[Any, Any], pool: ConversationPool, *, strict: bool) -> None:
        self._model, self._pool = model, pool
        self._turns = ChatTurns(pool, strict=strict)

    def conversation(self, thread_id: str) -> Conversation:
        """Return a thread's conversation: to edit it, or to read its last outcome and its telemetry."""
        return self._pool.of_thread(thread_id)

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Send the edited messages and return the answer."""
        config = ensure_config(config)
        turn = self._turns.begin(self._request(input, kwargs), thread_id_of(config))
        return turn.finish(_bound(turn, kwargs).invoke(turn.messages, config))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """As `invoke`."""
        config = ensure_config(config)
        turn = await self._turns.begin_async(self._request(input, kwargs), thread_id_of(config))
        return turn.finish(await _bound(turn, kwargs).ainvoke(turn.messages, config))

    def _request(self, input_: LanguageModelInput, kwargs: dict[str, Any]) -> ChatRequest:
        return ChatRequest(self._model, _messages(input_), kwargs)


def with_leyline(
    model: Runnable[Any, Any],
    policy: PolicyLike = None,
    *,
    key: str | bytes | None = None,
    strict: bool = False,
    max_conversations: int = 1024,
    **options: Any,
) -> LeylineModel:
    """Return a model that applies a policy to the messages it is called with and sends them with a note.

    In a node: `return {"messages": [model.invoke(state["messages"])]}`. The thread id is the graph's; without one, a
    call belongs to the conversation that its messages go on from. The arguments are those of `LeylineMiddleware`;
    tools are bound to `model` beforehand.

    Raises:
        TypeError: `model` is no ChatOpenAI, bound or not.
    """
    inner, _ = unwrap(model)
    if not hasattr(inner, "include_response_headers"):
        raise TypeError(f"got a {type(inner).__name__}, expected a ChatOpenAI, with tools bound to it or not")
    pool = ConversationPool(policy, key=key, max_conversations=max_conversations, **options)
    return LeylineModel(model, pool, strict=strict)


def _bound(turn: ChatTurn, kwargs: dict[str, Any]) -> Runnable[Any, Any]:
    return turn.model.bind(**{**kwargs, **turn.settings})


def _messages(input_: LanguageModelInput) -> list[BaseMessage]:
    if isinstance(input_, PromptValue):
        return input_.to_messages()
    if isinstance(input_, str):
        return [HumanMessage(input_)]
    return convert_to_messages(input_)
