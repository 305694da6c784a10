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
