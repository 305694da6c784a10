"""An edited turn in one step of the scheduler: R is computed in the batch of the very request that reads it.

As a request is admitted that edits were announced for, its kept runs are moved and keyed, together with slots for R
that are still to be written. A *sibling* request in the same batch computes R into them, and the request itself,
matched again, finds its whole prefix cached. That needs an attention backend that writes the keys of a batch before it
reads any (`compat.not_in_one_step`). Nobody else can see the unwritten rows: they are in the conversation's own
namespace, whose next turn is taken up only once this request has answered, and by then the batch was launched.

Whatever does not fit costs a re-prefill: the request is admitted all the same.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from leyline_agent.core.protocol import Reason
from leyline_sglang import compat
from leyline_sglang.cached_rows import CachedRows, Stages
from leyline_sglang.compat import Path
from leyline_sglang.io_types import AdmissionReply, AdmissionRequest, CacheReply, CacheRequest, unpack
from leyline_sglang.move import Move, RefusedError
from leyline_sglang.prefill_cost import METER

logger = logging.getLogger(__name__)

_MAX_ANNOUNCED = 4096
"""Announced requests that have not come; the oldest goes, is told so, and is served as any other."""
_MAX_PASSED_OVER = 100
"""Batches that a request lets go by until its R's have room beside it; then it is prefilled."""
_COUNTS = ("moved", "copied", "filled")

_ANNOUNCED: WeakKeyDictionary[Any, OrderedDict[str, AdmissionRequest]] = WeakKeyDictionary()


def announce(scheduler: Any, request: AdmissionRequest) -> None:
    """Keep what is to be done for a request until it is admitted."""
    announced = _ANNOUNCED.setdefault(scheduler, OrderedDict())
    if request.cancel:
        announced.pop(request.request_id, None)
        return
    announced[request.request_id] = request
    while len(announced) > _MAX_ANNOUNCED:
        _, oldest = announced.popitem(last=False)
        reply = AdmissionReply(request_id=oldest.request_id, reason=Reason.ABORTED.value)
        reply.message = f"more than {_MAX_ANNOUNCED} turns wait to be admitted"
        # It stays in the namespace that it was sent with.
        reply.new_own, reply.new_shared = int(oldest.from_own), int(not oldest.from_own)
        compat.tell_tokenizer(scheduler, reply)


def admit(scheduler: Any, adder: Any, req: Any, admit_plainly: Callable[[Any], Any]) -> Any:
    """Stand around the admission of a request. A process boundary: nothing that goes wrong here stops the scheduler."""
    announced = _ANNOUNCED.get(scheduler)
    request = announced.get(req.rid) if announced else None
    # Another caller may have chosen the same id; the tag is put on by the plugin alone.
    if announced is None or request is None or compat.tag_of(req) != request.own_salt:
        return admit_plainly(req)
    siblings = _Siblings(scheduler, adder, req, admit_plainly)
    waits = request.passed_over < _MAX_PASSED_OVER and not compat.nothing_runs(scheduler, adder)
    if waits and not compat.has_preempted(adder) and not siblings.have_room(request):
        request.passed_over += 1
        return compat.pass_over()
    started = time.perf_counter()
    del announced[req.rid]
    reply = AdmissionReply(request_id=request.request_id, prefill_cost=METER.cost)
    try:
        if compat.is_given_up(req) or len(req.origin_input_ids) != request.prompt_tokens:
            reply.reason, reply.message = Reason.ABORTED.value, "the engine has given the request up"
        else:
            _take_steps(scheduler, req, request, siblings, reply)
            _choose_namespace(scheduler, req, request, reply)
    except Exception as error:
        _say_failed(reply, error)
    reply.ms = (time.perf_counter() - started) * 1e3
    compat.tell_tokenizer(scheduler, reply)
    return admit_plainly(req) if compat.has_budget(adder) else compat.batch_is_full()


def _choose_namespace(scheduler: Any, req: Any, request: AdmissionRequest, reply: AdmissionReply) -> None:
    """Serve the request from where more of it is cached, the conversation's namespace on a tie."""
    stages = Stages()
    with stages("look"):
        # Both as the engine would serve them: of a prompt that is cached whole, it computes the last token.
        reply.new_shared = compat.use_namespace(scheduler, req, request.shared_salt)
        reply.new_own = compat.use_namespace(scheduler, req, request.own_salt)
        if reply.new_shared > reply.new_own or not (reply.new_own or request.has_namespace):
            compat.use_namespace(scheduler, req, request.shared_salt)
    reply.stages_ms |= stages.ms


