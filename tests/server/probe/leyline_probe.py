"""A second SGLang plugin, for tests alone: look into a live server, and bring about what a test cannot wait for.

In the scheduler it reads rows, slots, locks and the whole tree, evicts, locks, and makes a kernel fail. In the
tokenizer process it stops a request between two steps of a splice. Loaded only by servers that the tests start with
this folder on PYTHONPATH; no installation ever has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fastapi import Request
from sglang.srt.managers.io_struct import BaseReq

# --- scheduler ------------------------------------------------------------------------------------------------------


class ProbeRequest(BaseReq, kw_only=True):
    """What to do: `counts`, `rows`, `snapshot`, `evict`, `lock`, `unlock` or `break_kernel`."""

    do: str = "counts"
    ids: bytes = b""
    extra_key: str | None = None
    cache_salt: str | None = None
    skip: int = 0
    from_token: int | None = None
    """With `evict`: the end of the cached sequence `ids` that goes; None evicts everything that nobody holds."""


class ProbeReply(BaseReq, kw_only=True):
    """JSON."""

    body: str = ""


class _Scheduler:
    """The scheduler's half."""

    def __init__(self, scheduler: Any) -> None:
        from leyline_sglang.compat import RadixPort

        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._radix = RadixPort(self._tree)
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()

    def answer(self, request: ProbeRequest) -> dict[str, Any]:
        from leyline_sglang.io_types import unpack

        ids = unpack(request.ids)
        if request.do == "rows":
            return self._rows(ids, request.extra_key, request.cache_salt)
        if request.do == "snapshot":
            return self._snapshot()
        if request.do == "evict":
            return {"evicted": self._evict(ids, request)}
        if request.do == "lock":
            _LOCKS.append(self._radix.lock(self._radix.match(ids, request.extra_key, request.cache_salt)))
        if request.do == "unlock":
            while _LOCKS:
                self._radix.unlock(_LOCKS.pop())
        if request.do == "break_kernel":
            _break_kernel(request.skip)
        return self._counts()

    def _counts(self) -> dict[str, Any]:
        from leyline_sglang import compat, one_step

        mla = hasattr(self._pool, "kv_lora_rank")
        return {
            **self._radix.counts(),
            "announced": len(one_step._ANNOUNCED.get(self._scheduler, ())),
            "running": len(self._scheduler.running_batch.reqs) + len(self._scheduler.waiting_queue),
            "tree_core": type(getattr(self._tree, "tree_core", None)).__name__,
            "inv_freq": compat.mla_pool(self._scheduler).inv_freq.tolist() if mla else [],
        }

    def _rows(self, ids: array[int], extra_key: str | None, cache_salt: str | None) -> dict[str, Any]:
        slots = self._radix.match(ids, extra_key, cache_salt).slots
        return {
            "slots": slots.tolist(),
            "rows": {layer: self._pool.kv_buffer[layer][slots, 0].tolist() for layer in (0, self._pool.layer_num - 1)},
            "rank": self._pool.kv_lora_rank,
            "layers": self._pool.layer_num,
        }

    def _evict(self, ids: array[int], request: ProbeRequest) -> int:
        """As a full pool would: the memory of turns stays."""
        if request.from_token is None:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            before = self._radix.counts()["available"]
            self._tree.evict(EvictParams(num_tokens=1 << 30))
            return self._radix.counts()["available"] - before
        self._radix.match(ids[: request.from_token], request.extra_key, request.cache_salt)
        path = self._radix.match(ids, request.extra_key, request.cache_salt)
        slots = self._radix.take(path, max(request.from_token, self._radix.takeable_from(path)))
        if len(slots):
            self._radix.free(slots)
        return len(slots)

    def _snapshot(self) -> dict[str, Any]:
        """Return every cached token by its slot: the one before it, position, locks, key (Python core) and row."""
        from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

        core = self._tree.tree_core
        walk = core.walk_for_kv_canary(False, False)
        locks = dict.fromkeys(walk.slot_indices.tolist(), 1)
        locks |= dict.fromkeys(core.walk_for_kv_canary(True, False).slot_indices.tolist(), 0)
        # The Rust core shows neither keys nor how often a node is locked.
        keys: dict[int, Any] = {}
        for node in _python_nodes(core):
            rows = node.component(BASE_COMPONENT_TYPE)
            slots = rows.value.tolist()
            locks |= dict.fromkeys(slots, rows.lock_ref)
            namespace = (node.key.extra_key, node.key.cache_salt)
            keys |= {slot: (*namespace, token) for slot, token in zip(slots, node.key.raw_token_ids(), strict=True)}
        cached = {
            slot: (previous, position, locks[slot], keys.get(slot), self._row_digest(slot))
            for slot, position, previous in zip(
                walk.slot_indices.tolist(), walk.positions.tolist(), walk.prev_slot_indices.tolist(), strict=True
            )
        }
        allocator = self._scheduler.token_to_kv_pool_allocator
        # A server with pages of several tokens may have no second list.
        free = torch.cat([slots for slots in (allocator.free_pages, allocator.release_pages) if slots is not None])
        free_digest = _digest(free.sort().values.numpy().tobytes())
        return {"counts": self._radix.counts(), "free": free_digest, "cached": cached}

    def _row_digest(self, slot: int) -> str:
        return _digest(b"".join(buffer[slot].numpy().tobytes() for buffer in self._pool.kv_buffer))


