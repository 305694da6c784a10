"""From a chat request's bytes to those to send on, and from the answer's back to the conversation.

Owns what is edited and what goes through as it came: whatever cannot be read is sent on unedited, so that the
upstream says what is wrong with it. Knows nothing of connections.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from leyline_agent.answers import ChatReply
from leyline_agent.conversation import Conversation
from leyline_agent.core.messages import Message
from leyline_agent.core.protocol import NOTE_KEY, Outcome, Reason
from leyline_agent.prepared_turn import PreparedTurn
from leyline_agent.proxy.recognise import Known, Recogniser
from leyline_agent.proxy.settings import ProxySettings
from leyline_agent.proxy.stats import Stats

# An agent has some hundred; what a request costs grows with their number.
_MAX_MESSAGES = 10_000
# What is remembered of a message whatever its length: digests, and where it stands.
_MESSAGE_BYTES = 1 << 10


class UneditedError(Exception):
    """A request that is sent on as it came; `reason` is for logs and counts."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass
class Turn:
    """A request that was read, on its way. It ends with `commit` or `abandon`."""

    known: Known
    prepared: PreparedTurn
    raw: bytes
    """The request as it came."""
    request: Mapping[str, Any]
    """The same, read."""
    is_over: bool = False

    @property
    def has_note(self) -> bool:
        """Whether there is anything to tell the server."""
        return self.prepared.note is not None

    @cached_property
    def noted_body(self) -> bytes:
        """The request to send, with the note."""
        return _dump(self._edited) if self.has_note else self.plain_body

    @cached_property
    def plain_body(self) -> bytes:
        """The request to send to a server that takes no note: the client's own bytes, if nothing was edited."""
        if not self.prepared.edits:
            return self.raw
        body = {name: value for name, value in self._edited.items() if name != "custom_params"}
        if "custom_params" in self.request:
            body["custom_params"] = self.request["custom_params"]
        return _dump(body)

    @property
    def _edited(self) -> dict[str, Any]:
        # Not `prepared.body`, which is a copy for who may change it.
        return {**self.prepared.request, "messages": [message.raw for message in self.prepared.messages]}


class Turns:
    """Makes turns out of requests, and ends them. Any number of threads may use it."""

    def __init__(self, settings: ProxySettings, stats: Stats) -> None:
        self._settings, self._stats = settings, stats
        self.recogniser = Recogniser(
            settings.key,
            self._make,
            max_conversations=settings.max_conversations,
            max_bytes=settings.max_remembered_bytes,
            on_dropped=stats.add_dropped,
        )

    def begin(self, raw: bytes, credentials: tuple[bytes, ...], name: bytes | None) -> Turn:
        """Read a chat request, find its conversation and edit it.

        Args:
            raw: the request's body.
            credentials: what tells one API key from another.
            name: the user's own name for the conversation.

        Raises:
            UneditedError: it goes on as it came.
        """
        known: Known | None = None
        try:
            request, messages = _read(raw)
            scope = self.recogniser.scope(credentials)
            known = self.recogniser.claim(scope, messages) if name is None else self.recogniser.named(scope, name)
            prepared = known.conversation.prepare({**request, "messages": messages})
            turn = Turn(known, prepared, raw, request)
            # Made here, off the event loop where the request is long.
            turn.noted_body  # noqa: B018
            return turn
        except Exception as error:
            # Whatever a policy makes of a client's messages, the request is answered.
            if known is not None:
                self.recogniser.restore(known)
            if isinstance(error, UneditedError):
                raise
            if isinstance(error, ValueError | TypeError | RecursionError):
                raise UneditedError("unreadable_messages") from error
            self._tell_bug(error)
            raise UneditedError("internal_error") from error

    def commit(self, turn: Turn, reply: ChatReply, *, note_was_sent: bool) -> None:
        """Take the answer: from now on the conversation goes on from it."""
        turn.is_over = True
        try:
            answer = Message.from_openai(reply.message)
            turn.known.conversation.commit(
                turn.prepared, answer.raw, reply.outcome, reply.usage, expects_outcome=note_was_sent
            )
            roles = [message["role"] for message in turn.request["messages"]]
            size_bytes = len(turn.raw) + _MESSAGE_BYTES * len(roles)
            self.recogniser.keep(turn.known, turn.prepared.prompt, roles, answer, size_bytes)
        except Exception as error:
            # The client gets its answer whatever we make of it.
            self._stats.unread_answers += 1
            if not isinstance(error, ValueError | TypeError):
                self._tell_bug(error)
            self.recogniser.restore(turn.known)

    def abandon(self, turn: Turn) -> None:
        """End a turn that got no whole answer, unless it is over."""
        if not turn.is_over:
            turn.is_over = True
            self.recogniser.restore(turn.known)

    def _make(self, conversation_id: str, resumed: bool) -> Conversation:
        return Conversation(
            self._settings.policy,
            conversation_id=conversation_id,
            resumed=resumed,
            template_changes=self._settings.template_changes,
            gate=self._settings.gate,
            scrub=self._settings.scrub,
            on_fallback=self._tell_fallback,
        )

    def _tell_bug(self, error: Exception) -> None:
        """Log what nobody expected, without the error's own text, which may quote a message."""
        kind = type(error).__name__
        words = "a bug of ours, the request or the answer goes through as it is: %s\n%s"
        self._stats.tell_once(f"bug {kind}", words, kind, "".join(traceback.format_tb(error.__traceback__)))

    def _tell_fallback(self, reason: str, outcome: Outcome | None) -> None:
        """Say it once a proxy, where a conversation would say it once each."""
        if outcome is None:
            self._stats.tell_once(
                Reason.UNSUPPORTED_SERVER,
                "the upstream answered a note without an outcome, so it runs no Leyline plugin: the policy alone is "
                "applied, and edited prompts are prefilled again; install the plugin beside SGLang (docs/install.md)",
            )
        else:
            self._stats.tell_once(
                reason,
                "an edited prompt was prefilled again (%s: %s); the answer is right, it only took longer. Further "
                "ones are counted, see `leyline stats`",
                reason,
                outcome.message or "the upstream gave no more detail",
            )


def _read(raw: bytes) -> tuple[dict[str, Any], list[Message]]:
    try:
        request = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UneditedError("not_json") from error
    if not isinstance(request, dict):
        raise UneditedError("not_an_object")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UneditedError("no_messages")
    if len(messages) > _MAX_MESSAGES:
        raise UneditedError("too_many_messages")
    if not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and message["role"] for message in messages
    ):
        raise UneditedError("unreadable_messages")
    if request.get("input_ids") is not None:
        raise UneditedError("input_ids")
    params = request.get("custom_params")
    if params is not None and not isinstance(params, dict):
        raise UneditedError("custom_params")
    if params and NOTE_KEY in params:
        raise UneditedError("note_of_the_client")
    # Not copied: it was made here, and nobody changes it.
    return request, [Message(message["role"], message) for message in messages]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _dump(body: Mapping[str, Any]) -> bytes:
    # ASCII, since half of a surrogate pair has no UTF-8. What is no number in JSON raises.
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")
