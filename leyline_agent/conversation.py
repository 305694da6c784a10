"""One agent's conversation: its id, its edits, and the note that each of its requests carries.

Owns the client's half of the rules of the note. Knows nothing of HTTP or of a framework: `prepare` turns a chat
request into the one to send, `commit` takes what came back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

from leyline_agent.client_plan import RenderedFrom, plan_on_client
from leyline_agent.core.conversation_id import check_conversation_id
from leyline_agent.core.edits import apply_edits
from leyline_agent.core.messages import Message, messages_from_openai
from leyline_agent.core.protocol import NOTE_KEY, ROUTING_HEADER, Mode, Note, Outcome
from leyline_agent.digests import (
    AnswerDigest,
    AnsweredTurn,
    Comparison,
    HeldPrompt,
    compare,
    digest_prompt,
)
from leyline_agent.edit_ledger import NO_IDS, EditIds, EditLedger
from leyline_agent.errors import PlanError, RenderError, SpliceTransportError
from leyline_agent.manual_edits import (
    ManualEdit,
    MessageKey,
    check_replacement,
    manual_edits,
    merge_edits,
    message_keys,
)
from leyline_agent.policy.counting import TextTokens, TokenCounter, estimate_tokens
from leyline_agent.policy.engine import PolicyRun
from leyline_agent.policy.loader import load_policy
from leyline_agent.policy.schema import Policy
from leyline_agent.prepared_turn import PreparedTurn
from leyline_agent.server_counts import ServerCounts
from leyline_agent.telemetry import Telemetry, Usage, warn_fallback
from leyline_agent.tokenizers import Tokenizer

PolicyLike = Policy | str | PathLike[str] | None

_MIN_KEY_BYTES = 16


class Conversation:
    """A conversation with one model. Any number of threads may use it; the last answered turn is the next one's base.

    Args:
        policy: a `Policy`, the name of one that comes along, or the path of one. A policy without rules sends no
            note, and the request is the same as without us. None means that only `edit` makes edits.
        conversation_id: a bearer secret of 128 random bits or more; by default a new one.
            `core/conversation_id.py` says what is refused as guessable.
        plan: "server" leaves the diff to the server; "client" makes explicit directives with `tokenizer`.
        tokenizer: for `plan="client"`.
        unexplained_changes: what to do about a change of the history that is no edit of ours, such as a corrected
            fact. "reprefill" prefills again from there on; "amortize" keeps the KV that still reflects the old text.
        template_changes: what to do where the chat template renders the history to other tokens than were generated or
            sent: a call whose JSON is written anew, reasoning that is left out. "amortize" splices it along;
            "reprefill" prefills again from there on, as far as it can be told from what an edit did.
        gate: "auto" lets the server prefill again where that is quicker; "off" has it splice all the same.
        scrub: with whatever is forgotten, zero every row of the server's pool that nothing refers to.
        counter: by what a policy's triggers and sizes are measured: "estimate"; a `TokenCounter`, such as
            `LocalTokenizer.counter()`; or "server", which takes the size of the last answered prompt from its answer's
            usage and estimates what is new since.
        resumed: the server may remember turns of this id that this object does not know.
        on_fallback: is told of the first fall-back for each reason; by default it is logged.
        edits_of: another conversation, such as a branch of the same thread, with which this one shares `edit`.

    Raises:
        ValueError: the id is too short or guessable, or an option is wrong.
        PolicyError: the policy cannot be loaded, or compares with a context window that it does not give.
    """

    def __init__(
        self,
        policy: PolicyLike = None,
        *,
        conversation_id: str | None = None,
        plan: Literal["server", "client"] = "server",
        tokenizer: Tokenizer | None = None,
        unexplained_changes: Literal["reprefill", "amortize"] = "reprefill",
        template_changes: Literal["amortize", "reprefill"] = "amortize",
        gate: Literal["auto", "off"] = "auto",
        scrub: bool = False,
        counter: TokenCounter | Literal["estimate", "server"] = "estimate",
        resumed: bool = False,
        on_fallback: Callable[[str, Outcome | None], None] = warn_fallback,
        edits_of: Conversation | None = None,
    ) -> None:
        if plan not in ("server", "client"):
            raise ValueError(f"plan: got {plan!r}, expected 'server' or 'client'")
        if plan == "client" and tokenizer is None:
            raise ValueError("plan='client' makes directives out of token ids: give a tokenizer, see tokenizers.py")
        if unexplained_changes not in ("reprefill", "amortize"):
            raise ValueError(f"unexplained_changes: got {unexplained_changes!r}, expected 'reprefill' or 'amortize'")
        if template_changes not in ("amortize", "reprefill"):
            raise ValueError(f"template_changes: got {template_changes!r}, expected 'amortize' or 'reprefill'")
        if gate not in ("auto", "off"):
            raise ValueError(f"gate: got {gate!r}, expected 'auto' or 'off'")
        self.id = secrets.token_urlsafe(24) if conversation_id is None else check_conversation_id(conversation_id)
        self.policy = policy if policy is None or isinstance(policy, Policy) else load_policy(policy)
        self._counts = ServerCounts() if counter == "server" else None
        if isinstance(counter, str):
            if counter not in ("estimate", "server"):
                raise ValueError(f"counter: got {counter!r}, expected 'estimate', 'server' or a TokenCounter")
            counter = TextTokens(estimate_tokens, counter)
        self._policy_run = PolicyRun(self.policy, counter=counter) if self.policy else None
        self.telemetry = Telemetry()
        self.last_outcome: Outcome | None = None
        """What the server did with the last answered turn's note, its directives included."""
        self.last_answer: dict[str, Any] | None = None
        """The last answer as received; kept before `strict=True` raises."""
        self._tokenizer = tokenizer if plan == "client" else None
        self._unexplained_changes = unexplained_changes
        self._template_changes: Literal["amortize", "reprefill"] = template_changes
        self._gate: Literal["auto", "off"] = gate
        self._scrub = scrub
        self._resumed = resumed
        self._on_fallback = on_fallback
        self._noting = self.policy is None or bool(self.policy.rules)
        self._lock = threading.Lock()
        self._base: AnsweredTurn | None = None
        self._base_rendered: RenderedFrom | None = None
        self._period = 0
        self._seen: list[Message] = []
        self._manual: dict[MessageKey, ManualEdit] = {} if edits_of is None else edits_of._manual
        self._ledger = EditLedger(resumed=resumed)

    @classmethod
    def for_thread(cls, key: str | bytes, thread_id: str, policy: PolicyLike = None, **options: Any) -> Conversation:
        """Return a conversation whose id follows from a secret key and a thread's id, so that it survives a restart.

        Raises:
            ValueError: the key is shorter than 16 bytes.
        """
        secret = key.encode() if isinstance(key, str) else key
        if len(secret) < _MIN_KEY_BYTES:
            raise ValueError(
                f"got a key of {len(secret)} bytes, expected {_MIN_KEY_BYTES} random ones or more: who can guess it "
                "can name the conversations made with it"
            )
        digest = hmac.new(secret, thread_id.encode(), hashlib.sha256).hexdigest()
        return cls(policy, conversation_id=digest, resumed=True, **options)

    @property
    def routing_key(self) -> str:
        """A hash of the id, by which a gateway keeps the conversation on one worker."""
        return routing_key(self.id)

    def edit(
        self,
        message: int | Mapping[str, Any] | Message,
        replacement: str | Mapping[str, Any] | Message | None,
        mode: Mode | Literal["amortize", "forget"] = "amortize",
        *,
        occurrence: int = 0,
    ) -> None:
        """Put something else in a message's place, from the next request on and in every one that has the message.

        Args:
            message: the message, or its index in the list that the last request was made from.
            replacement: a text, a message, or None to drop it; a call and its results go together.
            mode: "amortize" keeps the KV that saw the message; "forget" drops it from the cache and prefills again.
            occurrence: which one, where equal messages stand in the list; 0 is the first.

        Raises:
            ValueError: there is no such message, or the replacement would part a call from its result.
        """
        original, key = self._find(message, occurrence)
        kept: Message | str | None
        if replacement is None or isinstance(replacement, str):
            kept = replacement
        else:
            kept = replacement if isinstance(replacement, Message) else Message.from_openai(replacement)
            check_replacement(original, kept)
        with self._lock:
            self._manual[key] = ManualEdit(kept, Mode(mode))

    def undo_edit(self, message: int | Mapping[str, Any] | Message, *, occurrence: int = 0) -> None:
        """Take an edit back. The next request has the message again and prefills from there on.

        Raises:
            ValueError: there is no edit of this message.
        """
        _, key = self._find(message, occurrence)
        with self._lock:
            if self._manual.pop(key, None) is None:
                raise ValueError(f"no edit of message {message!r:.80} (occurrence {occurrence}) to undo")

    def prepare(self, body: Mapping[str, Any]) -> PreparedTurn:
        """Edit a chat request and put the note into it. `body` is left as it is; everything in it is sent.

        Args:
            body: the request. Its messages are chat dicts, or `Message`s, which are not copied.

        Raises:
            ValueError: the messages are none, or the request has a note or `input_ids` already.
        """
        messages = messages_from_openai(body["messages"], self._seen)
        if body.get("input_ids") is not None:
            raise ValueError("got input_ids, by which the prompt is fixed whatever the messages say; leave them out")
        if NOTE_KEY in (body.get("custom_params") or {}):
            raise ValueError(f"custom_params has a {NOTE_KEY!r} already: another conversation prepared this request")
        with self._lock:
            wanted = dict(self._manual)
            self._noting = self._noting or bool(wanted)
            self._seen = messages
            base, rendered, noting, period = self._base, self._base_rendered, self._noting, self._period
        sizes = self._counts.sizes(messages) if self._counts else None
        applied = self._policy_run.apply(messages, tools=body.get("tools"), sizes=sizes) if self._policy_run else None
        edits = merge_edits(messages, manual_edits(messages, wanted), applied.edits if applied else ())
        sent = tuple(apply_edits(messages, edits))
        request = {**body, "messages": sent}
        prompt = digest_prompt(messages, edits, body)
        turn = secrets.token_urlsafe(12)
        if not noting:
            return PreparedTurn(
                turn, request, {}, sent, tuple(edits), None, (), prompt, frozenset(), frozenset(), period
            )
        known = base if base is not None and base.noted else None
        comparison = compare(known, prompt, messages) if known else None
        forgets = {idx for idx, cover in prompt.covers.items() if cover.mode is Mode.FORGET}
        shown = {original for idx, original in enumerate(prompt.originals) if idx not in forgets}
        forgotten = frozenset(prompt.originals) - shown
        note, purged = self._note(turn, known, comparison, forgotten)
        if self._tokenizer is not None and known and rendered and note.mode == "amortize":
            # Without a plan, or a server that tokenizes, the note leaves the diff to the server.
            with suppress(PlanError, RenderError, SpliceTransportError):
                plan = plan_on_client(
                    self._tokenizer, rendered, {**request, "messages": [message.raw for message in sent]}
                )
                note = note.model_copy(
                    update={"directives": plan.directives, "base_len": plan.base_len, "base_hash": plan.base_hash}
                )
        amortized = comparison.edited if comparison and note.mode == "amortize" else frozenset()
        with self._lock:
            self._ledger.send(turn, amortized=amortized, shown=shown, purged=purged)
        request["custom_params"] = {**(body.get("custom_params") or {}), NOTE_KEY: note_json(note)}
        return PreparedTurn(
            turn=turn,
            request=request,
            headers={ROUTING_HEADER: self.routing_key},
            messages=sent,
            edits=tuple(edits),
            note=note,
            unexplained=comparison.unexplained if comparison else (),
            prompt=prompt,
            amortized=amortized,
            purged=purged,
            period=period,
            by_template=comparison.by_template if comparison else "none",
        )

    async def prepare_async(self, body: Mapping[str, Any]) -> PreparedTurn:
        """As `prepare`; in a thread where a tokenizer takes part, since that may send a request of its own."""
        if self._tokenizer is None:
            return self.prepare(body)
        return await asyncio.to_thread(self.prepare, body)

    def commit(
        self,
        prepared: PreparedTurn,
        answer: Mapping[str, Any],
        outcome: Outcome | None = None,
        usage: Usage | None = None,
        *,
        expects_outcome: bool = True,
        held: HeldPrompt | None = None,
    ) -> AnsweredTurn:
        """Take a turn's answer and return the base that it is from now on. Not for a turn that got no whole answer.

        Args:
            prepared: what `prepare` returned.
            answer: the assistant message as received.
            outcome: what the server did with the note.
            usage: the tokens it counted.
            expects_outcome: False where the transport hides the outcome, so that its lack says nothing.
            held: the prompt's messages as the caller holds them from now on, where it keeps edits in its history.
        """
        message = Message.from_openai(answer)
        noted = prepared.note is not None
        with self._lock:
            # A turn that began before a release is known to the server no more.
            known = noted and prepared.period == self._period
            prompt = prepared.prompt if held is None else held.prompt
            base = self._base = AnsweredTurn(prepared.turn, known, prompt, AnswerDigest.of(message))
            if self._counts is not None and usage is not None and prepared.request.get("n") in (None, 1):
                total = usage.prompt_tokens + usage.completion_tokens
                self._counts.add(prompt.originals, base.answer, total)
            if self._tokenizer is not None:
                num_ids = usage.prompt_tokens + usage.completion_tokens if usage else None
                self._base_rendered = RenderedFrom(prepared.body, message.to_openai(), num_ids)
            self.last_answer, self.last_outcome = message.to_openai(), outcome
            self._ledger.settle(
                prepared.turn,
                amortized=prepared.amortized,
                purged=prepared.purged,
                asked=_asked(prepared.note),
                outcome=outcome,
            )
            if held is not None:
                self._ledger.rename(held.renamed)
            expected = noted and expects_outcome
            new_reason = self.telemetry.record(
                usage, outcome, expects_outcome=expected, by_template=prepared.by_template
            )
        if new_reason is not None:
            self._on_fallback(new_reason, outcome)
        return base

    def released(self) -> None:
        """Take note that the server has forgotten the turns of this conversation: the next one names no base.

        `Client.release` calls it. The edits, the policy and the telemetry stay as they are.
        """
        with self._lock:
            self._period += 1
            if self._base is not None:
                self._base = replace(self._base, noted=False)
            self._ledger.forget_ids()

    @property
    def base(self) -> AnsweredTurn | None:
        """The last answered turn, with which the next prompt is compared."""
        return self._base

    def _note(
        self, turn: str, base: AnsweredTurn | None, comparison: Comparison | None, forgotten: frozenset[str]
    ) -> tuple[Note, frozenset[str]]:
        """Return the note, and the messages of which it has the server leave nothing cached.

        `forgotten` are the messages that stand in the prompt only as edits that forget them.
        """
        mode: Literal["amortize", "reprefill", "forget"] = "amortize"
        newly: frozenset[str] = frozenset()
        lost: frozenset[str] = frozenset()
        if comparison is None:
            # Without a base nothing can be spliced, but what an earlier process left there may be stale.
            mode = "reprefill" if self._resumed else "amortize"
        else:
            newly = comparison.newly_forgotten
            if comparison.unexplained and self._unexplained_changes == "reprefill":
                mode = "reprefill"
                lost = comparison.lost
            elif self._template_changes == "reprefill" and comparison.by_template == "all":
                mode = "reprefill"
        with self._lock:
            purged = newly | self._ledger.to_purge(forgotten)
            forget = self._ledger.to_forget(newly | lost)
        if purged - newly:
            # Sent by a turn that is not the base, so no difference from the base says where it lies.
            forget = "all"
        if purged:
            mode = "forget"
        elif forget:
            mode = "reprefill"
        in_answer = comparison is not None and comparison.by_template == "answer"
        note = Note(
            conversation=self.id,
            turn=turn,
            base=base.turn if base else None,
            mode=mode,
            forget=forget if forget == "all" else tuple(sorted(forget)),
            scrub=self._scrub and bool(purged or forget),
            gate=self._gate,
            template_changes=self._template_changes if mode == "amortize" and in_answer else "amortize",
        )
        return note, purged

    def _find(self, message: int | Mapping[str, Any] | Message, occurrence: int) -> tuple[Message, MessageKey]:
        if isinstance(message, int):
            with self._lock:
                seen = self._seen
            if not -len(seen) <= message < len(seen):
                raise ValueError(
                    f"got message index {message}, expected one within the {len(seen)} messages of the last request; "
                    "give the message itself if it was not in it"
                )
            return seen[message], message_keys(seen)[message]
        found = message if isinstance(message, Message) else Message.from_openai(message)
        return found, (found.digest(), occurrence)


def routing_key(conversation_id: str) -> str:
    """Return what stands for the id in the header by which a gateway keeps a conversation on one worker."""
    return hashlib.sha256(b"leyline-route:" + conversation_id.encode()).hexdigest()[:32]


def note_json(note: Note) -> str:
    """Return the note as it goes into `custom_params`: a JSON string, defaults left out."""
    return json.dumps(note.model_dump(mode="json", exclude_defaults=True) | {"v": note.v}, separators=(",", ":"))


def _asked(note: Note | None) -> EditIds:
    """Return the edits that a note asked to forget."""
    if note is None:
        return NO_IDS
    return "all" if note.forget == "all" else frozenset(note.forget)
