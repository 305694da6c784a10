"""Every private name of SGLang that Leyline touches, and the gate on SGLang's version.

The rest of the package talks to the engine through what stands here, so a new SGLang release is a change of this file.
Facts are those of SGLang 0.5.23; each was read in its source or seen when running it.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakKeyDictionary

import torch
from leyline_kernels.layer_buffers import LayerBuffers
from leyline_kernels.layout import MlaLayout

from leyline_agent.core.protocol import NOTE_KEY

logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS = ("0.5.23",)

_SRT = "sglang.srt."
TOKENIZER_MANAGER = _SRT + "managers.tokenizer_manager.TokenizerManager."
CACHE_RESETS = (
    "flush_cache",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "release_memory_occupation",
)
"""Coroutines of the tokenizer manager after which no cached row may be relied on."""
COMMUNICATOR = "leyline"
_TREE = _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache."


def sglang_version() -> str | None:
    """Return the installed version of SGLang, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def in_http_process() -> bool:
    """Whether this process owns the HTTP app (the scheduler and the detokenizer are its children)."""
    return multiprocessing.parent_process() is None


# --- installing -----------------------------------------------------------------------------------------------------


def register_messages(request_type: type, reply_type: type, *more: type) -> None:
    """Teach the IPC codec (pickle or msgpack) our messages, and the tokenizer manager to await the first reply."""
    from sglang.srt.managers import io_struct, tokenizer_control_mixin

    io_struct.hook_custom_types(request_type, reply_type, *more)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append((COMMUNICATOR, reply_type))


def handle_in_scheduler(request_type: type, handler: Callable[[Any, Any], Any]) -> None:
    """Have every scheduler answer `request_type` with `handler(scheduler, request)`, between two batches.

    Nothing is sent back where that returns None.
    """

    def add(scheduler: Any) -> None:
        scheduler._request_dispatcher._mapping[request_type] = lambda request: handler(scheduler, request)

    at_scheduler_start(add)


def at_scheduler_start(hook: Callable[[Any], None]) -> None:
    """Call `hook(scheduler)` when model, pool and radix cache are there and no request has come yet."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = _SRT + "managers.scheduler.Scheduler.init_request_dispatcher"
    HookRegistry.register(target, lambda _result, scheduler: hook(scheduler), HookType.AFTER)


def handle_in_tokenizer(manager: Any, reply_type: type, handler: Callable[[Any], None]) -> None:
    """Have the tokenizer manager call `handler(reply)` for what a scheduler sends of its own accord."""
    manager._result_dispatcher._mapping[reply_type] = handler


def tell_scheduler(manager: Any, request: Any) -> None:
    """Send a message that nobody answers; it arrives before every request that is sent later."""
    manager._dispatch_to_scheduler(request)


def tell_tokenizer(scheduler: Any, reply: Any) -> None:
    """Send a message of a scheduler's own accord; of all ranks only the first one's is sent."""
    scheduler.ipc_channels.send_to_tokenizer.send_output(reply)


def after_insertion(hook: Callable[[Any, str, str | None, str | None, array[int]], None]) -> None:
    """Call `hook(tree, tag, extra_key, cache_salt, token_ids)` whenever a noted request has put ids into the cache."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def inserted(_result: Any, tree: Any, req: Any, *, up_to: int, **_more: Any) -> None:
        tag = tag_of(req)
        if tag is not None:
            hook(tree, tag, req.extra_key, req.cache_salt, req.full_untruncated_fill_ids[:up_to])

    HookRegistry.register(_TREE + "checkpoint_into_tree", inserted, HookType.AFTER)


def tag_of(req: Any) -> str | None:
    """Return what stands where a request's note was."""
    # Of any request, those that no plugin of ours has seen included: they may hold anything.
    params = req.sampling_params.custom_params
    tag = params.get(NOTE_KEY) if isinstance(params, dict) else None
    return tag if isinstance(tag, str) else None


