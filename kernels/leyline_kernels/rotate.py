"""Move rows of all layers at once and turn their bands: one Triton launch.

The meaning is `reference.copy_rotate_` and `reference.rotate_` for each layer, bit for bit: maths in float32, one
rounding an operation, none fused, stored in the dtype of the pool. The launchers allocate nothing and wait for nothing,
so they can be captured in a CUDA graph; they work on the current stream, and the caller orders it after the forward
pass that wrote the rows.

Rows are moved in no order, so the slots read and the slots written are disjoint, or the same in the same order, and
none is written twice. To look whether they are would wait for the device; `check_slots=True` does, for debugging.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from leyline_kernels.layer_buffers import LayerBuffers, check_moves

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "leyline_kernels.rotate needs triton, which CUDA builds of torch bring; SGLang for a GPU installs one"
    ) from error

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# How the work is cut, measured on an H200: evals/results/notes.md.
_COPY_ROWS, _COPY_WARPS = 2, 1
_TURN_ROWS, _TURN_LAYERS, _TURN_WARPS = 8, 4, 4
_TABLE_ROWS = 8
_LATENT_COLUMNS = 512
"""The most columns of a latent that are loaded at once."""


def copy_rotate_(
    layers: LayerBuffers,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
    check_slots: bool = False,
) -> None:
    """Write row `src_slots[i]` of every layer, turned, to `dst_slots[i]`, in place; other slots are not touched.

    Args:
        layers: The pool.
        src_slots: int32 or int64 vector `[num_rows]`; may be empty.
        dst_slots: Likewise, of the same length. See the module for which slots they may be.
        cos: From `rope_tables`, float32 `[num_rows, rope_dim / 2]`, or `[rope_dim / 2]` for all rows.
        sin: Likewise.
        is_neox_style: As in `reference.rotate_rows`.
        check_slots: Refuse slots that are out of range, twice in `dst_slots`, or in both sets. Waits for the device.

    Raises:
        ValueError: shapes, strides, dtypes or devices do not fit each other, or `check_slots` found a fault.
        IndexError: `check_slots` found a slot outside of the pool. Without it a bad slot reads or writes elsewhere.
    """
    if src_slots.shape != dst_slots.shape:
        raise ValueError(f"got {len(src_slots)} src_slots for {len(dst_slots)} dst_slots, expected as many")
    _check(layers, {"src_slots": src_slots, "dst_slots": dst_slots}, {"cos": cos, "sin": sin})
    if check_slots:
        check_moves(src_slots, dst_slots, num_slots=layers.num_slots)
    num_rows, num_layers = len(src_slots), len(layers.buffers)
    if not num_rows:
        return
    with _current(layers.device):
        _copy_rotate_kernel[(triton.cdiv(num_rows, _COPY_ROWS) * num_layers,)](
            layers.addresses,
            src_slots,
            dst_slots,
            cos,
            sin,
            num_rows,
            num_layers,
            layers.row_stride,
            _row_stride(cos),
            _row_stride(sin),
            **_constants(layers, is_neox_style),
            BLOCK_ROWS=_COPY_ROWS,
            BLOCK_LATENT=min(_LATENT_COLUMNS, triton.next_power_of_2(layers.layout.kv_lora_rank)),
            num_warps=_COPY_WARPS,
        )


def rotate_(
    layers: LayerBuffers,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
    check_slots: bool = False,
) -> None:
    """Turn the rows `slots` of every layer where they stand; other slots and columns are neither read nor written.

    Args:
        layers: The pool.
        slots: int32 or int64 vector `[num_rows]`, none twice; may be empty.
        cos: As in `copy_rotate_`.
        sin: As in `copy_rotate_`.
        is_neox_style: As in `reference.rotate_rows`.
        check_slots: Refuse slots that are out of range or occur twice. Waits for the device.

    Raises:
        ValueError: shapes, strides, dtypes or devices do not fit each other, or `check_slots` found a fault.
        IndexError: `check_slots` found a slot outside of the pool. Without it a bad slot reads and writes elsewhere.
    """
    _check(layers, {"slots": slots}, {"cos": cos, "sin": sin})
    if check_slots:
        check_moves(slots, slots, num_slots=layers.num_slots)
    num_rows, num_layers = len(slots), len(layers.buffers)
    if not num_rows:
        return
    with _current(layers.device):
        _rotate_kernel[(triton.cdiv(num_rows, _TURN_ROWS) * triton.cdiv(num_layers, _TURN_LAYERS),)](
            layers.addresses,
            slots,
            cos,
            sin,
            num_rows,
            num_layers,
            layers.row_stride,
            _row_stride(cos),
            _row_stride(sin),
            **_constants(layers, is_neox_style),
            BLOCK_ROWS=_TURN_ROWS,
            LAYERS=_TURN_LAYERS,
            num_warps=_TURN_WARPS,
        )


def run_table(
    inv_freq: torch.Tensor, num_rows: int, *, old_start: int, position_delta: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rope_tables.move_table` of adjacent positions in one launch instead of some fifteen.

    Args:
        inv_freq: As there.
        num_rows: Rows of the run.
        old_start: Position of its first row before the move.
        position_delta: New minus old position.
    """
    cos, sin = torch.empty(2, num_rows, len(inv_freq), device=inv_freq.device).unbind()
    if num_rows:
        with _current(inv_freq.device):
            _run_table_kernel[(triton.cdiv(num_rows, _TABLE_ROWS),)](
                inv_freq,
                cos,
                sin,
                num_rows,
                old_start,
                position_delta,
                HALF=len(inv_freq),
                BLOCK_HALF=triton.next_power_of_2(len(inv_freq)),
                BLOCK_ROWS=_TABLE_ROWS,
                # Two products and their difference, none fused: as `move_table` rounds them.
                enable_fp_fusion=False,
            )
    return cos, sin


