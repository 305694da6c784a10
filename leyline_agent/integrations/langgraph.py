"""For a hand-built `StateGraph`: a model to call in a node in the place of the bare one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

try:
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages
    from langchain_core.prompt_values import PromptValue
    from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
except ImportError as error:
    raise ImportError("the LangGraph adapter needs: pip install '/path/to/leyline[langgraph]'") from error

from leyline_agent.conversation import Conversation, PolicyLike
from leyline_agent.conversation_pool import ConversationPool
from leyline_agent.integrations.chat_turn import REFUSALS, ChatRequest, ChatTurn, ChatTurns, Finished, caller_of
from leyline_agent.integrations.tracing import tell, tell_async


class LeylineModel(Runnable[LanguageModelInput, AIMessage]):
    """A chat model whose history is edited on the way out. Made by `with_leyline`; safe in several nodes and threads.

    It streams where the graph does (`stream_mode="messages"`), as the bare model would.
    """

    def __init__(self, model: Runnable[Any, Any], pool: ConversationPool, turns: ChatTurns) -> None:
        self._model, self._pool, self._turns = model, pool, turns

    def conversation(self, thread_id: str) -> Conversation:
        """Return a thread's conversation, the last used one: to read its last outcome and its telemetry, or to edit it.

        Edits by hand are those of all conversations of the thread.
        """
        return self._pool.of_thread(thread_id)

    def conversations(self, thread_id: str) -> list[Conversation]:
        """Return all conversations of a thread: those of its nodes and of its branches are among them."""
        return self._pool.all_of_thread(thread_id)

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> LeylineModel:
        """Return this model with tools bound to it. It has the same conversations."""
        bound: Runnable[Any, Any] = self._model.bind_tools(tools, **kwargs)  # type: ignore[attr-defined]
        return LeylineModel(bound, self._pool, self._turns)

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Send the edited messages and return the answer."""
        return self._call(_messages(input), ensure_config(config), kwargs, None)[0]

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """As `invoke`."""
        return (await self._call_async(_messages(input), ensure_config(config), kwargs, None))[0]

    def update(
        self, messages: Sequence[BaseMessage], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[BaseMessage]:
        """Send the edited messages and return what writes answer and edits into the graph's state.

        For `return {"messages": model.update(state["messages"])}` in a node, where the state's reducer is
        `add_messages`; the checkpoints hold the edited history then. No other node of the same step may remove or
        replace messages. `invoke` leaves the state's messages as they are.
        """
        answer, finished = self._call(list(messages), ensure_config(config), kwargs, _ids(messages))
        return [*finished.updates, answer]

    async def aupdate(
        self, messages: Sequence[BaseMessage], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[BaseMessage]:
        """As `update`."""
        answer, finished = await self._call_async(list(messages), ensure_config(config), kwargs, _ids(messages))
        return [*finished.updates, answer]

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessage]:
        """Send the edited messages and yield the answer's chunks. Breaking off leaves the turn unanswered."""
        config = ensure_config(config)
        turn = self._turns.begin(ChatRequest(self._model, _messages(input), kwargs), caller_of(config))
        seen: list[AIMessage] = []
        # The answer's headers come with its first chunk. Between chunks this is the caller's context.
        try:
            with turn.listening():
                chunks = _bound(self._model, turn, kwargs).stream(turn.messages, config)
                first = next(chunks, None)
        except REFUSALS as error:
            turn = turn.without_note(error)
            chunks = _bound(self._model, turn, kwargs).stream(turn.messages, config)
            first = next(chunks, None)
        while first is not None:
            seen.append(first)
            yield first
            first = next(chunks, None)
        self._tell(turn.finish_streamed(seen), config)

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessage]:
        """As `stream`."""
        config = ensure_config(config)
        turn = await self._turns.begin_async(ChatRequest(self._model, _messages(input), kwargs), caller_of(config))
        seen: list[AIMessage] = []
        try:
            with turn.listening():
                chunks = _bound(self._model, turn, kwargs).astream(turn.messages, config)
                first = await anext(chunks, None)
        except REFUSALS as error:
            turn = turn.without_note(error)
            chunks = _bound(self._model, turn, kwargs).astream(turn.messages, config)
            first = await anext(chunks, None)
        while first is not None:
            seen.append(first)
            yield first
            first = await anext(chunks, None)
        await self._tell_async(turn.finish_streamed(seen), config)

    def _call(
        self,
        messages: list[BaseMessage],
        config: RunnableConfig,
        kwargs: dict[str, Any],
        state_ids: frozenset[str] | None,
    ) -> tuple[AIMessage, Finished]:
        turn = self._turns.begin(ChatRequest(self._model, messages, kwargs), caller_of(config))
        try:
            with turn.listening():
                answer = _bound(self._model, turn, kwargs).invoke(turn.messages, config)
        except REFUSALS as error:
            turn = turn.without_note(error)
            answer = _bound(self._model, turn, kwargs).invoke(turn.messages, config)
        finished = turn.finish(answer, state_ids)
        self._tell(finished, config)
        return answer, finished

    async def _call_async(
        self,
        messages: list[BaseMessage],
        config: RunnableConfig,
        kwargs: dict[str, Any],
        state_ids: frozenset[str] | None,
    ) -> tuple[AIMessage, Finished]:
        turn = await self._turns.begin_async(ChatRequest(self._model, messages, kwargs), caller_of(config))
        try:
            with turn.listening():
                answer = await _bound(self._model, turn, kwargs).ainvoke(turn.messages, config)
        except REFUSALS as error:
            turn = turn.without_note(error)
            answer = await _bound(self._model, turn, kwargs).ainvoke(turn.messages, config)
        finished = turn.finish(answer, state_ids)
        await self._tell_async(finished, config)
        return answer, finished

    def _tell(self, finished: Finished, config: RunnableConfig) -> None:
        if finished.attributes:
            tell(finished.attributes, config)
        self._turns.check(finished)

    async def _tell_async(self, finished: Finished, config: RunnableConfig) -> None:
        if finished.attributes:
            await tell_async(finished.attributes, config)
        self._turns.check(finished)


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

    In a node: `return {"messages": [model.invoke(state["messages"])]}`. The thread id is the graph's, and each node a
    conversation of its own; without a thread id, a call belongs to the conversation that its messages go on from. The
    arguments are those of `LeylineMiddleware`; in the place of `persist` there is `update`.

    Raises:
        TypeError: `model` is no chat model, with tools bound to it or not; or there is `persist`.
    """
    if "persist" in options:
        raise TypeError("a model cannot write the graph's state: return {'messages': model.update(...)} from the node")
    if not isinstance(model, Runnable):
        raise TypeError(f"got a {type(model).__name__}, expected a chat model such as ChatOpenAI(...)")
    pool = ConversationPool(policy, key=key, max_conversations=max_conversations, **options)
    return LeylineModel(model, pool, ChatTurns(pool, strict=strict))


def _bound(model: Runnable[Any, Any], turn: ChatTurn, kwargs: dict[str, Any]) -> Runnable[Any, Any]:
    return model.bind(**{**kwargs, **turn.settings})


def _ids(messages: Sequence[BaseMessage]) -> frozenset[str]:
    return frozenset(str(message.id) for message in messages if message.id is not None)


def _messages(input_: LanguageModelInput) -> list[BaseMessage]:
    if isinstance(input_, PromptValue):
        return input_.to_messages()
    if isinstance(input_, str):
        return [HumanMessage(input_)]
    return convert_to_messages(input_)