def after_reset(hook: Callable[[Any], None]) -> None:
    """Call `hook(tree)` when the radix cache was emptied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TREE + "reset", lambda _result, tree: hook(tree), HookType.AFTER)


def after_batch(hook: Callable[[Any, Any], None]) -> None:
    """Call `hook(scheduler, batch)` after the results of each batch, when ended requests hold nothing any more."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = _SRT + "managers.scheduler.Scheduler.process_batch_result"
    HookRegistry.register(target, lambda _result, scheduler, batch, *_: hook(scheduler, batch), HookType.AFTER)


def has_ended_request(batch: Any) -> bool:
    """Whether one of the batch's requests has ended."""
    return any(req.finished() for req in batch.reqs)


def around_prefill(observe: Callable[[list[tuple[int, int]], float], None]) -> None:
    """Call `observe(lengths, ms)` for each prefill batch: (tokens, prefix tokens) of its requests, and what it took.

    Of its forward pass alone, sampling included. On a GPU that is known once the pass has ended.
    """
    from sglang.srt.managers.schedule_batch import ForwardMode
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    running: deque[tuple[list[tuple[int, int]], Any, Any]] = deque()

    def tell(lengths: list[tuple[int, int]], ms: float) -> None:
        # A process boundary: what it makes of the time must not stop the scheduler.
        try:
            observe(lengths, ms)
        except Exception:
            logger.exception("leyline: the time of a prefill batch is not counted")

    def timed(original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
        if batch is None or batch.forward_mode != ForwardMode.EXTEND:
            return original(worker, batch, *args, **kwargs)
        lengths = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
        if not _on_cuda():
            started = time.perf_counter()
            result = original(worker, batch, *args, **kwargs)
            tell(lengths, (time.perf_counter() - started) * 1e3)
            return result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = original(worker, batch, *args, **kwargs)
        end.record()
        running.append((lengths, begin, end))
        return result

    def ended(_scheduler: Any, _batch: Any) -> None:
        while running and running[0][2].query():
            lengths, begin, end = running.popleft()
            tell(lengths, begin.elapsed_time(end))

    HookRegistry.register(_SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation", timed, HookType.AROUND)
    after_batch(ended)


def around(target: str, hook: Callable[..., Any]) -> None:
    """Wrap a function of SGLang: `hook(original, *args, **kwargs)`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


def after_chat_response(hook: Callable[..., Any]) -> None:
    """Call `hook(response, serving, request, outputs, created)` on every non-streaming chat response."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response"
    HookRegistry.register(target, hook, HookType.AFTER)


def http_app() -> Any:
    """Return the FastAPI app of the server; its API key covers routes that are added to it."""
    from sglang.srt.entrypoints import http_server

    return http_server.app


def for_admins(endpoint: Any) -> Any:
    """Have a route ask for the server's admin key where one is set, else for its API key (SGLang's ADMIN_OPTIONAL)."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    return auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


def tokenizer_manager() -> Any:
    """Return the tokenizer manager of this process, with its receive loop running."""
    from sglang.srt.entrypoints import http_server

    manager = http_server._global_state.tokenizer_manager
    manager.auto_create_handle_loop()
    return manager


# --- requests (tokenizer process) -----------------------------------------------------------------------------------


_INTERNAL = "leyline_internal"


def is_internal(obj: Any) -> bool:
    """Whether the request is a prefill of ours."""
    return getattr(obj, _INTERNAL, False)


def is_generate(obj: Any) -> bool:
    """Whether the request generates text (and is no embedding)."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return isinstance(obj, GenerateReqInput)


def vocab_size(manager: Any) -> int:
    """Return the number of token ids that the model accepts."""
    return int(manager.model_config.vocab_size)


def context_tokens(manager: Any) -> int:
    """Return the longest sequence that the model takes."""
    return int(manager.model_config.context_len)


def is_dispatched(manager: Any, rid: str) -> bool:
    """Whether the scheduler has been sent this request; what is sent later arrives later."""
    state = manager.rid_to_state.get(rid)
    return state is not None and bool(state.dispatched)


def has_metrics(manager: Any) -> bool:
    """Whether SGLang serves `/metrics`."""
    return bool(manager.enable_metrics)


def plain_generate(manager: Any) -> Callable[..., Any]:
    """Return `generate_request` as an unbound function, as a hook gets it."""
    return lambda _manager, obj, http_request: manager.generate_request(obj, http_request)


def is_running(manager: Any, rid: str) -> bool:
    """Whether the tokenizer manager still waits for this request."""
    return rid in manager.rid_to_state


def streams_deltas(manager: Any) -> bool:
    """Whether chunks of a stream carry only the new output ids."""
    return bool(getattr(manager, "incremental_streaming_output", False))


async def prefill(
    generate: Callable[..., AsyncGenerator[Any, None]],
    manager: Any,
    like: Any,
    http_request: Any,
    *,
    token_ids: Sequence[int],
    cache_salt: str | None,
    tag: str,
) -> dict[str, Any]:
    """Prefill `token_ids` and leave them in the radix cache; return the `meta_info` of the answer.

    `tag` is what `after_insertion` tells. The internal request carries the `rid` of the request it serves (`like`), so
    that an abort reaches it, and stays out of the request metrics.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=list(token_ids),
        sampling_params={"max_new_tokens": 0, "temperature": 0, "custom_params": {NOTE_KEY: tag}},
        rid=like.rid if isinstance(like.rid, str) else None,
        extra_key=like.extra_key,
        cache_salt=cache_salt,
        priority=like.priority,
        log_metrics=False,
        no_logs=True,
    )
    setattr(request, _INTERNAL, True)
    meta_info: dict[str, Any] = {}
    async with aclosing(generate(manager, request, http_request)) as stream:
        async for output in stream:
            meta_info = output["meta_info"]
    return meta_info


def new_request(extra_key: str | None, cache_salt: str | None) -> Any:
    """Return a bare request that says in which cache namespace a splice outside of a request works."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(input_ids=[0], extra_key=extra_key, cache_salt=cache_salt)


async def ask_scheduler(manager: Any, request: Any) -> list[Any]:
    """Send a message to the scheduler and return its replies (one, as data parallel is refused)."""
    replies: list[Any] = await getattr(manager, f"{COMMUNICATOR}_communicator")(request)
    return replies


# --- the radix cache (scheduler process) ----------------------------------------------------------------------------


class Path:
    """A cached prefix: its node in the radix cache and the pool slots of its tokens."""

    __slots__ = ("_num_tokens", "_slots", "_tree", "node")

    def __init__(self, tree: Any, node: Any, num_tokens: int) -> None:
        self.node = node
        self._tree = tree
        self._num_tokens = num_tokens
        self._slots: torch.Tensor | None = None

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def slots(self) -> torch.Tensor:
        """int64 `[num_tokens]`. Gathered at the first use, before which the path must not leave the tree."""
        if self._slots is None:
            slots: torch.Tensor = self._tree.path_device_indices(self.node)[: self._num_tokens]
            self._slots = slots.to(torch.int64)
        return self._slots


class RadixPort:
    """What a splice needs of the radix cache and of the slot allocator. Holds no state of its own."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._allocator = tree.token_to_kv_pool_allocator

    @staticmethod
    def _key(token_ids: array[int], extra_key: str | None, cache_salt: str | None, limit: int | None = None) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(token_ids, extra_key, cache_salt=cache_salt, limit=limit)

    def match(
        self, token_ids: array[int], extra_key: str | None, cache_salt: str | None, limit: int | None = None
    ) -> Path:
        """Return the longest cached prefix of `token_ids[:limit]` in one namespace; splits nodes, locks nothing."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self._tree.match_prefix(MatchPrefixParams(key=self._key(token_ids, extra_key, cache_salt, limit)))
        return Path(self._tree, found.last_device_node, int(found.device_prefix_len))

    def lock(self, path: Path) -> Any:
        """Keep a path from being evicted until `unlock`."""
        return self._tree.lock(path.node)

    def unlock(self, lock: Any) -> None:
        """Give back what `lock` returned."""
        self._tree.unlock(lock)

    def unlocked_from(self, path: Path) -> int:
        """Return from which token on a path is held by nobody; what holds a token holds all that lie left of it."""
        if not len(path):
            return 0
        before = self._tree.protected_size()
        lock = self.lock(path)
        newly_held = int(self._tree.protected_size()) - int(before)
        self.unlock(lock)
        return len(path) - newly_held

    def takeable_from(self, path: Path) -> int:
        """Return from which token on a path is held by nobody, nor gone on from by any other sequence."""
        if not len(path):
            return 0
        start, children = len(path), 0
        for node in reversed(self._tree.tree_core.collect_path_info([path.node])[0]):
            if node.num_children != children:
                break
            start, children = node.path_start, 1
        return max(start, self.unlocked_from(path))

    def take(self, path: Path, start: int) -> torch.Tensor:
        """Take a path out of the tree from `start` on; return its slots, which are the caller's from now on.

        `start` must not lie left of `takeable_from`, and between two nodes: where a match has ended before.
        """
        from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE

        taken: list[torch.Tensor] = []
        core = self._tree.tree_core
        for node in reversed(core.collect_path_info([path.node])[0] if len(path) else ()):
            if node.path_start < start:
                break
            # Only ever a leaf that nobody holds: on any other the Rust core panics, and stays poisoned.
            result = core.evict_device_leaf(node.node_id, core.is_write_back)
            taken[:0] = result.device_frees.pop(BASE_COMPONENT_TYPE)
            self._tree._apply_cache_actions(result.cache_actions)
        return torch.cat(taken).to(torch.int64) if taken else self.no_slots()

    def no_slots(self) -> torch.Tensor:
        """Return a vector of no slots, where the pool is."""
        return torch.empty(0, dtype=torch.int64, device=self._allocator.device)

    def allocate(self, num_slots: int) -> torch.Tensor | None:
        """Return `num_slots` free slots, evicting what nobody holds; None where the pool cannot give them.

        Then nothing is evicted either.
        """
        if self._allocator.available_size() + self._tree.evictable_size() < num_slots:
            return None
        self._allocator.evict_to_free_tokens(self._tree, num_slots)
        slots: torch.Tensor | None = self._allocator.alloc(num_slots)
        return None if slots is None else slots.to(torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        """Return slots that no path names."""
        self._allocator.free(slots)

    def free_slots(self) -> torch.Tensor:
        """Return every slot that is free: neither the tree nor a running request refers to it."""
        return torch.cat([self._allocator.free_pages, self._allocator.release_pages])

    def insert(
        self,
        token_ids: array[int],
        slots: torch.Tensor,
        *,
        matched: int,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> Path:
        """Key `slots` by `token_ids[matched:]`, the first that are not cached; the tree owns them from here on.

        The cache frees slots of tokens that it finds keyed, so `matched` must be the true matched length. Returns the
        path of all `token_ids`.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        # Of tokens that are keyed already the cache looks at no slot.
        value = slots.new_empty(len(token_ids), dtype=torch.int64)
        value[matched:] = slots
        key = self._key(token_ids, extra_key, cache_salt)
        inserted = self._tree.insert(InsertParams(key=key, value=value, prev_prefix_len=matched))
        return Path(self._tree, inserted.last_device_node, len(token_ids))

    def counts(self) -> dict[str, int]:
        """Return slots by state; `available + evictable + protected == size` unless requests run."""
        return {
            "available": int(self._allocator.available_size()),
            "evictable": int(self._tree.evictable_size()),
            "protected": int(self._tree.protected_size()),
            "size": int(self._allocator.size),
        }


# --- R in the batch of its request (scheduler process) --------------------------------------------------------------

_SIBLING = "leyline_sibling_slots"
"""Attribute of a request of ours that computes R beside the request that reads it: the slots that R goes to, or None
where it has none (any more)."""
_WRITES_BEFORE_READING = ("TritonAttnBackend", "TorchNativeAttnBackend")
"""Attention backends, seen to put the keys of a whole batch into the pool before any of its sequences reads them."""


def not_in_one_step(scheduler: Any) -> list[str]:
    """Return why R must not be computed in the batch of the request that reads it; empty where it may."""
    args = scheduler.server_args.resolved_dict()
    backend = type(scheduler.tp_worker.model_runner.attn_backend).__name__
    reasons = []
    if backend not in _WRITES_BEFORE_READING:
        reasons.append(f"attention backend {backend}; seen with {', '.join(_WRITES_BEFORE_READING)}")
    if args["enable_two_batch_overlap"]:
        reasons.append("--enable-two-batch-overlap: R and its request may land in different halves")
    return reasons


def around_admission(hook: Callable[[Any, Any, Any, Callable[[Any], Any]], Any]) -> None:
    """Call `hook(scheduler, adder, req, admit)` where a waiting request is to join the batch that is being built.

    `admit(req)` is what SGLang does; the hook returns its result, `batch_is_full` or `pass_over`.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    schedulers: list[Any] = []

    def around(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(schedulers[0], adder, req, lambda other: original(adder, other, *args, **kwargs))

    at_scheduler_start(schedulers.append)
    HookRegistry.register(_SRT + "managers.schedule_policy.PrefillAdder.add_one_req", around, HookType.AROUND)
    target = _SRT + "managers.schedule_batch.alloc_for_extend"
    HookRegistry.register(target, _write_to_placed_slots, HookType.AROUND)
    target = _SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
    HookRegistry.register(target, _stream_no_sibling, HookType.AROUND)


def batch_is_full() -> Any:
    """Return what ends a batch: the request and those behind it wait for the next one."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def pass_over() -> Any:
    """Return what leaves a request waiting and lets those behind it into the batch."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.CONTINUE


def is_given_up(req: Any) -> bool:
    """Whether the engine only admits the request to end it; its prompt is another one then."""
    return req.to_finish is not None


def is_admitted(adder: Any, req: Any) -> bool:
    """Whether a request is in the batch that is being built, whole."""
    return req in adder.can_run_list and adder.new_chunked_req is not req


def has_budget(adder: Any) -> bool:
    """Whether the batch that is being built takes another request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return bool(adder.budget_state() == AddReqResult.CONTINUE)


def nothing_runs(scheduler: Any, adder: Any) -> bool:
    """Whether the batch that is being built is empty, and so is the one that decodes: waiting would be for nothing."""
    return not adder.can_run_list and scheduler.chunked_req is None and adder.running_batch.is_empty()


def has_preempted(adder: Any) -> bool:
    """Whether running requests have given way to one of this batch; SGLang does that again for each that waits on."""
    return bool(adder.preempt_list)


def free_request_slots(scheduler: Any, adder: Any) -> int:
    """Return how many requests may yet join the batch that is being built."""
    running = adder.running_batch
    held = sum(req.kv.holds_kv for req in adder.can_run_list)
    free = scheduler.get_num_allocatable_reqs(len(running.reqs), running_batch=running, num_held_rows=held)
    return int(free) - len(adder.can_run_list)


def prefill_budget(adder: Any) -> int:
    """Return how many tokens the batch that is being built may yet compute."""
    budget = adder.rem_input_tokens
    return int(budget if adder.rem_chunk_tokens is None else min(budget, adder.rem_chunk_tokens))


def free_tokens(adder: Any) -> int:
    """Return how many slots of the pool the batch that is being built may yet take."""
    return int(adder.rem_total_tokens)


def one_batch(scheduler: Any) -> dict[str, int]:
    """Return what one batch can hold at most: `requests`, and `tokens` to compute."""
    from sglang.srt.runtime_context import get_schedule

    requests = [scheduler.max_running_requests, get_schedule().prefill_max_requests]
    tokens = [scheduler.max_prefill_tokens, scheduler.chunked_prefill_size]
    return {
        "requests": min(number for number in requests if number is not None),
        "tokens": min(number for number in tokens if number is not None),
    }


def new_sibling(scheduler: Any, req: Any, token_ids: array[int], prefix: Path) -> Any:
    """Return a request that computes `token_ids` right of a cached prefix, and leaves the cache as it is.

    What it samples goes nowhere. It is admitted as any other, then told by `place_sibling` where its rows go.
    """
    from sglang.srt.managers.schedule_batch import Req

    sibling = Req(
        f"{req.rid}-leyline",
        "",
        token_ids,
        _sampled_alike(req.sampling_params),
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
        vocab_size=scheduler.model_config.vocab_size,
        priority=req.priority,
    )
    sibling.skip_radix_cache_insert, sibling.tokenizer = True, None
    sibling.refresh_fill_ids()
    sibling.prefix_len = sibling.num_matched_prefix_tokens = sibling.kv.cache_protected_len = len(prefix)
    sibling.last_node = sibling.last_host_node = sibling.best_match_node = prefix.node
    sibling.host_hit_length = sibling.swa_host_hit_length = sibling.mamba_host_hit_length = 0
    setattr(sibling, _SIBLING, None)
    return sibling


def _sampled_alike(params: Any) -> Any:
    """Return parameters that generate nothing, and change nothing in how the rest of the batch is sampled."""
    return _generating_nothing(params.temperature, params.top_p, params.top_k, params.min_p)


@lru_cache(maxsize=256)
def _generating_nothing(temperature: float, top_p: float, top_k: int, min_p: float) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=0, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    sampling.normalize(None)
    return sampling


def place_sibling(scheduler: Any, sibling: Any, slots: torch.Tensor, path: Path) -> None:
    """Have an admitted sibling write its rows to `slots`, which `path` names, and hold that path until it has ended."""
    tree = scheduler.tree_cache
    held, sibling.lock = sibling.lock, tree.lock(path.node)
    tree.unlock(held)
    sibling.last_node = path.node
    setattr(sibling, _SIBLING, slots)


def use_namespace(scheduler: Any, req: Any, cache_salt: str | None) -> int:
    """Have a waiting request take its prefix from a namespace, as that is now; return how much there is of it."""
    req.cache_salt = cache_salt
    req.init_next_round_input(scheduler.tree_cache)
    return int(req.prefix_len)


def _write_to_placed_slots(original: Callable[..., Any], batch: Any) -> Any:
    """Stand around `alloc_for_extend`, which gives every sequence fresh slots: R's are keyed already."""
    out_cache_loc, *rest = original(batch)
    spare, start = [], 0
    for req, num_tokens in zip(batch.reqs, batch.extend_lens, strict=True):
        slots = getattr(req, _SIBLING, None)
        if slots is not None:
            spare.append(out_cache_loc[start : start + num_tokens].clone())
            out_cache_loc[start : start + num_tokens] = slots.to(out_cache_loc.dtype)
            columns = slice(req.prefix_len, req.prefix_len + num_tokens)
            batch.req_to_token_pool.write((req.kv.req_pool_idx, columns), slots.to(torch.int32))
            # They are the cache's: what ends the sibling frees none of them.
            req.kv.cache_protected_len = req.prefix_len + num_tokens
            # A sibling that is preempted and admitted again writes to slots of its own, which it frees.
            setattr(req, _SIBLING, None)
        start += num_tokens
    if spare:
        batch.tree_cache.token_to_kv_pool_allocator.free(torch.cat(spare).to(torch.int64))
    return (out_cache_loc, *rest)


def _stream_no_sibling(original: Callable[..., Any], streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Stand around `stream_output`: nobody has asked for what a sibling samples."""
    return original(streamer, [req for req in reqs if not hasattr(req, _SIBLING)], *args, **kwargs)


# --- the pool (scheduler process) -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MlaPool:
    """The KV pool of an MLA model: a row is the latent, then `k_pe` after RoPE."""

    layers: LayerBuffers
    inv_freq: torch.Tensor
    """fp32 `[qk_rope_head_dim / 2]`, radians a position."""
    is_neox_style: bool


_POOLS: WeakKeyDictionary[Any, MlaPool] = WeakKeyDictionary()
"""To find the rotary embedding walks the model, which a splice should not pay for."""


def mla_pool(scheduler: Any) -> MlaPool:
    """Return the pool, with the rotary frequencies of the model that fills it."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    known = _POOLS.get(pool)
    if known is None or known.layers.buffers[0] is not pool.kv_buffer[0]:
        rotary = _rotary_embeddings(scheduler)[0]
        _POOLS[pool] = MlaPool(
            layers=LayerBuffers.of(pool.kv_buffer, MlaLayout(pool.kv_lora_rank, pool.qk_rope_head_dim)),
            inv_freq=_inv_freq(rotary).to(pool.kv_buffer[0].device),
            is_neox_style=bool(rotary.is_neox_style),
        )
    return _POOLS[pool]


def scrub_free_slots(scheduler: Any) -> int:
    """Zero every free slot in all layers, after the forward pass in flight; return how many.

    Slot 0 too, into which padding tokens are written. A pass in flight may still write the row of a request that has
    ended, into a slot that is free by now; that is why it is waited for. While the pool's memory is given back to the
    system there are no rows, and where they were must not be written to.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    if GPU_MEMORY_TYPE_KV_CACHE in scheduler.weight_updater.offload_tags:
        return 0
    free = RadixPort(scheduler.tree_cache).free_slots()
    wait_for_forward(scheduler)
    slots = torch.cat([free.new_zeros(1), free])
    for buffer in scheduler.token_to_kv_pool_allocator.get_kvcache().kv_buffer:
        buffer.index_fill_(0, slots, 0)
    return len(free)


def wait_for_forward(scheduler: Any) -> None:
    """Order what follows behind the forward pass in flight, which runs on another stream on a GPU."""
    stream = getattr(scheduler, "forward_stream", None)
    if stream is not None and _on_cuda():
        torch.cuda.current_stream().wait_event(stream.record_event(_forward_event()))


@cache
def _forward_event() -> Any:
    """Return the one event that a wait takes: to make one takes longer than the wait."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@cache
def _on_cuda() -> bool:
    return torch.cuda.is_available()


def _rotary_embeddings(scheduler: Any) -> list[Any]:
    layers = scheduler.tp_worker.model_runner.model.model.layers
    return [layer.self_attn.rotary_emb for layer in layers]


def _inv_freq(rotary: Any) -> torch.Tensor:
    """Return the frequencies by the model's own formula; YaRN's differ from 1 / theta, and take its factor."""
    argument = rotary.scaling_factor if hasattr(rotary, "scaling_factor") else rotary.base
    return rotary._compute_inv_freq(argument).to(torch.float32)  # type: ignore[no-any-return]


# --- what we cannot serve -------------------------------------------------------------------------------------------

_ROTARY_TYPES = ("RotaryEmbedding", "YaRNScalingRotaryEmbedding", "DeepseekScalingRotaryEmbedding")


def unsupported(scheduler: Any) -> list[str]:
    """Return every reason why this server must not splice; empty where it may.

    What is listed here would break an assumption of the splice silently, so it is refused until built and tested.
    """
    args = scheduler.server_args.resolved_dict()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    tree = scheduler.tree_cache
    # A name that is gone is a KeyError on purpose: a renamed setting must not pass as a plain one.
    reasons = [why for name, plain, why in _SETTINGS if args[name] not in (plain, None)]
    if sglang_version() not in SUPPORTED_VERSIONS:
        reasons.append(f"SGLang {sglang_version()}; tested with {', '.join(SUPPORTED_VERSIONS)}")
    if getattr(scheduler, "rust_server", None) is not None:
        reasons.append("SGLANG_RUST_SERVER=1: requests do not pass the Python tokenizer manager")
    if type(tree).__name__ != "UnifiedRadixCache":
        reasons.append(f"prefix cache {type(tree).__name__}; built for UnifiedRadixCache")
    elif [str(getattr(c.component_type, "name", c.component_type)) for c in tree._components_tuple] != ["FULL"]:
        reasons.append("a radix cache with sliding-window or state components")
    elif tree.linker is not None:
        reasons.append("an external cache linker")
    if scheduler.token_to_kv_pool_allocator.page_size != 1:
        reasons.append(f"page size {scheduler.token_to_kv_pool_allocator.page_size}; built for 1")
    return [*reasons, *_unsupported_rows(scheduler, pool)]


def _unsupported_rows(scheduler: Any, pool: Any) -> list[str]:
    if type(pool).__name__ != "MLATokenToKVPool":
        return [f"KV pool {type(pool).__name__}; built for MLATokenToKVPool"]
    reasons = []
    if pool.dtype != pool.store_dtype or pool.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reasons.append(f"KV rows of {pool.dtype} stored as {pool.store_dtype}; built for plain fp32, bf16 and fp16")
    if pool.use_dsa:
        reasons.append("sparse attention with index keys (DSA)")
    if pool.dcp_replicated or getattr(pool, "layer_shard_enabled", False):
        reasons.append("KV rows sharded over ranks")
    try:
        rotary = _rotary_embeddings(scheduler)
    except AttributeError as error:
        return [*reasons, f"no rotary embedding found in the model ({error})"]
    kinds = {type(module).__name__ for module in rotary}
    if len(kinds) != 1 or not kinds <= set(_ROTARY_TYPES):
        reasons.append(f"rotary embedding {', '.join(sorted(kinds))}; built for {', '.join(_ROTARY_TYPES)}")
    elif any(not torch.equal(_inv_freq(module), _inv_freq(rotary[0])) for module in rotary[1:]):
        reasons.append("layers whose rotary frequencies differ")
    return reasons


# Setting, its plain value, why another is refused.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("disable_radix_cache", False, "--disable-radix-cache: there is no cache to edit"),
    ("radix_cache_backend", None, "another radix cache backend"),
    ("enable_lmcache", False, "LMCache"),
    ("enable_flexkv", False, "FlexKV"),
    ("enable_hierarchical_cache", False, "HiCache: rows may live on the host"),
    ("enable_hisparse", False, "HiSparse"),
    ("enable_unified_memory", False, "unified memory: rows of all layers share one buffer"),
    ("enable_page_major_kv_layout", False, "page-major KV layout"),
    ("enable_session_radix_cache", False, "radix sessions"),
    ("enable_streaming_session", False, "streaming sessions"),
    ("speculative_algorithm", None, "speculative decoding: the draft model keeps KV of its own"),
    ("disaggregation_mode", "null", "prefill/decode disaggregation"),
    ("enable_lora", False, "LoRA"),
    ("pp_size", 1, "pipeline parallel"),
    ("dp_size", 1, "data parallel"),
    ("dcp_size", 1, "decode context parallel: KV is sharded over ranks"),
    ("attn_cp_size", 1, "attention context parallel"),
    ("tokenizer_worker_num", 1, "several tokenizer workers: they load no plugins"),
    ("elastic_ep_backend", None, "elastic expert parallel: it changes the cache namespace after tokenizing"),
    ("dllm_algorithm", None, "diffusion language models"),
    ("kv_canary", "none", "the KV canary, whose checksums follow a token's position"),
)