_LOCKS: list[Any] = []


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _python_nodes(core: Any) -> Iterator[Any]:
    try:
        waiting = list(core.root_node.children.values())
    except NotImplementedError:
        return
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        yield node


def _break_kernel(skip: int) -> None:
    """Have the next copy or turn of rows fail in the second layer, after `skip` that do not."""
    from leyline_kernels import reference

    originals = {name: getattr(reference, name) for name in ("copy_rotate_", "rotate_")}
    calls: list[str] = []
    num_layers = 3  # of the test model

    def failing(name: str, *args: Any, **kwargs: Any) -> None:
        calls.append(name)
        if len(calls) > 1 + skip * num_layers:
            for broken, original in originals.items():
                setattr(reference, broken, original)
            raise RuntimeError("the probe made this kernel fail")
        originals[name](*args, **kwargs)

    for name in originals:
        setattr(reference, name, partial(failing, name))


# --- tokenizer process ----------------------------------------------------------------------------------------------


@dataclass
class _Pause:
    skip: int
    """How many arrivals pass before one is stopped."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)


class _Pauses:
    """Where a request can be stopped: `before_` and `after_` a `prefill` (of R), and a `move`, a `close` or a `look`.

    The last three are messages to the scheduler. Each pause stops one request.
    """

    def __init__(self) -> None:
        self._pauses: dict[str, _Pause] = {}

    def arm(self, point: str, skip: int) -> None:
        assert point not in self._pauses, f"{point} is armed already; resume it first"
        self._pauses[point] = _Pause(skip)

    async def wait(self, point: str, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._pauses[point].arrived.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def resume(self, point: str) -> None:
        self._pauses.pop(point).resumed.set()

    async def here(self, point: str) -> None:
        pause = self._pauses.get(point)
        if pause is None or pause.arrived.is_set():
            return
        if pause.skip:
            pause.skip -= 1
            return
        pause.arrived.set()
        await pause.resumed.wait()


_PAUSES = _Pauses()
_SERVING: list[Any] = []
_MEMORY: list[Any] = []


def _stop_at_pauses() -> None:
    from leyline_sglang import compat

    prefill, ask_scheduler = compat.prefill, compat.ask_scheduler

    async def prefill_with_pauses(*args: Any, **kwargs: Any) -> Any:
        await _PAUSES.here("before_prefill")
        result = await prefill(*args, **kwargs)
        await _PAUSES.here("after_prefill")
        return result

    async def ask_with_pauses(manager: Any, request: Any) -> Any:
        step = "move" if request.move else "close" if request.close else "look"
        await _PAUSES.here(f"before_{step}")
        result = await ask_scheduler(manager, request)
        await _PAUSES.here(f"after_{step}")
        return result

    compat.prefill, compat.ask_scheduler = prefill_with_pauses, ask_with_pauses


def _record_serving() -> None:
    """Keep hold of the plugin's state in this process."""
    from leyline_sglang.serving import Serving

    original = Serving.unsupported

    async def unsupported_and_record(serving: Any, manager: Any) -> Any:
        _SERVING[:], _MEMORY[:] = [serving], [serving.memory]
        return await original(serving, manager)

    Serving.unsupported = unsupported_and_record


