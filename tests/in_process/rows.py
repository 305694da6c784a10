"""What the rows of the test pool hold, so that each one tells where it came from and can be checked.

Two layers of four columns: two of latent, and a `k_pe` of two pairs. Both layers' `k_pe` is the token's key, turned to
its position by RoPE. Layer 0's latent names the token. Layer 1's latent is the row's *digest*: a hash of the token,
its position and the digests of all rows that it attended to when it was prefilled, kept in two columns of 23 bits,
which float32 holds exactly. So a row prefilled on a clean path has the digest of its own token path, and one that was
moved keeps the digest of the path that it was computed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

KV_LORA_RANK = 2
ROPE_DIM = 4
NUM_LAYERS = 2
VOCAB_SIZE = 128
MAX_POSITIONS = 256

EMPTY_STATE = 1
"""What a row at position 0 has attended to."""

_HALF = 23
_MASK = (1 << _HALF) - 1
_PRIME = (1 << 61) - 1
_ULP = 2.0**-24
"""Unit roundoff of float32."""

Influence = tuple[str, int]
"""An amortized edit: who made it, and a number of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the model knows of one row."""

    token: int
    position: int
    digest: int
    influences: frozenset[Influence] = frozenset()
    """Amortized edits whose removed text this row has seen, itself or through another row."""
    num_turns: int = 0
    """How often `k_pe` was turned since it was computed, each time with a rounding."""

    def moved(self, position: int, influences: frozenset[Influence]) -> Row:
        """Return the row that has it moved to `position`."""
        turns = self.num_turns + (position != self.position)
        return Row(self.token, position, self.digest, influences, turns)


def attended(state: int, digest: int) -> int:
    """Return the state after one more row was attended to."""
    return (state * 0x9E3779B97F4A7C15 + digest + 1) % _PRIME


def digest_of(state: int, token: int, position: int) -> int:
    """Return the digest of a row that is prefilled now, having attended to `state`."""
    mixed = (state ^ (token + 1) * 0xBF58476D1CE4E5B9 ^ (position + 1) * 0x94D049BB133111EB) % _PRIME
    mixed = mixed * 0xD6E8FEB86659FD93 % _PRIME
    return (mixed ^ mixed >> 29) & ((1 << 2 * _HALF) - 1)


def make_rotary() -> DeepseekScalingRotaryEmbedding:
    """Return SGLang's own rotary embedding, with YaRN, as DeepSeek models have it."""
    return DeepseekScalingRotaryEmbedding(
        head_size=ROPE_DIM,
        rotary_dim=ROPE_DIM,
        max_position_embeddings=MAX_POSITIONS // 4,
        base=10000,
        is_neox_style=False,
        scaling_factor=4.0,
        dtype=torch.float32,
        mscale=1.0,
        mscale_all_dim=1.0,
        device="cpu",
    )


@lru_cache(maxsize=1)
def key_table() -> np.ndarray:
    """Return the exact key of every token at every position, float64 `[VOCAB_SIZE, MAX_POSITIONS, ROPE_DIM]`.

    Angles as the model has them: the product of position and frequency, rounded to float32.
    """
    rotary = make_rotary()
    inv_freq = rotary._compute_inv_freq(rotary.scaling_factor).to(torch.float32)
    angles = (torch.arange(MAX_POSITIONS, dtype=torch.float32).unsqueeze(-1) * inv_freq).double()
    cos, sin = angles.cos(), angles.sin()  # [P, R/2]
    tokens = torch.arange(VOCAB_SIZE, dtype=torch.float64).unsqueeze(-1)
    # Keys of different length and direction for each token, none of them zero.
    unturned = 1 + (tokens * torch.tensor([5.0, 3.0, 7.0, 11.0], dtype=torch.float64)) % 13  # [V, R]
    x, y = unturned[:, None, 0::2], unturned[:, None, 1::2]
    table: np.ndarray = torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2).numpy()
    return table


class Rows:
    """What stands, or must stand, in every slot of a pool of `size` slots."""

    def __init__(self, size: int) -> None:
        self._latents = np.zeros((NUM_LAYERS, size + 1, KV_LORA_RANK), dtype=np.float32)
        self._keys = np.zeros((size + 1, ROPE_DIM), dtype=np.float64)
        self._tolerance = np.zeros((size + 1, 1), dtype=np.float64)

    def put(self, slot: int, row: Row) -> None:
        """Expect `row` in a slot.

        The tolerance of a key: a fresh one is rounded once. One turn computes `x * cos - y * sin`, where the table, the
        products and the sum are rounded: `2 * (|x * cos| + |y * sin|) + |sum|` times `_ULP`, at most 3 times the key's
        norm. The series of `move_table` is cut at 1e-10, a five hundredth of that; 4 leaves room for it and for the
        second order.
        """
        self._latents[:, slot] = (
            (row.token + 1, 2 * row.token + 1),
            (row.digest >> _HALF, row.digest & _MASK),
        )
        key = key_table()[row.token, row.position]
        self._keys[slot] = key
        self._tolerance[slot] = (1 + 4 * row.num_turns) * _ULP * np.linalg.norm(key)

    def wrong(self, buffers: Sequence[torch.Tensor], slots: Sequence[int]) -> list[int]:
        """Return those of `slots` that hold something else."""
        places = np.asarray(slots, dtype=np.int64)
        wrong = np.zeros(len(places), dtype=bool)
        for layer, buffer in enumerate(buffers):
            found = buffer.numpy()[places, 0]
            wrong |= (found[:, :KV_LORA_RANK] != self._latents[layer, places]).any(-1)
            wrong |= (abs(found[:, KV_LORA_RANK:] - self._keys[places]) > self._tolerance[places]).any(-1)
        return places[wrong].tolist()


def write_row_(buffers: Sequence[torch.Tensor], slot: int, token: int, position: int, digest: int) -> None:
    """Write the row that a forward pass computes."""
    key = key_table()[token, position]
    buffers[0].numpy()[slot, 0] = (token + 1, 2 * token + 1, *key)
    buffers[1].numpy()[slot, 0] = (digest >> _HALF, digest & _MASK, *key)


def read_digests(buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> list[int]:
    """Return the digests that stand in the pool at `slots`."""
    columns = buffers[1].numpy()[slots.numpy(), 0, :KV_LORA_RANK].astype(np.int64).tolist()
    return [high << _HALF | low for high, low in columns]
