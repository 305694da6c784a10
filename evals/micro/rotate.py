"""Time the rotation kernel on a GPU: `python -m evals.micro.rotate [--quick] > kernel.jsonl`.

Rows of whole pools, all layers: copied to other slots and turned (`copy`), or turned where they stand (`in_place`), by

- `triton`: our kernel;
- `torch`: `leyline_kernels.reference`, layer by layer;
- `sglang_mla`: `MLATokenToKVPool.move_kv_cache`, what SGLang itself moves such rows with, which does not turn them;
- `sglang_tiled`: the Triton kernel that SGLang copies rows of other pools with, given these rows.

Before anything is timed, its result is compared with the reference's, bit for bit, over the whole pool. One JSON line
for each, and one for the ceiling: a large copy in the same run, bytes read and written. `p50_us` is time on the device,
with the launches queued beforehand, of runs one after the other; `wall_p50_us` is what a caller waits who starts on an
idle device and waits for the end. Each run takes slots (and a table) that no cache holds any more. `bytes` are the
fewest that the operation must move: each row it moves, its slots and its table, once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from leyline_kernels import reference
from leyline_kernels.dispatch import copy_rotate_all_, rotate_all_
from leyline_kernels.layer_buffers import LayerBuffers
from leyline_kernels.layout import MlaLayout
from leyline_kernels.rope_tables import move_table

from evals.micro.result_rows import about
from evals.micro.shapes import MODELS, model_config

NUM_SLOTS = (128, 1024, 4096, 16_384, 65_536, 131_072)
QUICK_SHAPES, QUICK_NUM_SLOTS = ("deepseek-v2-lite",), (1024, 16_384)
ORDERS = ("scattered", "contiguous")
PATHS = {"copy": ("triton", "torch", "sglang_mla", "sglang_tiled"), "in_place": ("triton", "torch")}
_COLD_BYTES = 256 * 2**20
"""What is moved before the same rows come round again: four times the L2 of an H200."""
_CEILING_BYTES = 4 * 2**30
_GROUP_US = 400
_FEWEST_RUNS, _MOST_US = 5, 200_000
"""What takes long is not run as often: no more than this in all, but a few times."""
_CYCLES_A_SECOND = 2e9


@dataclass(frozen=True)
class Pool:
    """The buffers of one model's rows, as SGLang allocates them, filled with random values."""

    shape: str
    layers: LayerBuffers

    @classmethod
    def of(cls, shape: str, num_slots: int) -> Pool:
        """Allocate and fill."""
        sizes = model_config(shape)
        layout = MlaLayout(sizes["kv_lora_rank"], sizes["qk_rope_head_dim"])
        buffers = [
            torch.randn(num_slots, *layout.row_shape, dtype=torch.bfloat16, device="cuda")
            for _ in range(sizes["num_hidden_layers"])
        ]
        return cls(shape, LayerBuffers.of(buffers, layout))

    def differs_from(self, expected: Sequence[torch.Tensor]) -> bool:
        """Tell whether any bit does."""
        pairs = zip(self.layers.buffers, expected, strict=True)
        return not all(torch.equal(buffer.view(torch.int16), other.view(torch.int16)) for buffer, other in pairs)


@dataclass(frozen=True)
class Rows:
    """One set of rows to move and their table; `src` is `dst` for a turn in place."""

    src: torch.Tensor
    dst: torch.Tensor
    table: tuple[torch.Tensor, torch.Tensor]


Move = Callable[[Rows], None]


