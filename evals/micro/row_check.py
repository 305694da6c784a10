"""Whether rows of a KV pool are what a splice should have left, in plain torch on a CPU.

Two comparisons. With the rows that were moved: latents bit-equal, k_pe within one rounding of the exact rotation, in
any layer. With a fresh prefill of the same ids, in layer 0, whose rows depend on token and position alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

ONE_MOVE = {torch.bfloat16: 1.75e-3, torch.float16: 2.2e-4, torch.float32: 1e-5}
"""Relative L2 of k_pe, rotated once and stored, against the exact rotation of the stored key: one rounding to the
dtype; in float32 the angle's own rounding at tens of thousands of positions."""
_SPREAD = 1.05
"""How far the floor of one sample of rows may lie from that of another."""
_LATENT = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}
"""Relative L2 of latents prefilled in another batch: one unit in the last place everywhere, since other GEMM shapes
may sum in another order."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A run of tokens that an edit kept, in the sequence before and after."""

    old: int
    new: int
    length: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Moved rows against those that they were before."""

    rows: int
    unequal_latents: int
    k_pe_error: float
    """Relative L2 against the exact rotation of the stored key, the greatest of the runs."""
    dtype: torch.dtype

    @property
    def holds(self) -> bool:
        """Whether every latent is bit-equal and every run within one rounding."""
        return self.rows > 0 and not self.unequal_latents and self.k_pe_error <= ONE_MOVE[self.dtype]


@dataclass(frozen=True, slots=True)
class Fresh:
    """Rows of layer 0 against those of a fresh prefill."""

    rows: int
    unequal_latents: int
    """Values, not rows."""
    latent_error: float
    k_pe_error: float
    worst_row_error: float
    moves: int
    """How often a row may have been moved."""
    floor: float
    """Relative L2 of fresh keys of two positions, one turned exactly to where the other stands: the model's own."""
    dtype: torch.dtype

    @property
    def bound(self) -> float:
        """Relative L2 that roundings alone reach after so many moves; they add up as independent ones do.

        In bfloat16 a key that is rounded once has a floor of 2.3e-3, and then one move 2.9e-3.
        """
        return _SPREAD * math.hypot(self.floor, ONE_MOVE[self.dtype] * math.sqrt(self.moves))

    @property
    def holds(self) -> bool:
        """Whether the latents are equal but for roundings, and the keys within the bound, each row within thrice."""
        return (
            self.rows > 0
            and self.latent_error <= _LATENT[self.dtype]
            and self.k_pe_error <= self.bound
            and self.worst_row_error <= 3 * self.bound
        )


def kept_runs(spans: Iterable[tuple[int, int, int]], num_tokens: int) -> list[Kept]:
    """Return what edits `(start, end, replacement_tokens)`, sorted, keep of a sequence of `num_tokens`."""
    runs, old, new = [], 0, 0
    for start, end, replacement_tokens in spans:
        runs.append(Kept(old, new, start - old))
        new += start - old + replacement_tokens
        old = end
    runs.append(Kept(old, new, num_tokens - old))
    return [run for run in runs if run.length > 0]


def check_moved(
    before: torch.Tensor,
    after: torch.Tensor,
    runs: Sequence[Kept],
    inv_freq: torch.Tensor,
    *,
    kv_lora_rank: int,
    is_neox_style: bool,
) -> Moved:
    """Compare rows of one layer before and after an edit that kept `runs`, as far as both are cached."""
    rows, unequal, worst = 0, 0, 0.0
    for run in runs:
        length = min(run.length, len(before) - run.old, len(after) - run.new)
        if length <= 0:
            continue
        old, new = before[run.old : run.old + length], after[run.new : run.new + length]
        rows += length
        unequal += int((old[:, :kv_lora_rank] != new[:, :kv_lora_rank]).sum())
        wanted = rotate(
            old[:, kv_lora_rank:], inv_freq, old_start=run.old, new_start=run.new, is_neox_style=is_neox_style
        )
        worst = max(worst, relative_l2(new[:, kv_lora_rank:], wanted))
    return Moved(rows, unequal, worst, before.dtype)


def check_fresh(rows: torch.Tensor, fresh: torch.Tensor, *, kv_lora_rank: int, moves: int, floor: float) -> Fresh:
    """Compare rows of layer 0 with those of a fresh prefill of the same ids, as far as both are cached."""
    length = min(len(rows), len(fresh))
    rows, fresh = rows[:length], fresh[:length]
    latents, fresh_latents = rows[:, :kv_lora_rank], fresh[:, :kv_lora_rank]
    keys, fresh_keys = rows[:, kv_lora_rank:].double(), fresh[:, kv_lora_rank:].double()
    per_row = (keys - fresh_keys).norm(dim=1) / fresh_keys.norm(dim=1).clamp_min(1e-30)
    return Fresh(
        rows=length,
        unequal_latents=int((latents != fresh_latents).sum()),
        latent_error=relative_l2(latents, fresh_latents.double()),
        k_pe_error=relative_l2(rows[:, kv_lora_rank:], fresh_keys),
        worst_row_error=float(per_row.max()) if length else 0.0,
        moves=moves,
        floor=floor,
        dtype=rows.dtype,
    )


def rotate(
    keys: torch.Tensor, inv_freq: torch.Tensor, *, old_start: int, new_start: int, is_neox_style: bool
) -> torch.Tensor:
    """Return float64 keys `[tokens, rope_dim]` of consecutive positions as they stand at their new ones.

    From and to the angles that a model uses, position times frequency rounded to float32.
    """
    keys = keys.double()
    if old_start == new_start:
        return keys
    positions = torch.arange(len(keys))
    old, new = (
        ((positions + start).float().unsqueeze(1) * inv_freq.float()).double() for start in (old_start, new_start)
    )
    cos, sin = (new - old).cos(), (new - old).sin()
    half = keys.shape[1] // 2
    x, y = (keys[:, :half], keys[:, half:]) if is_neox_style else (keys[:, 0::2], keys[:, 1::2])
    turned = torch.empty_like(keys)
    turned_x, turned_y = (turned[:, :half], turned[:, half:]) if is_neox_style else (turned[:, 0::2], turned[:, 1::2])
    turned_x.copy_(x * cos - y * sin)
    turned_y.copy_(x * sin + y * cos)
    return turned


def relative_l2(values: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over that of `wanted`; 0 for nothing."""
    if not wanted.numel():
        return 0.0
    return float((values.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
