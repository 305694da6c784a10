"""Conversations outside of a turn, for our own routes: explicit splices, release, and what is cached of them."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from dataclasses import asdict
from typing import Any

from leyline_agent.core.plan import apply_directives, check_directives
from leyline_agent.core.protocol import (
    ConversationState,
    Directive,
    Mode,
    PastEdit,
    Purge,
    Reason,
    ReleaseReply,
    SpliceReply,
    SpliceRequest,
    Status,
    TurnState,
)
from leyline_agent.errors import PlanError
from leyline_sglang import compat, turn_splice
from leyline_sglang.io_types import CacheRequest, pack
from leyline_sglang.request_checks import check_namespace, checked_ids
from leyline_sglang.sequences import Conversation, Scope
from leyline_sglang.serving import Serving, log_outcome
from leyline_sglang.turn import salt_of

logger = logging.getLogger(__name__)

_MAX_EXPLICIT_EDITS = 256


async def splice(serving: Serving, manager: Any, http_request: Any, body: SpliceRequest) -> SpliceReply:
    """Carry out explicit directives on ids that the caller knows to be cached.

    Raises:
        PlanError: nothing could be done; with the reason.
    """
    await serving.check_server(manager)
    check_namespace(body.extra_key, body.cache_salt)
    vocab_size = compat.vocab_size(manager)
    base_ids = checked_ids(body.base_ids, vocab_size)
    new_ids = await asyncio.to_thread(_edited, base_ids, body.directives, vocab_size)
    if len(new_ids) >= compat.context_tokens(manager):
        raise PlanError(
            f"the edited sequence has {len(new_ids)} tokens, the model's context {compat.context_tokens(manager)}",
            reason=Reason.BAD_DIRECTIVES,
        )
    conversation = serving.memory.open((body.extra_key, body.cache_salt or None), body.conversation)
    like = compat.new_request(body.extra_key, body.cache_salt)
    turn = serving.turn(compat.plain_generate(manager), manager, like, http_request, conversation, new_ids)
    async with conversation.lock:
        before = await turn.look(base_ids)
        in_own = conversation.has_namespace and before.base_own >= before.base_shared
        forgets = any(directive.mode is Mode.FORGET for directive in body.directives)
        cached, last_end = max(before.base_own, before.base_shared), body.directives[-1].end
        if not forgets and cached <= body.directives[0].end:
            # Here a prefill would be for nothing: no request follows that goes on from it.
            raise PlanError(
                f"{cached} of the base's {len(base_ids)} tokens are cached; the edits end at {last_end}",
                reason=Reason.EVICTED,
            )
        served = await turn_splice.splice(turn, base_ids, list(body.directives), base_in_own=in_own, scrub=body.scrub)
        conversation.explicit_edits = (*conversation.explicit_edits, *served.edits)[-_MAX_EXPLICIT_EDITS:]
        look = await turn.look()
    log_outcome(conversation, served.outcome, len(new_ids))
    if served.outcome.status is Status.REFUSED:
        assert served.outcome.reason is not None
        raise PlanError(served.outcome.message or "refused", reason=served.outcome.reason)
    return SpliceReply(outcome=served.outcome, token_ids=tuple(new_ids[: max(look.new_own, look.new_shared)]))


async def release(serving: Serving, manager: Any, found: list[Conversation], *, scrub: bool) -> ReleaseReply:
    """Free what conversations have in namespaces of their own, and forget their turns.

    Raises:
        PlanError: the scheduler could not do it; with the reason.
    """
    await serving.check_server(manager)
    total = Purge()
    for conversation in found:
        async with conversation.lock:
            tags = (*conversation.closing, salt_of(serving.config, conversation))
            serving.memory.close_namespace(conversation)
            conversation.closing = list(tags)
            request = CacheRequest(
                extra_key=conversation.scope[0],
                own_salt=salt_of(serving.config, conversation),
                close=tags,
                scrub=scrub,
            )
            reply = await serving.ask(manager, request)
            if reply.reason:
                raise PlanError(reply.message, reason=Reason(reply.reason))
            conversation.closing.clear()
        total = Purge(
            dropped_tokens=total.dropped_tokens + reply.dropped,
            held_tokens=total.held_tokens + reply.held,
            scrubbed_tokens=reply.scrubbed,
        )
    facts = {"event": "release", "conversation": found[0].hashed_id, **total.model_dump()}
    logger.info("leyline: %s", json.dumps(facts))
    return ReleaseReply(conversation_hash=found[0].hashed_id, purge=total)


async def state(serving: Serving, manager: Any, found: list[Conversation]) -> ConversationState:
    """Return what is cached of conversations of one id, and their edits."""
    await serving.check_server(manager)
    turns: list[TurnState] = []
    explicit: list[PastEdit] = []
    own_tokens = 0
    for conversation in found:
        extra_key, caller_salt = conversation.scope
        own = salt_of(serving.config, conversation)
        for turn_id, turn in list(conversation.turns.items()):
            longest = max(turn.sequences(), key=len)
            look = await serving.ask(
                manager,
                CacheRequest(base=pack(longest), extra_key=extra_key, shared_salt=caller_salt, own_salt=own),
            )
            turns.append(
                TurnState(
                    turn=turn_id,
                    prompt_tokens=len(turn.prompt_ids),
                    output_tokens=len(longest) - len(turn.prompt_ids),
                    cached_tokens=look.base_own if turn.in_own else look.base_shared,
                    own_namespace=turn.in_own,
                    edits=tuple(PastEdit(**asdict(edit)) for edit in turn.edits),
                )
            )
        explicit.extend(PastEdit(**asdict(edit)) for edit in conversation.explicit_edits)
        counted = await serving.ask(manager, CacheRequest(extra_key=extra_key, own_salt=own, count_own=True))
        own_tokens += counted.own_tokens
    return ConversationState(
        conversation_hash=found[0].hashed_id,
        own_tokens=own_tokens,
        turns=tuple(turns),
        explicit_edits=tuple(explicit),
    )


def find(serving: Serving, conversation_id: str, scope: Scope) -> list[Conversation]:
    """Return the conversation of this id in the caller's namespace.

    Raises:
        PlanError: there is none; with the reason.
    """
    check_namespace(*scope)
    found = serving.memory.find(scope, conversation_id)
    return _live([] if found is None else [found], "for this extra_key and cache_salt")


def find_hashed(serving: Serving, hashed_id: str) -> list[Conversation]:
    """Return the conversations of this hashed id, one for each caller's namespace. Raises as `find`."""
    return _live(serving.memory.find_hashed(hashed_id), "by that hash")


def _edited(base_ids: array[int], directives: tuple[Directive, ...], vocab_size: int) -> array[int]:
    check_directives(directives, base_tokens=len(base_ids), vocab_size=vocab_size)
    return array("i", apply_directives(base_ids, directives))


def _live(found: list[Conversation], how: str) -> list[Conversation]:
    live = [known for known in found if known.has_namespace or known.turns or known.closing]
    if not live:
        raise PlanError(
            f"no such conversation is remembered here, {how}: it never came, was released, pushed out or flushed, or "
            "the server has restarted",
            reason=Reason.UNKNOWN_CONVERSATION,
        )
    return live
