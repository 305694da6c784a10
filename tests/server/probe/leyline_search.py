"""A third SGLang plugin, for tests alone: look for what should have been forgotten, all over a live server.

`POST /search {"first": 1900, "end": 2000, "rows": {"0": [[...]]}}` counts where any token id of that range, or any row
with one of those latents, is still to be found. Keys of the radix tree can only be walked on the Python core.
"""

from __future__ import annotations

import json
import multiprocessing
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from fastapi import Request
from sglang.srt.managers.io_struct import BaseReq


class SearchRequest(BaseReq, kw_only=True):
    body: str = ""


class SearchReply(BaseReq, kw_only=True):
    body: str = ""


def _paths(node: Any, above: array[int]) -> Iterator[tuple[Any, array[int], Any]]:
    """Every node of the tree but the root, with its whole path."""
    for child in node.children.values():
        path = above + child.key.token_ids
        yield child, path, (child.key.extra_key, child.key.cache_salt)
        yield from _paths(child, path)


def _search(scheduler: Any, request: SearchRequest) -> SearchReply:
    from leyline_sglang.compat import RadixPort
    from leyline_sglang.footprints import footprints_of

    asked = json.loads(request.body)
    tree = scheduler.tree_cache
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    rank = pool.kv_lora_rank
    nodes = list(_paths(tree.tree_core.root_node, array("q")))
    if asked.get("leaves"):
        leaves = []
        for node, path, (extra_key, salt) in nodes:
            if node.children:
                continue
            slots = RadixPort(tree).match(path, extra_key, salt).slots
            rows = {layer: pool.kv_buffer[layer][slots, 0].tolist() for layer in (0, pool.layer_num - 1)}
            leaves.append({"ids": path.tolist(), "own": bool(salt and salt.startswith("leyline-")), "rows": rows})
        return SearchReply(body=json.dumps(leaves))
    wanted = range(asked["first"], asked["end"])
    footprints = footprints_of(tree)
    sequences = [sequence for tag in footprints._tags for sequence in footprints.sequences(tag)]
    found_rows = 0
    for layer, rows in asked["rows"].items():
        latents = pool.kv_buffer[int(layer)][:, 0, :rank]
        found_rows += sum(int((latents == torch.tensor(row)[:rank]).all(1).sum()) for row in rows)
    free = RadixPort(tree).free_slots()
    return SearchReply(
        body=json.dumps(
            {
                "radix_keys": sum(token in wanted for node, _, _ in nodes for token in node.key.token_ids),
                "footprints": sum(token in wanted for sequence in sequences for token in sequence.token_ids),
                "closed": sum(token in wanted for closed in footprints._closed.values() for token in closed.keep),
                "rows": found_rows,
                "dirty_free_rows": sum(int(buffer[free].any(-1).sum()) for buffer in pool.kv_buffer),
            }
        )
    )


def activate() -> None:
    """Register the message everywhere and the route in the HTTP process."""
    from sglang.srt.managers import io_struct, tokenizer_control_mixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    io_struct.hook_custom_types(SearchRequest, SearchReply)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("leyline_search", SearchReply))

    def add(_result: Any, scheduler: Any) -> None:
        scheduler._request_dispatcher._mapping[SearchRequest] = lambda request: _search(scheduler, request)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher", add, HookType.AFTER)
    if multiprocessing.parent_process() is not None:
        return

    from leyline_probe import _MEMORY
    from leyline_sglang import compat

    @compat.http_app().post("/search")
    async def search(request: Request) -> Any:
        body = await request.json()
        manager = compat.tokenizer_manager()
        found = json.loads((await manager.leyline_search_communicator(SearchRequest(body=json.dumps(body))))[0].body)
        if body.get("leaves"):
            return found
        wanted = range(body["first"], body["end"])
        turns = [turn for conversation in _MEMORY[0]._conversations.values() for turn in conversation.turns.values()]
        remembered = sum(token in wanted for turn in turns for ids in turn.sequences() for token in ids)
        return {**found, "remembered": remembered}
