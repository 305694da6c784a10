"""One turn of a chat model: our note merged into what the user set, the outcome heard as the answer comes in.

LangChain replaces a model's `extra_body` by a bound or called one instead of merging them. So does this module find
the one that LangChain would send, and adds to a copy of it. The model itself is never touched, nor is the answer. What
we cannot read is sent as it came, without a note.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, message_chunk_to_message
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.config import get_config

from leyline_agent.answers import read_outcome
from leyline_agent.conversation import Conversation
from leyline_agent.conversation_pool import ConversationPool, Place
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.core.protocol import OUTCOME_HEADER, ROUTING_HEADER, Outcome
from leyline_agent.digests import AnsweredTurn
from leyline_agent.integrations.langchain_messages import apply_edits_to_langchain, to_openai
from leyline_agent.integrations.openai_client import Heard, listening, server_of
from leyline_agent.integrations.persist import persist_edits
from leyline_agent.noted_server import NotedServer
from leyline_agent.prepared_turn import PreparedTurn
from leyline_agent.telemetry import Attribute, Usage, raise_fallback, turn_attributes

logger = logging.getLogger("leyline_agent")

_BODY_SETTINGS = ("tools", "tool_choice", "response_format", "reasoning_effort")

REFUSALS = (openai.BadRequestError, openai.UnprocessableEntityError)
"""How a server says that it does not know a field; see `ChatTurn.without_note`."""


class Caller(NamedTuple):
    """Where a model call comes from."""

    thread_id: str | None
    node: str
    """As `Place.node`."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A model call as LangChain is about to make it."""

    model: Runnable[Any, Any]
    """A chat model, bound or not."""
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

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the fields of the chat request that a conversation looks at; `messages` are the request's."""
        body = {**(self.setting("extra_body") or {}), "model": self.setting("model"), "messages": messages}
        for name in _BODY_SETTINGS:
            if (value := self.setting(name)) is not None:
                body[name] = [convert_to_openai_tool(tool) for tool in value] if name == "tools" else value
        return body

    def server(self, body: Mapping[str, Any]) -> str | None:
        """Return the server that the call goes to and that may be sent a note; None where there is none."""
        model, bound = unwrap(self.model)
        if not isinstance(model, BaseChatModel):
            return None
        uses_responses = getattr(model, "_use_responses_api", None)
        if uses_responses is not None and uses_responses({**bound, **self.settings, "tools": body.get("tools", ())}):
            return None
        return server_of(model)


@dataclass(frozen=True, slots=True)
class Call:
    """A model call, and the conversation that it belongs to."""

    request: ChatRequest
    caller: Caller
    server: str | None
    """The one whose conversation it is; None where there is none that could be sent a note."""
    takes_note: bool
    """Whether to send it one now."""
    messages: list[Message]
    """The request's, parsed."""
    body: dict[str, Any]
    conversation: Conversation