def warm_up(layers: LayerBuffers, *, is_neox_style: bool) -> None:
    """Compile what later moves in this pool need (with int64 slots), so that none of them waits seconds for it.

    Turns row 0 of every layer by nothing at all, which leaves every bit as it is.
    """
    slot = torch.zeros(1, dtype=torch.int64, device=layers.device)
    inv_freq = torch.ones(layers.layout.qk_rope_head_dim // 2, device=layers.device)
    cos, sin = run_table(inv_freq, 1, old_start=0, position_delta=0)
    copy_rotate_(layers, slot, slot, cos=cos, sin=sin, is_neox_style=is_neox_style)
    rotate_(layers, slot, cos=cos, sin=sin, is_neox_style=is_neox_style)


def _check(layers: LayerBuffers, slot_vectors: dict[str, torch.Tensor], tables: dict[str, torch.Tensor]) -> None:
    device = layers.device
    # The interpreter runs kernels on a CPU; there is no other way to launch one there.
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"the pool is on {device}, expected CUDA: use leyline_kernels.dispatch, or the reference")
    num_rows, half = 0, layers.layout.qk_rope_head_dim // 2
    for name, slots in slot_vectors.items():
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
            raise ValueError(
                f"{name}: got {slots.dtype} of shape {tuple(slots.shape)} and strides {slots.stride()}, expected a "
                "contiguous integer vector [num_rows]"
            )
        num_rows = len(slots)
    for name, table in tables.items():
        if tuple(table.shape) not in ((half,), (num_rows, half)) or table.dtype != torch.float32:
            raise ValueError(
                f"{name}: got {table.dtype} of shape {tuple(table.shape)}, expected float32 of shape ({half},) or "
                f"({num_rows}, {half}) for {layers.layout}"
            )
        if table.stride(-1) != 1:
            raise ValueError(f"{name}: got strides {table.stride()}, expected adjacent columns")
    for name, tensor in {**slot_vectors, **tables}.items():
        if tensor.device != device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}, where the pool is")


def _row_stride(table: torch.Tensor) -> int:
    """Return how far apart the table's rows are: 0 where all rows share one."""
    return table.stride(0) if table.dim() == 2 else 0


