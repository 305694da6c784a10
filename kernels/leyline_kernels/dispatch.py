"""Which code moves rows of all layers: plain torch for a pool on a CPU, the fused kernel for one on CUDA.

The device of the pool alone decides, and nothing falls back: on CUDA a triton that is missing is an error. Both do the
same to the bit, under the same rule: the slots read and the slots written are disjoint, or the same in the same order,
and none is written twice.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch

from leyline_kernels import reference, rope_tables
from leyline_kernels.layer_buffers import LayerBuffers, check_moves

Backend = Literal["torch", "triton"]


def backend_of(device: torch.device) -> Backend:
    """Return what moves rows on `device`.

    Raises:
        ValueError: there is nothing for such a device.
    """
    if device.type == "cpu":
        return "torch"
    if device.type == "cuda":
        return "triton"
    raise ValueError(f"device: got {device}, expected a pool on a CPU or on CUDA")


def warm_up(layers: LayerBuffers, *, is_neox_style: bool) -> None:
    """Compile what later moves in this pool need, where something is compiled; no row changes.

    Raises:
        ValueError: there is nothing that moves rows on the device of the pool.
        ImportError: the pool is on CUDA and triton is missing.
    """
    if backend_of(layers.device) == "triton":
        from leyline_kernels import rotate

        rotate.warm_up(layers, is_neox_style=is_neox_style)


def run_table(
    inv_freq: torch.Tensor, num_rows: int, *, old_start: int, position_delta: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of a move of adjacent rows, each float32 `[num_rows, rope_dim / 2]`, or of one for all.

    Args:
        inv_freq: `[rope_dim / 2]` float32, from the model's own rotary embedding, on the device of the pool.
        num_rows: Rows of the run.
        old_start: Position of its first row before the move.
        position_delta: New minus old position.

    Raises:
        ValueError: `inv_freq` is not a float32 vector, or there is nothing that moves rows on its device.
    """
    if position_delta == 0:
        return _no_turn(len(inv_freq), inv_freq.device)
    if backend_of(inv_freq.device) == "triton":
        from leyline_kernels import rotate

        return rotate.run_table(inv_freq, num_rows, old_start=old_start, position_delta=position_delta)
    return rope_tables.move_table(inv_freq, torch.arange(old_start, old_start + num_rows), position_delta)


@lru_cache(maxsize=16)
def _no_turn(num_pairs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(num_pairs, device=device), torch.zeros(num_pairs, device=device)


def copy_rotate_all_(
    layers: LayerBuffers,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    *,
    is_neox_style: bool,
    check_slots: bool = False,
) -> None:
    """Write row `src_slots[i]` of every layer, turned, to `dst_slots[i]`, in place.

    Args:
        layers: The pool.
        src_slots: Integer vector `[num_rows]`; may be empty.
        dst_slots: Likewise, of the same length.
        table: Cosine and sine, from `rope_tables.move_table` or `delta_table`.
        is_neox_style: As in `reference.rotate_rows`.
        check_slots: Refuse slots that break the rule above. Waits for the device.

    Raises:
        ValueError: shapes, strides, dtypes or devices do not fit each other, or `check_slots` found a fault.
        IndexError: `check_slots` found a slot outside of the pool.
    """
    cos, sin = table
    if backend_of(layers.device) == "triton":
        from leyline_kernels import rotate

        rotate.copy_rotate_(
            layers, src_slots, dst_slots, cos=cos, sin=sin, is_neox_style=is_neox_style, check_slots=check_slots
        )
        return
    if check_slots:
        check_moves(src_slots, dst_slots, num_slots=layers.num_slots)
    for buffer in layers.buffers:
        reference.copy_rotate_(
            buffer, src_slots, dst_slots, layout=layers.layout, cos=cos, sin=sin, is_neox_style=is_neox_style
        )


def rotate_all_(
    layers: LayerBuffers,
    slots: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    *,
    is_neox_style: bool,
    check_slots: bool = False,
) -> None:
    """Turn the rows `slots` of every layer where they stand, for the traffic of the band alone.

    Args:
        layers: The pool.
        slots: Integer vector `[num_rows]`, none twice; may be empty.
        table: As in `copy_rotate_all_`.
        is_neox_style: As in `reference.rotate_rows`.
        check_slots: Refuse slots that break the rule above. Waits for the device.

    Raises:
        ValueError: shapes, strides, dtypes or devices do not fit each other, or `check_slots` found a fault.
        IndexError: `check_slots` found a slot outside of the pool.
    """
    cos, sin = table
    if backend_of(layers.device) == "triton":
        from leyline_kernels import rotate

        rotate.rotate_(layers, slots, cos=cos, sin=sin, is_neox_style=is_neox_style, check_slots=check_slots)
        return
    if check_slots:
        check_moves(slots, slots, num_slots=layers.num_slots)
    for buffer in layers.buffers:
        reference.rotate_(buffer, slots, layout=layers.layout, cos=cos, sin=sin, is_neox_style=is_neox_style)