@dataclass(slots=True)
class Finished:
    """What came of a turn, beside its answer."""

    attributes: dict[str, Attribute] = field(default_factory=dict)
    """For telemetry; empty where the turn had no note, or nothing is known of it."""
    updates: list[BaseMessage] = field(default_factory=list)
    """What writes the edits into the graph's state, if they are kept there."""
    is_heard: bool = False
    """Whether the response would have shown an outcome."""
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A model call ready to be made: the edited messages, and the settings that carry the note."""

    messages: list[BaseMessage]
    settings: dict[str, Any]
    """The settings of the call that differ from before: `extra_body` and `extra_headers`."""
    _turns: ChatTurns
    _begun: tuple[Call, PreparedTurn] | None
    """None for a call that goes out as it came."""
    _is_resent: bool = False
    _heard: list[Heard] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the answer, which is to come in here."""
        with ExitStack() as stack:
            if self._begun is not None:
                call, prepared = self._begun
                try:
                    heard = stack.enter_context(
                        listening(unwrap(call.request.model)[0], prepared.headers.get(ROUTING_HEADER))
                    )
                    self._heard[:] = [heard]
                except Exception as error:
                    self._turns.tell_bug(error)
            yield

    def without_note(self, error: openai.APIStatusError) -> ChatTurn:
        """Return the turn to make where the server has refused this one and may not know the field of the note.

        Raises:
            openai.APIStatusError: the error as it came, where it is about something else.
        """
        server = self._begun[0].server if self._begun is not None and self.settings else None
        if server is None or isinstance(error, ContextOverflowError) or not self._turns.may_be_refused(server, error):
            raise error
        return replace(self, settings={}, _is_resent=True)

    def finish(self, answer: AIMessage, state_ids: frozenset[str] | None = None) -> Finished:
        """Commit the turn. The answer stays as it is, and is the caller's whatever we make of it.

        Args:
            answer: what the model said.
            state_ids: to keep the edits in the graph's state, the ids of the messages that it holds.
        """
        if self._begun is None:
            return Finished()
        try:
            return self._finish(*self._begun, answer, state_ids)
        except Exception as error:
            self._turns.tell_bug(error)
            return Finished()

    def finish_streamed(self, chunks: Sequence[BaseMessage]) -> Finished:
        """As `finish`, for an answer that came in these pieces; none is no turn."""
        try:
            whole: Any = None
            for chunk in chunks:
                whole = chunk if whole is None else whole + chunk
            if whole is None:
                return Finished()
            answer = message_chunk_to_message(whole) if isinstance(whole, AIMessageChunk) else whole
            if not isinstance(answer, AIMessage):
                raise TypeError(f"the pieces of an answer make a {type(answer).__name__}, expected an AIMessage")
        except Exception as error:
            self._turns.tell_bug(error)
            return Finished()
        return self.finish(answer)

    def _finish(
        self, call: Call, prepared: PreparedTurn, answer: AIMessage, state_ids: frozenset[str] | None
    ) -> Finished:
        finished, held = Finished(), None
        if state_ids is not None:
            finished.updates, held = persist_edits(call.request.messages, call.messages, prepared, state_ids)
        if call.server is None or not call.takes_note:
            return finished
        if self._is_resent:
            self._turns.refused(call.server)
            return finished
        if not self._heard:
            return finished
        heard = self._heard[0]
        if prepared.note is not None and heard.is_connected and not heard.is_success:
            # A cache answered, or another middleware, or a model that does not pass on what it is called with.
            logger.info("an answer came, but no response to the request that carried its note was seen")
            return finished
        outcome, usage = read_outcome(heard.headers or {}), _usage(answer)
        finished.is_heard, finished.outcome = prepared.note is not None and heard.headers is not None, outcome
        if finished.is_heard:
            self._turns.heard(call.server, has_outcome=OUTCOME_HEADER in (heard.headers or {}))
        turn = call.conversation.commit(
            prepared, to_openai([answer])[0], outcome, usage, expects_outcome=heard.headers is not None, held=held
        )
        self._turns.keep(call, turn)
        if prepared.note is not None:
            finished.attributes = turn_attributes(outcome, usage, conversation_id=call.conversation.id)
        return finished


