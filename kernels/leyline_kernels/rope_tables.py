"""The rotation that takes a key from one position to another.

RoPE turns pair i of a key at position p by the angle `p * inv_freq[i]`. Rotations add, so a key that moves by
`position_delta` turns by `position_delta * inv_freq[i]`, wherever it stood.
"""

from __future__ import annotations

import torch


def delta_table(inv_freq: torch.Tensor, position_delta: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of a move by `position_delta` positions, each float32 `[*deltas, rope_dim / 2]`.

    The angle is taken in float64: in float32 an angle of 100,000 radians is known to 0.004 only, and the error would
    stay in the key and add up over edits. `inv_freq` itself is used as the model has it, in float32, since the stored
    key was turned by that.

    The table has norm 1. A model's own `cos_sin_cache` may carry YaRN's `mscale`, which the stored key has already,
    so a delta taken from there would scale the key once more with every edit.

    Args:
        inv_freq: `[rope_dim / 2]`, from the model's own rotary embedding: scaled RoPE differs from `base ** (-i / d)`.
        position_delta: New minus old position: one for all rows, or an integer tensor `[num_rows]` of one for each.

    Raises:
        ValueError: `inv_freq` is not a float vector, or `position_delta` a tensor that is no integer vector.
    """
    if inv_freq.dim() != 1 or not inv_freq.is_floating_point():
        raise ValueError(
            f"inv_freq: got {inv_freq.dtype} of shape {tuple(inv_freq.shape)}, expected a float vector [rope_dim / 2]"
        )
    if isinstance(position_delta, torch.Tensor):
        if position_delta.dim() != 1 or position_delta.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"position_delta: got {position_delta.dtype} of shape {tuple(position_delta.shape)}, "
                "expected an int or an integer vector [num_rows]"
            )
        deltas = position_delta.to(inv_freq.device, torch.float64).unsqueeze(-1)
        angles = deltas * inv_freq.double()  # [num_rows, rope_dim / 2]
    else:
        angles = position_delta * inv_freq.double()  # [rope_dim / 2]
    return angles.cos().float(), angles.sin().float()


def move_table(
    inv_freq: torch.Tensor, old_positions: torch.Tensor, position_delta: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each row's own move, each float32 `[num_rows, rope_dim / 2]`, of norm 1.

    A model turns a key by `fl(position * inv_freq)`, the product rounded to float32, which at position 50,000 is up to
    0.002 radians from the true product. `delta_table` keeps the old position's rounding in the moved key. Here the
    delta is the difference of the two rounded angles, so the moved key stands where a fresh one would, and edits in a
    row add no angle error.

    Args:
        inv_freq: `[rope_dim / 2]` float32, from the model's own rotary embedding.
        old_positions: Integer vector `[num_rows]`, where the stored keys were turned to; below 2**24, as the new ones.
        position_delta: New minus old position.

    Raises:
        ValueError: `inv_freq` is not a float32 vector, or the positions are not an integer vector.
    """
    if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32:
        raise ValueError(
            f"inv_freq: got {inv_freq.dtype} of shape {tuple(inv_freq.shape)}, expected float32 [rope_dim / 2]"
        )
    if old_positions.dim() != 1 or old_positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"old_positions: got {old_positions.dtype} of shape {tuple(old_positions.shape)}, expected an integer "
            "vector [num_rows]"
        )
    # Multiplied in float32, as the model's cache is; subtracted in float64, where the difference is exact.
    old_angles = (old_positions.to(torch.float32).unsqueeze(-1) * inv_freq).double()
    new_angles = ((old_positions + position_delta).to(torch.float32).unsqueeze(-1) * inv_freq).double()
    angles = new_angles.sub_(old_angles)  # [num_rows, rope_dim / 2]
    return angles.cos().float(), angles.sin().float()
