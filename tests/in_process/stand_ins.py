"""What stands in for SGLang's processes: the few attributes that its code and ours ask of a scheduler and of a
tokenizer manager, each of which cannot be had without its process. Whatever they lead to is SGLang's own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from leyline_sglang import compat, namespaces, turn_splice
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import create_context, use_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.in_process.rows import MAX_POSITIONS, NUM_LAYERS, VOCAB_SIZE, make_rotary

if TYPE_CHECKING:
    from tests.in_process.engine import Engine


class Allocator(TokenToKVPoolAllocator):
    """The real allocator, which also says what was freed."""

    def __init__(self, size: int, pool: MLATokenToKVPool) -> None:
        self.freed: list[int] = []
        super().__init__(size, dtype=torch.float32, device="cpu", kvcache=pool, need_sort=False)

    def free(self, free_index: torch.Tensor) -> None:
        self.freed.extend(free_index.tolist())
        super().free(free_index)


class Inline(ThreadPoolExecutor):
    """Runs what is handed to a thread at once: nothing here depends on threads, and starting one takes longer."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Loop(asyncio.SelectorEventLoop):
    """An event loop that can tell when nothing more happens by itself, and whose clock can be put forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s

    async def idle(self) -> None:
        """Return once no other task can go on."""
        await asyncio.sleep(0)
        while self._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)


@contextmanager
def predictable_secrets(seed: int) -> Iterator[None]:
    """Have nonces and edit ids follow from `seed`, so that a run can be repeated."""
    generator = random.Random(seed)
    stand_in = SimpleNamespace(token_hex=lambda num_bytes: generator.randbytes(num_bytes).hex())
    with patch.object(namespaces, "secrets", stand_in), patch.object(turn_splice, "secrets", stand_in):
        yield


@cache
def _configuration() -> Any:
    # As a server publishes it at its start; how many requests may run is up to the request slots here.
    context = create_context(
        ServerArgs(model_path="none", device="cpu", pp_max_micro_batch_size=1024), role="scheduler"
    )
    context.parallel.override_permanently(tp_rank=0)
    return context


def published_configuration() -> Any:
    """Return a context in which SGLang's code finds a server's configuration."""
    return use_context(_configuration())


class _Scheduler(SimpleNamespace):
    """Told apart by identity, as our code keeps what it knows of a scheduler by a weak reference."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def make_scheduler(engine: Engine, *, max_prefill_tokens: int, chunked_prefill_size: int | None) -> Any:
    """Return what `Scheduler._get_new_batch_prefill_raw` and our half of the splice ask of a scheduler."""
    layer = SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=make_rotary()))
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer] * NUM_LAYERS))
    plain = {name: value for name, value, _ in compat._SETTINGS}
    max_running = engine.req_to_token.size
    scheduler = _Scheduler(
        tree_cache=engine.tree,
        token_to_kv_pool_allocator=engine.allocator,
        req_to_token_pool=engine.req_to_token,
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(model=model, attn_backend=SimpleNamespace(), prefill_aware_swa=False)
        ),
        server_args=SimpleNamespace(resolved_dict=lambda: plain),
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE, is_encoder_decoder=False),
        ipc_channels=SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=engine.replies.append)),
        get_prefill_adder_class=lambda: engine.adder_class,
        # The queue, and how it is gone through.
        waiting_queue=[],
        chunked_req=None,
        running_batch=None,
        policy=SchedulePolicy("fcfs", engine.tree, False, False, False),
        processed_tokens_counter=0,
        max_prefill_tokens=max_prefill_tokens,
        chunked_prefill_size=chunked_prefill_size,
        max_running_requests=max_running,
        max_prefill_bs=max_running,
        page_size=1,
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
        load_inquirer=SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct: 0),
        # What this server does not have.
        weight_updater=SimpleNamespace(offload_tags=set()),
        grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
        beam_coordinator=SimpleNamespace(pending_member_rows=lambda _batch: 0),
        min_free_slots_delayer=None,
        dynamic_chunk_sizer=None,
        truncation_align_size=None,
        dllm_config=None,
        hisparse_coordinator=None,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        priority_scheduling_preemption_threshold=0,
        enable_priority_preemption=False,
        enable_priority_scheduling=False,
        enable_lora=False,
        enable_lmcache=False,
        enable_hicache_storage=False,
        enable_hierarchical_cache=False,
        enable_unified_cache_external_linker=False,
        enable_overlap=False,
        is_hybrid_swa=False,
        is_mixed_chunk=False,
    )
    scheduler.get_num_allocatable_reqs = Scheduler.get_num_allocatable_reqs.__get__(scheduler)
    return scheduler


def make_manager(
    tell_scheduler: Callable[[Any], None],
    communicator: Callable[[Any], Any],
    generate_request: Callable[[Any, Any], AsyncGenerator[Any, None]],
) -> Any:
    """Return what we ask of a tokenizer manager, whose messages reach the scheduler at once."""
    return SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCAB_SIZE, context_len=MAX_POSITIONS),
        rid_to_state={},
        enable_metrics=False,
        generate_request=generate_request,
        _dispatch_to_scheduler=tell_scheduler,
        _result_dispatcher=SimpleNamespace(_mapping={}),
        **{f"{compat.COMMUNICATOR}_communicator": communicator},
    )
