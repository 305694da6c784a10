"""A second SGLang plugin, for measurements alone: read rows of a live server, count its batches, break the rotation.

Loaded only by servers that are started with this folder on PYTHONPATH; no installation has it. Routes:

- `POST /bench/rows {"ids": [...], "extra_key"?, "cache_salt"?, "conversation"?}`: the rows of the cached prefix in the
  first and the last layer; `conversation` looks into that conversation's own namespace.
- `POST /bench/state {"reset"?: true}`: slots by state, the pool, and counts since the last reset: decode batches by
  size, prefill batches, and calls of the kernels that move rows.
- `POST /bench/fault {"rotation"?: null | "none" | N, "disturb"?: true}`: from now on turn moved rows rightly, not at
  all, or as if they moved N positions further; `disturb` turns the source of a copy too, which others may be reading.
- `POST /bench/path {"one_step": true | false}`: whether R is computed in the batch of its request, as LEYLINE_ONE_STEP
  says when a server starts.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import BaseReq

_SRT = "sglang.srt.managers.scheduler.Scheduler."
_KERNELS = ("copy_rotate_all_", "rotate_all_")


class RowsRequest(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """What to do: `rows`, `state` or `fault`."""

    do: str = "state"
    ids: bytes = b""
    extra_key: str | None = None
    cache_salt: str | None = None
    reset: bool = False
    rotation: str = ""
    """With `fault`: JSON of null, "none" or a number of positions."""
    disturb: bool = False


class RowsReply(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """JSON, and beside it the rows: those of the first layer, then those of the last."""

    body: str = ""
    rows: bytes = b""


# --- scheduler process ----------------------------------------------------------------------------------------------


@dataclass
class _Counts:
    """What the scheduler did since the last reset."""

    decode_batches: Counter[int] = field(default_factory=Counter)
    """By number of requests."""
    prefill_batches: int = 0
    prefill_tokens: int = 0
    kernel_calls: Counter[str] = field(default_factory=Counter)


class _State:
    counts = _Counts()
    rotation: int | str | None = None
    is_rotation_patched = False
    disturb = False


def _count_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    counts = _State.counts
    if batch.forward_mode.is_decode():
        counts.decode_batches[batch.batch_size()] += 1
    else:
        counts.prefill_batches += 1
        counts.prefill_tokens += int(batch.extend_num_tokens or 0)
    return original(scheduler, batch, *args, **kwargs)


def _plugin_modules() -> Iterator[ModuleType]:
    yield from [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "leyline_sglang"]


def _wrap_kernels() -> None:
    """Count calls of the kernels wherever the plugin has imported them by name, and disturb the source if told to."""
    from leyline_kernels import dispatch

    def wrapped(name: str, original: Callable[..., Any], layers: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
        _State.counts.kernel_calls[name] += 1
        result = original(layers, slots, *args, **kwargs)
        if _State.disturb and name == "copy_rotate_all_":
            _dst_slots, table = args
            dispatch.rotate_all_(layers, slots, table, is_neox_style=kwargs["is_neox_style"])
        return result

    for module in _plugin_modules():
        for name in _KERNELS:
            if hasattr(module, name):
                setattr(module, name, partial(wrapped, name, getattr(module, name)))


def _patch_rotation() -> None:
    """Have the plugin take its rotations from a `run_table` that obeys `_State.rotation`.

    Raises:
        RuntimeError: the plugin does not take them from `leyline_kernels.dispatch.run_table`.
    """
    from leyline_kernels import dispatch

    original = dispatch.run_table

    def run_table(inv_freq: torch.Tensor, num_rows: int, *, old_start: int, position_delta: int) -> Any:
        wrong = 0 if position_delta == 0 else _State.rotation
        delta = 0 if wrong == "none" else position_delta + int(wrong or 0)
        return original(inv_freq, num_rows, old_start=old_start, position_delta=delta)

    by_name = [module for module in _plugin_modules() if getattr(module, "run_table", None) is original]
    if not by_name:
        raise RuntimeError(
            "no module of leyline_sglang uses leyline_kernels.dispatch.run_table, which this fault replaces; "
            "name in _patch_rotation what it takes its rotations from now"
        )
    for module in by_name:
        setattr(module, "run_table", run_table)  # noqa: B010  (mypy: a module's function is not to be assigned)
    _State.is_rotation_patched = True


def _answer(scheduler: Any, request: RowsRequest) -> RowsReply:
    try:
        if request.do == "rows":
            return _rows(scheduler, request)
        if request.do == "fault":
            if not _State.is_rotation_patched:
                _patch_rotation()
            _State.rotation, _State.disturb = json.loads(request.rotation), request.disturb
        reply = RowsReply(body=json.dumps(_state(scheduler)))
        if request.reset:
            _State.counts = _Counts()
        return reply
    except Exception as error:
        # A process boundary: what goes wrong here must not stop the scheduler.
        return RowsReply(body=json.dumps({"error": f"{type(error).__name__}: {error}"}))


def _state(scheduler: Any) -> dict[str, Any]:
    from leyline_sglang import compat

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    rotation = compat.mla_pool(scheduler)
    counts = _State.counts
    return {
        **compat.RadixPort(scheduler.tree_cache).counts(),
        "running": len(scheduler.running_batch.reqs) + len(scheduler.waiting_queue),
        "decode_batches": dict(counts.decode_batches),
        "prefill_batches": counts.prefill_batches,
        "prefill_tokens": counts.prefill_tokens,
        "kernel_calls": dict(counts.kernel_calls),
        "fault": "disturb" if _State.disturb else _State.rotation,
        "device": str(pool.kv_buffer[0].device),
        "dtype": str(pool.kv_buffer[0].dtype).removeprefix("torch."),
        "layers": len(pool.kv_buffer),
        "kv_lora_rank": pool.kv_lora_rank,
        "qk_rope_head_dim": pool.qk_rope_head_dim,
        "is_neox_style": rotation.is_neox_style,
        "inv_freq": rotation.inv_freq.tolist(),
        "overlap": bool(scheduler.enable_overlap),
    }


def _rows(scheduler: Any, request: RowsRequest) -> RowsReply:
    from leyline_sglang import compat
    from leyline_sglang.io_types import unpack

    slots = (
        compat.RadixPort(scheduler.tree_cache).match(unpack(request.ids), request.extra_key, request.cache_salt).slots
    )
    buffers = scheduler.token_to_kv_pool_allocator.get_kvcache().kv_buffer
    # On a GPU the forward pass in flight may still write them.
    compat.wait_for_forward(scheduler)
    layers = [buffer[slots, 0].cpu().contiguous() for buffer in (buffers[0], buffers[-1])]
    body = {
        "tokens": len(slots),
        "layers": [0, len(buffers) - 1],
        "dtype": str(layers[0].dtype).removeprefix("torch."),
        "row_width": layers[0].shape[-1],
    }
    return RowsReply(body=json.dumps(body), rows=b"".join(rows.view(torch.uint8).numpy().tobytes() for rows in layers))


# --- tokenizer process ----------------------------------------------------------------------------------------------

_SERVING: list[Any] = []


def _record_serving() -> None:
    """Keep hold of the plugin's state in this process, which knows the namespaces of conversations."""
    from leyline_sglang.serving import Serving

    original = Serving.unsupported

    async def unsupported_and_record(serving: Any, manager: Any) -> Any:
        _SERVING[:] = [serving]
        return await original(serving, manager)

    setattr(Serving, "unsupported", unsupported_and_record)  # noqa: B010  (mypy: a method is not to be assigned)


