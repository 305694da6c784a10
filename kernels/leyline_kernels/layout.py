"""What a pool row holds, and which of its columns depend on the token's position.

A pool buffer of one layer is `[num_slots, num_heads, width]`. Its *band* is the slice of columns that holds a key
after RoPE; only that turns when a token moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class RowLayout(Protocol):
    """What a rotation needs to know of a row."""

    @property
    def row_shape(self) -> tuple[int, int]:
        """Heads and columns of one row."""

    @property
    def band(self) -> slice:
        """Columns that hold a key after RoPE, an even number of them."""


@dataclass(frozen=True, slots=True)
class MlaLayout:
    """A row of multi-head latent attention: `latent | k_pe`, the same for all heads. The band is `k_pe`.

    Raises:
        ValueError: a width is not positive, or `qk_rope_head_dim` is odd.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        _check_positive("kv_lora_rank", self.kv_lora_rank)
        _check_even("qk_rope_head_dim", self.qk_rope_head_dim)

    @property
    def row_shape(self) -> tuple[int, int]:
        """One shared head of latent and `k_pe` columns."""
        return 1, self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def band(self) -> slice:
        """The `k_pe` columns, right of the latent."""
        return slice(self.kv_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim)


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """A key row of multi-head or grouped-query attention. The band is the first `rotary_dim` columns of every head.

    Raises:
        ValueError: a width is not positive, or `rotary_dim` is odd or wider than a head.
    """

    num_kv_heads: int
    head_dim: int
    rotary_dim: int

    def __post_init__(self) -> None:
        _check_positive("num_kv_heads", self.num_kv_heads)
        _check_positive("head_dim", self.head_dim)
        _check_even("rotary_dim", self.rotary_dim)
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim is at most head_dim ({self.head_dim}), got {self.rotary_dim}")

    @property
    def row_shape(self) -> tuple[int, int]:
        """All heads of a token."""
        return self.num_kv_heads, self.head_dim

    @property
    def band(self) -> slice:
        """The rotated columns of a head, the same in each."""
        return slice(0, self.rotary_dim)


def check_rows(rows: torch.Tensor, layout: RowLayout) -> None:
    """Check that `rows` are `[num_rows, *layout.row_shape]` in a float type that holds keys.

    Raises:
        ValueError: they are not.
    """
    if rows.dim() != 3 or tuple(rows.shape[1:]) != layout.row_shape:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, expected (num_rows, *{layout.row_shape}) for {layout}")
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"rows: got {rows.dtype}, expected float32, bfloat16 or float16")


def _check_positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name} is positive, got {value}")


def _check_even(name: str, value: int) -> None:
    _check_positive(name, value)
    if value % 2:
        raise ValueError(f"{name} is even, since RoPE turns pairs of columns, got {value}")
