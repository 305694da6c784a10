"""A second SGLang plugin, for tests alone: read pool rows and slot counts out of a live server.

Loaded only by servers that the tests start with this folder on PYTHONPATH; no installation ever has it.
"""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

from fastapi import Request
from sglang.srt.managers.io_struct import BaseReq

_MEMORY: list[Any] = []


class ProbeRequest(BaseReq, kw_only=True):
    """What to look at: the cached rows of `ids` in one namespace, or (without ids) the slot counts."""

    evict: bool = False

    ids: bytes = b""
    extra_key: str | None = None
    cache_salt: str | None = None


class ProbeReply(BaseReq, kw_only=True):
    """JSON."""

    body: str = ""


def _look(scheduler: Any, request: ProbeRequest) -> ProbeReply:
    from leyline_sglang import compat
    from leyline_sglang.io_types import unpack

    radix = compat.RadixPort(scheduler)
    if request.evict:
        # As a full pool would: everything that nobody holds goes, while the memory of turns stays.
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        scheduler.tree_cache.evict(EvictParams(num_tokens=1 << 30))
    counts = radix.counts()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    counts["running"] = len(scheduler.running_batch.reqs) + len(scheduler.waiting_queue)
    if not request.ids:
        tree = type(getattr(scheduler.tree_cache, "tree_core", None)).__name__
        inv_freq = compat.mla_pool(scheduler).inv_freq.tolist() if hasattr(pool, "kv_lora_rank") else []
        return ProbeReply(body=json.dumps({**counts, "tree_core": tree, "inv_freq": inv_freq}))
    slots = radix.match(unpack(request.ids), request.extra_key, request.cache_salt).slots
    rows = {layer: pool.kv_buffer[layer][slots, 0].tolist() for layer in (0, pool.layer_num - 1)}
    return ProbeReply(
        body=json.dumps({"slots": slots.tolist(), "rows": rows, "rank": pool.kv_lora_rank, "layers": pool.layer_num})
    )


def activate() -> None:
    """Register the message everywhere and the route in the HTTP process."""
    from leyline_sglang.io_types import pack
    from sglang.srt.managers import io_struct, tokenizer_control_mixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    io_struct.hook_custom_types(ProbeRequest, ProbeReply)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("leyline_probe", ProbeReply))

    def add(_result: Any, scheduler: Any) -> None:
        scheduler._request_dispatcher._mapping[ProbeRequest] = lambda request: _look(scheduler, request)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher", add, HookType.AFTER)
    if multiprocessing.parent_process() is not None:
        return

    from leyline_sglang import compat

    _record_memory()

    @compat.http_app().post("/probe")
    async def probe(request: Request) -> Any:
        body = await request.json()
        if body.get("last_prompt"):
            conversation = _MEMORY[0].open((body.get("extra_key"), body.get("cache_salt")), body["conversation"])
            return {"ids": next(reversed(conversation.turns.values())).prompt_ids.tolist()}
        salt = body.get("cache_salt")
        if "conversation" in body:
            salt = _own_salt(body)
        ask = ProbeRequest(
            ids=pack(body.get("ids", [])),
            extra_key=body.get("extra_key"),
            cache_salt=salt,
            evict=body.get("evict", False),
        )
        manager = compat.tokenizer_manager()
        return json.loads((await manager.leyline_probe_communicator(ask))[0].body)


def _record_memory() -> None:
    """Keep hold of the plugin's memory of turns, which knows a conversation's namespace."""
    from leyline_sglang.sequences import SequenceMemory

    original = SequenceMemory.open

    def open_and_record(memory: Any, scope: Any, conversation_id: str) -> Any:
        _MEMORY[:] = [memory]
        return original(memory, scope, conversation_id)

    SequenceMemory.open = open_and_record


def _own_salt(body: dict[str, Any]) -> str:
    from leyline_sglang.config import load_config
    from leyline_sglang.namespaces import own_salt

    conversation = _MEMORY[0].open((body.get("extra_key"), body.get("cache_salt")), body["conversation"])
    return own_salt(
        load_config().secret,
        conversation_hash=conversation.hashed_id,
        caller_salt=body.get("cache_salt"),
        nonce=conversation.nonce,
    )