class ChatTurns:
    """Makes turns out of model calls. Holds the conversations."""

    def __init__(self, pool: ConversationPool, *, strict: bool) -> None:
        self._pool, self._strict = pool, strict
        self._servers: dict[str, NotedServer] = {}
        self._said: set[str] = set()

    def begin(self, request: ChatRequest, caller: Caller) -> ChatTurn:
        """Prepare a turn; where we cannot, one that goes out as it came."""
        try:
            call = self._call(request, caller)
            return self._turn(call, call.conversation.prepare(call.body))
        except Exception as error:
            return self._plain(request, error)

    async def begin_async(self, request: ChatRequest, caller: Caller) -> ChatTurn:
        """As `begin`."""
        try:
            call = self._call(request, caller)
            return self._turn(call, await call.conversation.prepare_async(call.body))
        except Exception as error:
            return self._plain(request, error)

    def check(self, finished: Finished) -> None:
        """With `strict`, raise what the server did not do.

        Raises:
            SpliceRejectedError: the splice was refused.
            UnsupportedServerError: the server runs no plugin.
        """
        if self._strict and finished.is_heard:
            raise_fallback(finished.outcome)

    def keep(self, call: Call, turn: AnsweredTurn) -> None:
        """Have the next call of this caller find the conversation."""
        thread_id, node = call.caller
        if thread_id is None:
            self._pool.keep(call.conversation)
        else:
            self._pool.answered(thread_id, Place(node, call.server or ""), call.messages, turn, call.conversation)

    def refused(self, server: str) -> None:
        """Take note of a server that has refused a note and answered without it."""
        if self._server(server).add_refused():
            self._say_once(
                f"refused {server}",
                f"{server} refuses requests with a note; for ten minutes it gets edited prompts without one",
            )

    def may_be_refused(self, server: str, error: openai.APIStatusError) -> bool:
        """Tell whether a server's error may be about the note."""
        if OUTCOME_HEADER not in error.response.headers:
            return self._server(server).may_be_refused(str(error).encode(errors="replace"))
        self._server(server).add_taken(has_outcome=True)
        return False

    def heard(self, server: str, *, has_outcome: bool) -> None:
        """Take note of an answer to a note."""
        # With `strict`, each answer without an outcome raises, and is to go on doing so.
        counts = has_outcome or not self._strict
        if self._server(server).add_taken(has_outcome=has_outcome if counts else None):
            # The conversation has warned of it.
            logger.info("%s has never answered a note with an outcome; it gets none for ten minutes", server)

    def tell_bug(self, error: Exception) -> None:
        """Log what we failed at, without the error's own text, which may quote a message."""
        kind, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
        where = "".join(traceback.format_list(frames))
        self._say_once(
            f"{kind} {frames[-1].filename}:{frames[-1].lineno}",
            f"the request or the answer goes through as it is, after a {kind} of ours:\n{where}",
        )

    def _plain(self, request: ChatRequest, error: Exception) -> ChatTurn:
        self.tell_bug(error)
        return ChatTurn(list(request.messages), {}, self, None)

    def _call(self, request: ChatRequest, caller: Caller) -> Call:
        messages = messages_from_openai(to_openai(request.messages))
        body = request.body(messages)
        server = request.server(body)
        takes_note = server is not None and self._server(server).takes_notes
        if caller.thread_id is None:
            conversation = self._pool.of_messages(messages)
        else:
            conversation = self._pool.of_call(caller.thread_id, Place(caller.node, server or ""), messages)
        return Call(request, caller, server, takes_note, messages, body, conversation)

    def _turn(self, call: Call, prepared: PreparedTurn) -> ChatTurn:
        request = call.request
        settings: dict[str, Any] = {}
        if prepared.note is not None and call.takes_note:
            settings = {
                "extra_body": {
                    **(request.setting("extra_body") or {}),
                    "custom_params": prepared.request["custom_params"],
                },
                "extra_headers": {**(request.setting("extra_headers") or {}), **prepared.headers},
            }
        elif prepared.note is not None and call.server is None:
            name = type(unwrap(request.model)[0]).__name__
            self._say_once(
                name,
                f"got a {name}, expected a chat model that asks an SGLang server for chat completions through an "
                "OpenAI-style client: its prompts are edited all the same, and prefilled again from each edit on",
            )
        messages = apply_edits_to_langchain(request.messages, call.messages, prepared.edits)
        return ChatTurn(messages, settings, self, (call, prepared))

    def _server(self, server: str) -> NotedServer:
        return self._servers.setdefault(server, NotedServer())

    def _say_once(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            logger.warning("%s", text)


def unwrap(model: Runnable[Any, Any]) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """Return the model under its bindings, and what they bind."""
    bound: dict[str, Any] = {}
    while isinstance(model, RunnableBindingBase):
        bound = {**model.kwargs, **bound}
        model = model.bound
    return model, bound


def caller_of(config: RunnableConfig | None = None) -> Caller:
    """Return who calls with a config, or in the graph that runs here."""
    if config is None:
        try:
            config = get_config()
        except RuntimeError:
            return Caller(None, "")
    configurable = config.get("configurable") or {}
    thread_id = configurable.get("thread_id")
    # `node:task|node:task`, and each run of a node is a task of its own.
    namespace = str(configurable.get("checkpoint_ns") or "")
    node = "|".join(part.partition(":")[0] for part in namespace.split("|"))
    return Caller(None if thread_id is None else str(thread_id), node)


def _usage(answer: AIMessage) -> Usage | None:
    usage = answer.usage_metadata
    if usage is None:
        return None
    return Usage(usage["input_tokens"], usage["output_tokens"], usage.get("input_token_details", {}).get("cache_read"))