def row_sets(pool: Pool, path: str, order: str, num_rows: int) -> list[Rows]:
    """Return sets of rows that are disjoint, and so many that the first is cold again after the last."""
    pool_slots, row_bytes = pool.layers.num_slots, bytes_of(pool, path, 1)
    slots_a_set = num_rows * (2 if path == "copy" else 1)
    num_sets = min(-(-_COLD_BYTES // (num_rows * row_bytes)) + 1, pool_slots // slots_a_set)
    generator = torch.Generator("cuda").manual_seed(num_rows)
    everything = torch.arange(pool_slots, device="cuda")
    if order == "scattered":
        everything = torch.randperm(pool_slots, generator=generator, device="cuda")
    half = pool.layers.layout.qk_rope_head_dim // 2
    inv_freq = torch.logspace(0, -4, half, dtype=torch.float32, device="cuda")
    sets = []
    for slots in everything[: num_sets * slots_a_set].view(num_sets, slots_a_set):
        start = int(torch.randint(2**15, 2**16, (1,), generator=generator, device="cuda"))
        table = move_table(inv_freq, torch.arange(start, start + num_rows, device="cuda"), -1988)
        src = slots[:num_rows].contiguous()
        sets.append(Rows(src, slots[num_rows:].contiguous() if path == "copy" else src, table))
    return sets


def bytes_of(pool: Pool, path: str, num_rows: int) -> int:
    """Return the fewest bytes read and written."""
    layout, num_layers = pool.layers.layout, len(pool.layers.buffers)
    columns = layout.row_shape[1] if path == "copy" else layout.qk_rope_head_dim
    table_bytes, slot_bytes = 4 * layout.qk_rope_head_dim, 8 * (2 if path == "copy" else 1)
    return num_rows * (2 * num_layers * columns * pool.layers.dtype.itemsize + table_bytes + slot_bytes)


def mover(backend: str, path: str, pool: Pool) -> Move:
    """Return what moves rows.

    Raises:
        ImportError: SGLang is not installed.
    """
    layers, options = pool.layers, {"is_neox_style": False}
    if backend == "triton":
        if path == "copy":
            return lambda rows: copy_rotate_all_(layers, rows.src, rows.dst, rows.table, **options)
        return lambda rows: rotate_all_(layers, rows.src, rows.table, **options)
    if backend == "torch":
        return lambda rows: _refer(layers.buffers, layers.layout, path, rows)
    if backend == "sglang_mla":
        return _sglang_mla(layers)
    return _sglang_tiled(layers)


def _refer(buffers: Sequence[torch.Tensor], layout: MlaLayout, path: str, rows: Rows) -> None:
    cos, sin = rows.table
    for buffer in buffers:
        if path == "copy":
            reference.copy_rotate_(buffer, rows.src, rows.dst, layout=layout, cos=cos, sin=sin, is_neox_style=False)
        else:
            reference.rotate_(buffer, rows.src, layout=layout, cos=cos, sin=sin, is_neox_style=False)


def _sglang_mla(layers: LayerBuffers) -> Move:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    # All that the method reads of its pool.
    pool = SimpleNamespace(size=layers.num_slots, page_size=0, kv_buffer=list(layers.buffers))
    return lambda rows: MLATokenToKVPool.move_kv_cache(pool, rows.dst, rows.src)


def _sglang_tiled(layers: LayerBuffers) -> Move:
    from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_func

    # As `MHATokenToKVPool` of SGLang 0.5.23 sets it up for rows of under 4,096 B (`_init_kv_copy_and_warmup`,
    # `_move_kv_cache_impl`).
    row_bytes = layers.row_stride * layers.dtype.itemsize
    config = {"bytes_per_tile": 128, "byte_tiles": -(-row_bytes // 128), "num_warps": 4}
    strides = torch.full_like(layers.addresses, row_bytes)

    def move(rows: Rows) -> None:
        for start in range(0, len(rows.src), 256):
            src, dst = rows.src[start : start + 256], rows.dst[start : start + 256]
            upper = 1 << (len(src) - 1).bit_length()
            copy_all_layer_kv_cache_func(layers.addresses, strides, dst, src, len(src), upper, config)

    return move


def assert_right(backend: str, path: str, pool: Pool, rows: Rows, move: Move) -> None:
    """Compare one move with what it should do, over the whole pool.

    Raises:
        AssertionError: they differ.
    """
    expected = [buffer.clone() for buffer in pool.layers.buffers]
    if backend.startswith("sglang"):
        for buffer in expected:
            buffer[rows.dst] = buffer[rows.src]
    else:
        _refer(expected, pool.layers.layout, path, rows)
    move(rows)
    if pool.differs_from(expected):
        raise AssertionError(f"{backend} {path} of {len(rows.src)} rows is wrong, so it is not timed")


def device_times_us(run: Callable[[int], None], *, num_runs: int) -> list[float]:
    """Time runs on the device, in groups of as many as take `_GROUP_US`: an event takes longer than a short run.

    Each group is queued behind a wait that is longer than its launches take, so the device never waits for the host.
    """
    torch.cuda.synchronize()
    started = time.perf_counter()
    run(0)
    launch_s = time.perf_counter() - started
    single_us = _device_time_us(run, range(1, 2), launch_s)
    in_a_row = max(1, round(_GROUP_US / single_us))
    num_groups = min(num_runs, max(_FEWEST_RUNS, round(_MOST_US / single_us)))
    groups = (range(2 + idx * in_a_row, 2 + (idx + 1) * in_a_row) for idx in range(num_groups))
    return [_device_time_us(run, group, launch_s) for group in groups]


def _device_time_us(run: Callable[[int], None], indices: range, launch_s: float) -> float:
    wait_s = 1.5 * min(launch_s * len(indices), 0.02) + 1e-4
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(wait_s * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
    start.record()
    for idx in indices:
        run(idx)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / len(indices)


def wall_times_us(run: Callable[[int], None], *, num_runs: int) -> list[float]:
    """Time runs from the call on an idle device until it is idle again."""
    times = []
    for idx in range(num_runs):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run(idx)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6)
    return times


def percentiles(times_us: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Return the 20th, 50th and 80th."""
    deciles = statistics.quantiles(times_us, n=10, method="inclusive")
    return {f"{prefix}p{10 * (idx + 1)}_us": round(deciles[idx], 2) for idx in (1, 4, 7)}


def ceiling(num_runs: int) -> dict[str, Any]:
    """Return the row of a large copy."""
    source = torch.randn(_CEILING_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)

    def run(_: int) -> None:
        target.copy_(source)

    times = device_times_us(run, num_runs=num_runs)
    figures = percentiles(times)
    num_bytes = 2 * _CEILING_BYTES
    return {"op": "copy_ceiling", "bytes": num_bytes, **figures, "gb_s": _gb_s(num_bytes, figures["p50_us"])}


def _gb_s(num_bytes: int, time_us: float) -> float:
    return round(num_bytes / time_us / 1e3, 1)


def measure(
    pool: Pool, *, path: str, order: str, num_rows: int, ceiling_gb_s: float, num_runs: int
) -> Iterator[dict[str, Any]]:
    """Yield one row for each backend; one that fails, or is wrong, is a row with an error."""
    sets = row_sets(pool, path, order, num_rows)
    num_bytes = bytes_of(pool, path, num_rows)
    rows: dict[str, dict[str, Any]] = {}
    for backend in PATHS[path]:
        row = {
            "op": "rotate",
            "path": path,
            "backend": backend,
            "shape": pool.shape,
            "num_layers": len(pool.layers.buffers),
            "row_width": pool.layers.layout.row_shape[1],
            "dtype": "bfloat16",
            "slots": num_rows,
            "order": order,
            "bytes": num_bytes,
        }
        rows[backend] = row
        try:
            move = mover(backend, path, pool)
            assert_right(backend, path, pool, sets[-1], move)

            def run(idx: int, move: Move = move) -> None:
                move(sets[idx % len(sets)])

            times = device_times_us(run, num_runs=num_runs)
            figures = percentiles(times)
            wall = percentiles(wall_times_us(run, num_runs=len(times)), "wall_")
        except (ImportError, AssertionError, RuntimeError, AttributeError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
            continue
        gb_s = _gb_s(num_bytes, figures["p50_us"])
        row |= {**figures, **wall, "gb_s": gb_s, "share_of_ceiling": round(gb_s / ceiling_gb_s, 3)}
        row |= {"runs": len(times), "row_sets": len(sets)}
    baseline = rows["torch"]
    for row in rows.values():
        if "error" not in row and "error" not in baseline:
            row["speedup_over_torch"] = round(baseline["p50_us"] / row["p50_us"], 2)
            row["wall_speedup_over_torch"] = round(baseline["wall_p50_us"] / row["wall_p50_us"], 2)
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for the ceiling and one for each shape, path, order, number of slots and backend."""
    parser = argparse.ArgumentParser(prog="python -m evals.micro.rotate", description="Time the rotation kernel.")
    parser.add_argument("--quick", action="store_true", help="one shape and two sizes")
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=None, help="default: all")
    parser.add_argument("--runs", type=int, default=20, help="timed runs a row (default: 20)")
    parser.add_argument("--git", help="the commit to write into each row, where there is no repository to ask")
    options = parser.parse_args(arguments)
    if options.runs < 2:
        parser.error(f"--runs: percentiles need 2 runs or more, got {options.runs}")
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none (torch.cuda.is_available() is False)")
    chosen = options.shapes or (QUICK_SHAPES if options.quick else MODELS)
    sizes = QUICK_NUM_SLOTS if options.quick else NUM_SLOTS

    facts = about(options.git, "python -m evals.micro.rotate")
    began = time.perf_counter()
    top = ceiling(options.runs)
    print(json.dumps({**top, **facts}), flush=True)
    for shape in chosen:
        pool = Pool.of(shape, 2 * max(sizes))
        for path in PATHS:
            for num_rows in sizes:
                for order in ORDERS:
                    for row in measure(
                        pool,
                        path=path,
                        order=order,
                        num_rows=num_rows,
                        ceiling_gb_s=top["gb_s"],
                        num_runs=options.runs,
                    ):
                        print(json.dumps({**row, "ceiling_gb_s": top["gb_s"], **facts}), flush=True)
                        outcome = (
                            row.get("error") or f"{row['p50_us']} us, {row['share_of_ceiling']:.0%} of the ceiling"
                        )
                        print(
                            f"{time.perf_counter() - began:6.1f} s  {shape} {path} {num_rows} {order} "
                            f"{row['backend']}: {outcome}",
                            file=sys.stderr,
                            flush=True,
                        )
        del pool
        torch.cuda.empty_cache()
    print(json.dumps({**ceiling(options.runs), "when": "at the end", **facts}), flush=True)


if __name__ == "__main__":
    main()