def _open_gate(splices_take_ms: float | None) -> None:
    """Have the cost gate decide from now on, as if all splices so far had taken so long; None closes it again."""
    from leyline_sglang.gate import Gate

    serving = _SERVING[0]
    serving.config = serving.config.model_copy(update={"gate": splices_take_ms is not None})
    serving.gate = Gate(serving.gate.prefill_cost)
    if splices_take_ms is not None:
        for one_step in (True, False):
            serving.gate.observe(moved_tokens=1, one_step=one_step, ms=splices_take_ms)


def _unfinished(manager: Any) -> dict[str, int]:
    """Return what requests leave behind in this process while they run, and must not leave once they have ended."""
    serving = _SERVING[0] if _SERVING else None
    return {
        "requests": len(manager.rid_to_state),
        "edited_requests": len(serving.aborted) if serving else 0,
        "messages": len(serving._tasks) + len(serving.admissions) if serving else 0,
        "locks": sum(c.lock.locked() for c in _MEMORY[0]._conversations.values()) if serving else 0,
    }


def _conversation(body: dict[str, Any]) -> Any:
    return _MEMORY[0].open((body.get("extra_key"), body.get("cache_salt")), body["conversation"])


def _own_salt(body: dict[str, Any]) -> str:
    from leyline_sglang.turn import salt_of

    return salt_of(_SERVING[0].config, _conversation(body))


def activate() -> None:
    """Register the message everywhere and the route in the HTTP process."""
    from leyline_sglang.io_types import AdmissionRequest, pack
    from sglang.srt.managers import io_struct, tokenizer_control_mixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    io_struct.hook_custom_types(ProbeRequest, ProbeReply)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("leyline_probe", ProbeReply))

    def add(_result: Any, scheduler: Any) -> None:
        scheduler._request_dispatcher._mapping[ProbeRequest] = lambda request: ProbeReply(
            body=json.dumps(_Scheduler(scheduler).answer(request))
        )

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher", add, HookType.AFTER)
    if multiprocessing.parent_process() is not None:
        return

    from leyline_sglang import compat

    _stop_at_pauses()
    _record_serving()

    @compat.http_app().post("/probe")
    async def probe(request: Request) -> Any:
        body = await request.json()
        if "pause" in body:
            return _PAUSES.arm(body["pause"], body.get("skip", 0))
        if "wait" in body:
            return await _PAUSES.wait(body["wait"], body["timeout_s"])
        if "resume" in body:
            return _PAUSES.resume(body["resume"])
        if "splices_take_ms" in body:
            return _open_gate(body["splices_take_ms"])
        if "announce" in body:
            # As if a request of that id were about to come with edits of this conversation.
            steps = [(0, 1, len(body["ids"]), 0)]
            announced = AdmissionRequest(
                request_id=body["announce"],
                cancel=body.get("cancel", False),
                base=pack(body["ids"]),
                own_salt=_own_salt(body),
                from_own=True,
                steps=steps,
            )
            return compat.tell_scheduler(compat.tokenizer_manager(), announced)
        if body.get("last_prompt"):
            return {"ids": next(reversed(_conversation(body).turns.values())).prompt_ids.tolist()}
        ask = ProbeRequest(
            do=body.get("do", "rows" if body.get("ids") else "counts"),
            ids=pack(body.get("ids", [])),
            extra_key=body.get("extra_key"),
            cache_salt=_own_salt(body) if "conversation" in body else body.get("cache_salt"),
            from_token=body.get("from_token"),
            skip=body.get("skip", 0),
        )
        manager = compat.tokenizer_manager()
        found = json.loads((await manager.leyline_probe_communicator(ask))[0].body)
        return found | _unfinished(manager) if ask.do == "counts" else found