def _constants(layers: LayerBuffers, is_neox_style: bool) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    half = layers.layout.qk_rope_head_dim // 2
    return {
        "LATENT_WIDTH": layers.layout.kv_lora_rank,
        "HALF": half,
        "IS_NEOX": is_neox_style,
        "DTYPE": _DTYPES[layers.dtype],
        "ALIGNED_BYTES": layers.row_alignment_bytes,
        "BLOCK_HALF": triton.next_power_of_2(half),
        # A fused multiply-add rounds once where the reference rounds twice.
        "enable_fp_fusion": False,
    }


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the one that Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "old_start", "position_delta"]
)
def _run_table_kernel(
    inv_freq_ptr: tl.tensor,  # [HALF]
    cos_ptr: tl.tensor,  # [num_rows, HALF]
    sin_ptr: tl.tensor,  # [num_rows, HALF]
    num_rows: tl.tensor,
    old_start: tl.tensor,
    position_delta: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Write cosine and sine of BLOCK_ROWS rows."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (rows < num_rows) & (pairs < HALF)
    inv_freq = tl.load(inv_freq_ptr + pairs, mask=pairs < HALF, other=0.0)
    old_angles = (old_start + rows).to(tl.float32) * inv_freq
    new_angles = (old_start + position_delta + rows).to(tl.float32) * inv_freq
    angles = new_angles.to(tl.float64) - old_angles.to(tl.float64)
    offsets = rows * HALF + pairs
    tl.store(cos_ptr + offsets, tl.cos(angles).to(tl.float32), mask=mask)
    tl.store(sin_ptr + offsets, tl.sin(angles).to(tl.float32), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _load_table(
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    rows: tl.tensor,
    in_rows: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return cosine and sine of each pair, [BLOCK_ROWS, BLOCK_HALF]."""
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    mask = in_rows[:, None] & (pairs < HALF)
    rows = rows.to(tl.int64)[:, None]
    cos = tl.load(cos_ptr + rows * cos_stride + pairs, mask=mask, other=1.0)
    sin = tl.load(sin_ptr + rows * sin_stride + pairs, mask=mask, other=0.0)
    return cos, sin


@triton.jit  # type: ignore[untyped-decorator]
def _load_band(
    band_ptrs: tl.tensor, in_rows: tl.tensor, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, IS_NEOX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return both of each pair, [BLOCK_ROWS, BLOCK_HALF] each, of bands that begin at `band_ptrs` [BLOCK_ROWS]."""
    if IS_NEOX:
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        mask = in_rows[:, None] & (pairs < HALF)
        x = tl.load(band_ptrs[:, None] + pairs, mask=mask, other=0.0)
        y = tl.load(band_ptrs[:, None] + HALF + pairs, mask=mask, other=0.0)
    else:
        columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = in_rows[:, None] & (columns < 2 * HALF)
        band = tl.load(band_ptrs[:, None] + columns, mask=mask, other=0.0)
        x, y = tl.split(tl.reshape(band, (band.shape[0], BLOCK_HALF, 2)))
    return x, y


@triton.jit  # type: ignore[untyped-decorator]
def _store_band(
    band_ptrs: tl.tensor,
    x: tl.tensor,
    y: tl.tensor,
    in_rows: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
) -> None:
    """Write what `_load_band` returns."""
    if IS_NEOX:
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        mask = in_rows[:, None] & (pairs < HALF)
        tl.store(band_ptrs[:, None] + pairs, x, mask=mask)
        tl.store(band_ptrs[:, None] + HALF + pairs, y, mask=mask)
    else:
        columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = in_rows[:, None] & (columns < 2 * HALF)
        band = tl.reshape(tl.join(x, y), (x.shape[0], 2 * BLOCK_HALF))
        tl.store(band_ptrs[:, None] + columns, band, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(x: tl.tensor, y: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Turn pairs (x, y); where the table says not to turn at all, keep every bit."""
    stays = (cos == 1.0) & (sin == 0.0)
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    turned_x = (x32 * cos - y32 * sin).to(x.dtype)
    turned_y = (x32 * sin + y32 * cos).to(y.dtype)
    return tl.where(stays, x, turned_x), tl.where(stays, y, turned_y)


@triton.jit  # type: ignore[untyped-decorator]
def _row_ptrs(bases: tl.tensor, offsets: tl.tensor, DTYPE: tl.constexpr, ALIGNED_BYTES: tl.constexpr) -> tl.tensor:
    """Return where rows begin that are `offsets` [BLOCK_ROWS] elements from the start of their layers' buffers."""
    # Said of the sum: the compiler takes nothing as known of a pointer that was a number.
    return tl.multiple_of(bases.to(tl.pointer_type(DTYPE)) + offsets, ALIGNED_BYTES)


# Compiled once for a pool, whatever is moved in it: not again for other numbers of rows or views into slot vectors.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "num_layers"], do_not_specialize_on_alignment=["src_ptr", "dst_ptr"]
)
def _copy_rotate_kernel(
    addresses_ptr: tl.tensor,  # [num_layers]
    src_ptr: tl.tensor,  # [num_rows]
    dst_ptr: tl.tensor,  # [num_rows]
    cos_ptr: tl.tensor,  # [num_rows, HALF]
    sin_ptr: tl.tensor,  # [num_rows, HALF]
    num_rows: tl.tensor,
    num_layers: tl.tensor,
    row_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    LATENT_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Copy BLOCK_ROWS rows of one layer. The next program does the next layer of the same rows, whose table is near."""
    layer = tl.program_id(0) % num_layers
    rows = (tl.program_id(0) // num_layers) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = rows < num_rows
    src_offsets = tl.load(src_ptr + rows, mask=in_rows, other=0).to(tl.int64) * row_stride
    dst_offsets = tl.load(dst_ptr + rows, mask=in_rows, other=0).to(tl.int64) * row_stride
    base = tl.load(addresses_ptr + layer)
    src_ptrs = _row_ptrs(base, src_offsets, DTYPE, ALIGNED_BYTES)
    dst_ptrs = _row_ptrs(base, dst_offsets, DTYPE, ALIGNED_BYTES)
    cos, sin = _load_table(cos_ptr, sin_ptr, rows, in_rows, cos_stride, sin_stride, HALF, BLOCK_HALF)

    # The band is read before it is written: the slots may be the same.
    x, y = _load_band(src_ptrs + LATENT_WIDTH, in_rows, HALF, BLOCK_HALF, IS_NEOX)
    for start in tl.static_range(0, LATENT_WIDTH, BLOCK_LATENT):
        columns = start + tl.arange(0, BLOCK_LATENT)[None, :]
        mask = in_rows[:, None] & (columns < LATENT_WIDTH)
        latent = tl.load(src_ptrs[:, None] + columns, mask=mask, other=0.0)
        tl.store(dst_ptrs[:, None] + columns, latent, mask=mask)
    x, y = _turn(x, y, cos, sin)
    _store_band(dst_ptrs + LATENT_WIDTH, x, y, in_rows, HALF, BLOCK_HALF, IS_NEOX)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "num_layers"], do_not_specialize_on_alignment=["slots_ptr"]
)
def _rotate_kernel(
    addresses_ptr: tl.tensor,  # [num_layers]
    slots_ptr: tl.tensor,  # [num_rows]
    cos_ptr: tl.tensor,  # [num_rows, HALF]
    sin_ptr: tl.tensor,  # [num_rows, HALF]
    num_rows: tl.tensor,
    num_layers: tl.tensor,
    row_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    LATENT_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    LAYERS: tl.constexpr,
) -> None:
    """Turn BLOCK_ROWS rows of LAYERS layers. Their table comes from the L2 once: a table is as long as two bands."""
    groups = tl.cdiv(num_layers, LAYERS)
    # All rows of the first layer, then all of the next.
    lanes = tl.arange(0, LAYERS * BLOCK_ROWS)
    layers = (tl.program_id(0) % groups) * LAYERS + lanes // BLOCK_ROWS
    rows = (tl.program_id(0) // groups) * BLOCK_ROWS + lanes % BLOCK_ROWS
    in_pool = (rows < num_rows) & (layers < num_layers)
    offsets = tl.load(slots_ptr + rows, mask=in_pool, other=0).to(tl.int64) * row_stride
    bases = tl.load(addresses_ptr + layers, mask=in_pool, other=0)
    band_ptrs = _row_ptrs(bases, offsets, DTYPE, ALIGNED_BYTES) + LATENT_WIDTH
    x, y = _load_band(band_ptrs, in_pool, HALF, BLOCK_HALF, IS_NEOX)
    cos, sin = _load_table(cos_ptr, sin_ptr, rows, in_pool, cos_stride, sin_stride, HALF, BLOCK_HALF)
    x, y = _turn(x, y, cos, sin)
    _store_band(band_ptrs, x, y, in_pool, HALF, BLOCK_HALF, IS_NEOX)
