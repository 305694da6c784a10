"""Move cached keys to new positions, in plain torch: the meaning that a fused kernel is tested against.

Maths in float32, stored in the dtype of the rows. Works on any device; on a GPU the caller orders it after the forward
pass that wrote the rows.
"""

from __future__ import annotations

import torch

from leyline_kernels.layout import RowLayout, check_rows


def rotate_rows(
    rows: torch.Tensor, *, layout: RowLayout, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool
) -> torch.Tensor:
    """Return a copy of `rows` whose band is turned; all other columns are bit-equal.

    Where the table says not to turn at all (cosine 1, sine 0, as for a delta of 0) the band is bit-equal too.

    Args:
        rows: `[num_rows, *layout.row_shape]`.
        layout: Which columns are the band.
        cos: From `rope_tables.delta_table`, `[rope_dim / 2]` for all rows or `[num_rows, rope_dim / 2]`.
        sin: Likewise.
        is_neox_style: The pairs that turn are the two halves of the band (True), or its neighbours (False, as in
            DeepSeek models).

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    check_rows(rows, layout)
    turned = rows.clone()
    _rotate_(turned[..., layout.band], layout, cos, sin, is_neox_style)
    return turned


def copy_rotate_(
    buffer: torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    *,
    layout: RowLayout,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Write row `src_slots[i]`, turned, to `dst_slots[i]`, in place in `buffer`; other slots are not touched.

    All rows are read before any is written, so the two may overlap in any way, down to being the same. A slot that
    occurs twice in `dst_slots` gets either row.

    Args:
        buffer: One layer of a pool, `[num_slots, *layout.row_shape]`.
        src_slots: Integer vector `[num_rows]`; may be empty.
        dst_slots: Likewise, of the same length.
        layout: Which columns are the band.
        cos: As in `rotate_rows`.
        sin: As in `rotate_rows`.
        is_neox_style: As in `rotate_rows`.

    Raises:
        ValueError: shapes or dtypes do not fit each other. The buffer is unchanged.
        IndexError: a slot lies outside of the buffer, on a CPU. The buffer is unchanged.
    """
    check_rows(buffer, layout)
    _check_slots("src_slots", src_slots)
    _check_slots("dst_slots", dst_slots)
    if src_slots.shape != dst_slots.shape:
        raise ValueError(f"got {len(src_slots)} src_slots for {len(dst_slots)} dst_slots, expected as many")
    # `index_copy_` has written some rows when it meets a bad slot. On a GPU this check would wait for the device.
    if buffer.is_cpu and len(dst_slots) and not 0 <= int(dst_slots.min()) <= int(dst_slots.max()) < len(buffer):
        raise IndexError(
            f"dst_slots: got {int(dst_slots.min())} to {int(dst_slots.max())}, expected slots of 0 to {len(buffer) - 1}"
        )
    rows = buffer.index_select(0, src_slots)
    _rotate_(rows[..., layout.band], layout, cos, sin, is_neox_style)
    buffer.index_copy_(0, dst_slots.long(), rows)


def rotate_(
    buffer: torch.Tensor,
    slots: torch.Tensor,
    *,
    layout: RowLayout,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Turn the rows `slots` where they stand, in place in `buffer`; other columns and other slots are not touched.

    Bit for bit what `copy_rotate_` gives where source and destination are the same, for the traffic of the band alone.

    Args:
        buffer: One layer of a pool, `[num_slots, *layout.row_shape]`.
        slots: Integer vector `[num_rows]`; may be empty. None may occur twice: it is not defined how such a row turns.
        layout: Which columns are the band.
        cos: As in `rotate_rows`.
        sin: As in `rotate_rows`.
        is_neox_style: As in `rotate_rows`.

    Raises:
        ValueError: shapes or dtypes do not fit each other. The buffer is unchanged.
        IndexError: a slot lies outside of the buffer, on a CPU. The buffer is unchanged.
    """
    check_rows(buffer, layout)
    _check_slots("slots", slots)
    bands = buffer[..., layout.band]
    turned = bands.index_select(0, slots)
    _rotate_(turned, layout, cos, sin, is_neox_style)
    bands.index_copy_(0, slots.long(), turned)


def _check_slots(name: str, slots: torch.Tensor) -> None:
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: got {slots.dtype} of shape {tuple(slots.shape)}, expected an integer vector [num_rows]"
        )


def _rotate_(band: torch.Tensor, layout: RowLayout, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool) -> None:
    """Turn `band` `[num_rows, num_heads, rope_dim]` in place.

    One rounding an operation, none fused, so a key turns to the same bits wherever it lies in memory.
    """
    num_rows, half = band.shape[0], band.shape[-1] // 2
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) not in ((half,), (num_rows, half)) or table.dtype != torch.float32:
            raise ValueError(
                f"{name}: got {table.dtype} of shape {tuple(table.shape)}, expected float32 of shape ({half},) or "
                f"({num_rows}, {half}) for {layout}"
            )
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [1, R/2] or [T, 1, R/2]
    # Multiplying by 1 and 0 keeps a value but not the sign of a zero, nor a neighbour's infinity out. A CPU can look
    # first whether any pair stays, or all do; on a GPU that would wait for the device.
    stays = None
    if not (band.is_cpu and bool(sin.all())):
        stays = (cos == 1) & (sin == 0)
        if band.is_cpu and bool(stays.all()):
            return
    # The maths is faster on a contiguous copy, by more than the copies there and back take.
    turned = band.contiguous()
    if is_neox_style:
        first, second = turned[..., :half], turned[..., half:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    x, y = first.float(), second.float()
    turned_x = (x * cos).sub_(y * sin)
    turned_y = (x * sin).add_(y * cos)
    if stays is not None:
        turned_x = torch.where(stays, x, turned_x)
        turned_y = torch.where(stays, y, turned_y)
    # Only now: in float32 `x` and `y` are views of the band itself.
    first.copy_(turned_x)
    second.copy_(turned_y)
    band.copy_(turned)