def _say_failed(reply: CacheReply, error: Exception) -> None:
    logger.exception("leyline: a splice failed; the request is served without it", exc_info=error)
    reply.reason, reply.message = Reason.INTERNAL_ERROR.value, f"{type(error).__name__}: {error}"


def _take_steps(
    scheduler: Any, req: Any, request: AdmissionRequest, siblings: _Siblings, total: AdmissionReply
) -> None:
    """Take steps from the left until one is refused, and add up in `total` what was done."""
    base = unpack(request.base)
    common = {"extra_key": req.extra_key, "shared_salt": request.shared_salt, "own_salt": request.own_salt}
    parked_from: int | None = None
    for idx, (removed_start, src_start, src_end, dst_start) in enumerate(request.steps):
        move = CacheRequest(
            **common,
            move=True,
            from_own=request.from_own,
            head_from_own=request.from_own or idx > 0,
            removed_start=removed_start,
            src_start=src_start,
            src_end=src_end,
            dst_start=dst_start,
            more_follow=idx + 1 < len(request.steps),
            parked_from=parked_from,
            in_place=request.in_place,
        )
        reply = CacheReply()
        try:
            Move(CachedRows(scheduler, move, base=base, new=req.origin_input_ids), siblings).run(reply)
        except Exception as error:
            # What the steps before have done stays, and is told.
            _say_failed(reply, error)
        _add(total, reply)
        if reply.reason:
            if parked_from is not None:
                CachedRows(scheduler, CacheRequest(**common)).drop_parked()
            break
        total.steps_done, parked_from = idx + 1, reply.parked_from


def _add(total: AdmissionReply, reply: CacheReply) -> None:
    for name in _COUNTS:
        setattr(total, name, getattr(total, name) + getattr(reply, name))
    total.moved_in_place, total.reason, total.message = reply.moved_in_place, reply.reason, reply.message
    total.stages_ms = {
        name: total.stages_ms.get(name, 0.0) + reply.stages_ms.get(name, 0.0)
        for name in {*total.stages_ms, *reply.stages_ms}
    }


class _Siblings:
    """Has R computed by requests of ours in the batch that is being built (a `move.Fill`)."""

    def __init__(self, scheduler: Any, adder: Any, req: Any, admit_plainly: Callable[[Any], Any]) -> None:
        self._scheduler = scheduler
        self._adder = adder
        self._req = req
        self._admit_plainly = admit_plainly
        self._admitted: Any = None

    def have_room(self, request: AdmissionRequest) -> bool:
        """Whether all R's of a request fit beside it into the batch that is being built."""
        slots = compat.free_request_slots(self._scheduler, self._adder)
        # One token less: a request that takes the whole budget is cut into chunks.
        tokens = compat.prefill_budget(self._adder) - 1
        return not request.num_fills or (slots > request.num_fills and tokens >= request.fill_tokens)

    def check_room(self, num_tokens: int, path_tokens: int) -> None:
        """See `move.Fill`."""
        if compat.free_request_slots(self._scheduler, self._adder) < 2:
            raise RefusedError(Reason.POOL_FULL, "no request slot is free to compute R beside the request")
        budget = compat.prefill_budget(self._adder) - 1
        if num_tokens > budget:
            raise RefusedError(
                Reason.POOL_FULL, f"{num_tokens} tokens left of the kept run are not cached; this batch takes {budget}"
            )
        # Each takes a slot twice until the batch is allocated: one that is keyed, one as any sequence of a batch does.
        # And nothing of the path that names it can be evicted for that, as it is held.
        if num_tokens + path_tokens >= compat.free_tokens(self._adder):
            raise RefusedError(Reason.POOL_FULL, f"no room to compute {num_tokens} tokens beside the request")

    def admit(self, token_ids: array[int], prefix: Path) -> None:
        """See `move.Fill`."""
        sibling = compat.new_sibling(self._scheduler, self._req, token_ids, prefix)
        self._admit_plainly(sibling)
        if not compat.is_admitted(self._adder, sibling):
            raise RefusedError(Reason.POOL_FULL, "the batch has no room to compute R beside the request")
        self._admitted = sibling

    def place(self, slots: torch.Tensor, path: Path) -> None:
        """See `move.Fill`."""
        compat.place_sibling(self._scheduler, self._admitted, slots, path)