def _own_salt(body: dict[str, Any]) -> str | None:
    """Return the namespace that the request is about, or None where there is no such conversation."""
    from leyline_sglang.turn import salt_of

    if not _SERVING:
        return None
    scope = (body.get("extra_key"), body.get("cache_salt"))
    conversation = _SERVING[0].memory.find(scope, body["conversation"])
    return None if conversation is None else salt_of(_SERVING[0].config, conversation)


def _path() -> dict[str, Any]:
    """Return whether R is computed in the batch of its request; None where that is not known yet."""
    return {"one_step": not _SERVING[0].not_in_one_step() if _SERVING else None}


def activate() -> None:
    """Register the message everywhere, the counters in the scheduler and the routes in the HTTP process."""
    from sglang.srt.managers import io_struct, tokenizer_control_mixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    io_struct.hook_custom_types(RowsRequest, RowsReply)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("leyline_rows", RowsReply))

    def add(_result: Any, scheduler: Any) -> None:
        _wrap_kernels()
        scheduler._request_dispatcher._mapping[RowsRequest] = lambda request: _answer(scheduler, request)

    HookRegistry.register(_SRT + "init_request_dispatcher", add, HookType.AFTER)
    HookRegistry.register(_SRT + "run_batch", _count_batch, HookType.AROUND)
    if multiprocessing.parent_process() is not None:
        return

    from leyline_sglang import compat
    from leyline_sglang.io_types import pack

    _record_serving()
    app = compat.http_app()

    async def ask(request: RowsRequest) -> tuple[dict[str, Any], bytes]:
        reply = (await compat.tokenizer_manager().leyline_rows_communicator(request))[0]
        return json.loads(reply.body), reply.rows

    def failed(problem: str) -> JSONResponse:
        return JSONResponse({"error": problem}, 409)

    @app.post("/bench/rows")  # type: ignore[untyped-decorator]
    async def rows(request: Request) -> JSONResponse:
        body = await request.json()
        salt = body.get("cache_salt")
        if "conversation" in body:
            salt = _own_salt(body)
            if salt is None:
                return failed("no such conversation is remembered for this extra_key and cache_salt")
        ask_for = RowsRequest(
            do="rows", ids=pack(body["ids"]), extra_key=body.get("extra_key"), cache_salt=salt or None
        )
        found, raw = await ask(ask_for)
        if "error" in found:
            return failed(found["error"])
        half = len(raw) // 2
        encoded = [base64.b64encode(part).decode() for part in (raw[:half], raw[half:])]
        return JSONResponse({**found, "rows": encoded})

    @app.post("/bench/state")  # type: ignore[untyped-decorator]
    async def state(request: Request) -> JSONResponse:
        body = await request.json()
        found, _ = await ask(RowsRequest(reset=bool(body.get("reset"))))
        return failed(found["error"]) if "error" in found else JSONResponse(found | _path())

    @app.post("/bench/path")  # type: ignore[untyped-decorator]
    async def path(request: Request) -> JSONResponse:
        if not _SERVING:
            return failed("the plugin has served nothing yet; ask for /leyline/capabilities first")
        serving = _SERVING[0]
        serving.config = serving.config.model_copy(update={"one_step": bool((await request.json())["one_step"])})
        return JSONResponse(_path())

    @app.post("/bench/fault")  # type: ignore[untyped-decorator]
    async def fault(request: Request) -> JSONResponse:
        body = await request.json()
        rotation, disturb = body.get("rotation"), bool(body.get("disturb"))
        if not (rotation is None or rotation == "none" or type(rotation) is int):
            return failed(f'rotation: got {rotation!r}, expected null, "none" or a number of positions')
        found, _ = await ask(RowsRequest(do="fault", rotation=json.dumps(rotation), disturb=disturb))
        return failed(found["error"]) if "error" in found else JSONResponse({"fault": found["fault"]})
