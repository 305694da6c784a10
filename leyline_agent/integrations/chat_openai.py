"""One turn of a `ChatOpenAI`: our note merged into what the user set, the outcome read off the answer.

LangChain replaces a model's `extra_body` by a bound or called one instead of merging them. So does this module find
the one that LangChain would send, and adds to a copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain.agents.structured_output import AutoStrategy, ToolStrategy
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.config import get_config

from leyline_agent.answers import read_outcome
from leyline_agent.conversation import Conversation, PreparedTurn
from leyline_agent.conversation_pool import ConversationPool
from leyline_agent.integrations.langchain_messages import apply_edits_to_langchain, to_openai
from leyline_agent.telemetry import Usage, raise_fallback

_BODY_SETTINGS = ("tools", "tool_choice", "response_format", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A model call as LangChain is about to make it."""

    model: Runnable[Any, Any]
    """A `ChatOpenAI`, bound or not."""
    messages: Sequence[BaseMessage]
    settings: Mapping[str, Any]
    """Keyword arguments of the call, tools included where they are."""

    def setting(self, name: str) -> Any:
        """Return the value that LangChain would send: the call's, else the binding's, else the model's."""
        model, bound = unwrap(self.model)
        for source in (self.settings, bound, getattr(model, "model_kwargs", None) or {}):
            if name in source:
                return source[name]
        return getattr(model, "model_name" if name == "model" else name, None)

    def body(self, chat_dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of the chat request that a conversation looks at."""
        body = {**(self.setting("extra_body") or {}), "model": self.setting("model"), "messages": chat_dicts}
        for name in _BODY_SETTINGS:
            if (value := self.setting(name)) is not None:
                body[name] = [convert_to_openai_tool(tool) for tool in value] if name == "tools" else value
        return body


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A model call ready to be made: the edited messages, and the model and settings that carry the note."""

    model: Runnable[Any, Any]
    messages: list[BaseMessage]
    settings: dict[str, Any]
    """The settings of the call that differ from before: `extra_body` and `extra_headers`."""
    _pool: ConversationPool
    _conversation: Conversation
    _prepared: PreparedTurn
    _named: bool
    _takes_note: bool
    _shows_headers: bool
    """Whether the user wants the headers in the answer."""
    _strict: bool

    def finish(self, answer: AIMessage) -> AIMessage:
        """Commit the turn and return the answer as it would be without us.

        Raises:
            SpliceRejectedError: with `strict`, the splice was refused.
            UnsupportedServerError: with `strict`, the server runs no plugin.
        """
        if not self._takes_note:
            return answer
        headers = answer.response_metadata.get("headers")
        outcome = read_outcome(headers or {})
        self._conversation.commit(
            self._prepared,
            to_openai([answer])[0],
            outcome,
            _usage(answer),
            expects_outcome=headers is not None,
        )
        if not self._named:
            self._pool.keep(self._conversation)
        if self._strict and self._prepared.note is not None and headers is not None:
            raise_fallback(outcome)
        if self._shows_headers or headers is None:
            return answer
        metadata = {name: value for name, value in answer.response_metadata.items() if name != "headers"}
        return answer.model_copy(update={"response_metadata": metadata})


class ChatTurns:
    """Makes turns out of model calls. Holds the conversations."""

    def __init__(self, pool: ConversationPool, *, strict: bool) -> None:
        self._pool, self._strict = pool, strict

    def begin(self, request: ChatRequest, thread_id: str | None) -> ChatTurn:
        """Prepare a turn."""
        chat_dicts = to_openai(request.messages)
        conversation = self._conversation(thread_id, chat_dicts)
        prepared = conversation.prepare(request.body(chat_dicts))
        return self._turn(request, chat_dicts, conversation, prepared, thread_id is not None)

    async def begin_async(self, request: ChatRequest, thread_id: str | None) -> ChatTurn:
        """As `begin`."""
        chat_dicts = to_openai(request.messages)
        conversation = self._conversation(thread_id, chat_dicts)
        prepared = await conversation.prepare_async(request.body(chat_dicts))
        return self._turn(request, chat_dicts, conversation, prepared, thread_id is not None)

    def _conversation(self, thread_id: str | None, chat_dicts: Sequence[dict[str, Any]]) -> Conversation:
        return self._pool.of_messages(chat_dicts) if thread_id is None else self._pool.of_thread(thread_id)

    def _turn(
        self,
        request: ChatRequest,
        chat_dicts: Sequence[dict[str, Any]],
        conversation: Conversation,
        prepared: PreparedTurn,
        named: bool,
    ) -> ChatTurn:
        model, _ = unwrap(request.model)
        takes_note = _takes_note(model)
        settings: dict[str, Any] = {}
        shown = request.model
        if takes_note and prepared.note is not None:
            settings = {
                "extra_body": {
                    **(request.setting("extra_body") or {}),
                    "custom_params": prepared.body["custom_params"],
                },
                "extra_headers": {**(request.setting("extra_headers") or {}), **prepared.headers},
            }
            if not _hides_headers(request):
                shown = _showing_headers(request.model)
        return ChatTurn(
            model=shown,
            messages=apply_edits_to_langchain(request.messages, chat_dicts, prepared.edits),
            settings=settings,
            _pool=self._pool,
            _conversation=conversation,
            _prepared=prepared,
            _named=named,
            _takes_note=takes_note,
            _shows_headers=bool(getattr(model, "include_response_headers", False)),
            _strict=self._strict,
        )


def unwrap(model: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """Return the model under its bindings, and what they bind."""
    bound: dict[str, Any] = {}
    while isinstance(model, RunnableBinding):
        bound = {**model.kwargs, **bound}
        model = model.bound
    return model, bound


def thread_id_of(config: RunnableConfig | None = None) -> str | None:
    """Return the thread id of a config, or of the graph that runs here; None where there is none."""
    if config is None:
        try:
            config = get_config()
        except RuntimeError:
            return None
    thread_id = (config.get("configurable") or {}).get("thread_id")
    return None if thread_id is None else str(thread_id)


def _takes_note(model: Runnable[Any, Any]) -> bool:
    """Tell whether it is a chat completions model of langchain-openai; another one would choke on a note."""
    return hasattr(model, "include_response_headers") and not getattr(model, "use_responses_api", None)


def _hides_headers(request: ChatRequest) -> bool:
    """Tell whether langchain-openai would warn if asked for headers, as it does beside a response format.

    LangChain turns the two strategies into tools, `AutoStrategy` at least for models that it has not heard of.
    """
    response_format = request.setting("response_format")
    return response_format is not None and not isinstance(response_format, AutoStrategy | ToolStrategy)


def _showing_headers(model: Runnable[Any, Any]) -> Runnable[Any, Any]:
    if isinstance(model, RunnableBinding):
        return model.model_copy(update={"bound": _showing_headers(model.bound)})
    shown: Runnable[Any, Any] = model.model_copy(update={"include_response_headers": True})  # type: ignore[attr-defined]
    return shown


def _usage(answer: AIMessage) -> Usage | None:
    usage = answer.usage_metadata
    if usage is None:
        return None
    return Usage(usage["input_tokens"], usage["output_tokens"], usage.get("input_token_details", {}).get("cache_read"))
