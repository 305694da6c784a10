"""All layers of a KV pool as one argument of a kernel, and the rule for the slots that are moved in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from leyline_kernels.layout import MlaLayout, check_rows

_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """The buffers of a pool, alike in all but their address. Made by `of`, once for a pool: it allocates."""

    buffers: tuple[torch.Tensor, ...]
    """One for each layer, `[num_slots, 1, row_width]`, kept so that the addresses stay theirs."""
    addresses: torch.Tensor
    """int64 `[num_layers]`, where each buffer begins, on the buffers' own device."""
    row_alignment_bytes: int
    """The largest power of two, up to the widest load of one thread, that every row begins at a multiple of."""
    layout: MlaLayout

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor] | torch.Tensor, layout: MlaLayout) -> LayerBuffers:
        """Check the buffers and write down where they begin.

        Args:
            buffers: A tensor for each layer, `[num_slots, *layout.row_shape]`, or all of them stacked. The columns of
                a row are adjacent; rows may have room between them, the same in all layers.
            layout: Which columns are the band.

        Raises:
            ValueError: there is no buffer, one occurs twice, or has another shape, dtype, device or stride than needed.
        """
        layers = tuple(buffers)
        if not layers:
            raise ValueError("buffers: got none, expected one for each layer")
        first = layers[0]
        for idx, buffer in enumerate(layers):
            check_rows(buffer, layout)
            if (buffer.shape, buffer.dtype, buffer.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"buffers[{idx}]: got {buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}, expected "
                    f"the same as buffers[0], {first.dtype} of shape {tuple(first.shape)} on {first.device}"
                )
            row_width = layout.row_shape[1]
            if buffer.stride(2) != 1 or buffer.stride(0) < row_width or buffer.stride(0) != first.stride(0):
                raise ValueError(
                    f"buffers[{idx}]: got strides {buffer.stride()}, expected adjacent columns and rows that are "
                    f"{row_width} or more apart, as far as those of buffers[0] ({first.stride(0)})"
                )
        starts = [buffer.data_ptr() for buffer in layers]
        if len(set(starts)) != len(starts):
            raise ValueError("buffers: one occurs twice, and its rows would turn twice; pass each buffer once")
        alignment = math.gcd(_VECTOR_BYTES, first.stride(0) * first.element_size(), *starts)
        return cls(layers, torch.tensor(starts, dtype=torch.int64, device=first.device), alignment, layout)

    @property
    def num_slots(self) -> int:
        """Slots of each layer."""
        return len(self.buffers[0])

    @property
    def device(self) -> torch.device:
        """Where all buffers are."""
        return self.buffers[0].device

    @property
    def dtype(self) -> torch.dtype:
        """What all buffers hold."""
        return self.buffers[0].dtype

    @property
    def row_stride(self) -> int:
        """Elements from one row to the next."""
        return self.buffers[0].stride(0)


def check_moves(src_slots: torch.Tensor, dst_slots: torch.Tensor, *, num_slots: int) -> None:
    """Check that rows may be moved from `src_slots` to `dst_slots` in any order: for tests and debugging.

    That is so where each row stays where it is, or where no row is written that is read too. Waits for the device.

    Raises:
        IndexError: a slot is not one of 0 to `num_slots - 1`.
        ValueError: a slot is written twice, or read in one row and written in another.
    """
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
            raise IndexError(
                f"{name}: got {int(slots.min())} to {int(slots.max())}, expected slots of 0 to {num_slots - 1}"
            )
    distinct = torch.unique(dst_slots)
    if len(distinct) != len(dst_slots):
        raise ValueError(f"dst_slots: {len(dst_slots) - len(distinct)} of {len(dst_slots)} occur more than once")
    if torch.equal(src_slots.long(), dst_slots.long()):
        return
    overlap = distinct[torch.isin(distinct, src_slots)]
    if len(overlap):
        raise ValueError(
            f"src_slots and dst_slots have {len(overlap)} slots in common ({overlap[:5].tolist()} ...), expected none, "
            "or the same slots in the same order: rows are moved in no order, so one could be read after it was "
            "overwritten. Copy to fresh slots"
        )
