"""How far edits take a cached key from where it should be: `python -m evals.micro.drift [--json] [--device cuda|cpu]`.

Keys of each model's shape are stored in a bfloat16 pool as the model stores them (turned to their positions, then
rounded), and moved by 1 to 64 edits of up to 2,000 positions each, with the kernels and tables of a splice:

- `chained`: every edit turns what the last one left, and rounds it;
- `from_first`: every edit turns the value that was stored first, to where the key belongs now. One rounding, however
  many edits, for `first_value_bytes` more a token of the conversations that were edited (and its first position).

Both against the exact (float64) turn of the stored key (`against_stored`), and against what a prefill would have stored
there, the exact key rounded (`against_fresh`): relative L2, all keys together. The angles are the model's own, its
products of position and frequency rounded to float32. Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from leyline_kernels.dispatch import copy_rotate_all_, rotate_all_
from leyline_kernels.layer_buffers import LayerBuffers
from leyline_kernels.layout import MlaLayout
from leyline_kernels.rope_tables import move_table

from evals.micro.result_rows import about
from evals.micro.shapes import MODELS, inv_freq, model_config

EDITS = (1, 2, 4, 8, 16, 32, 64)
ONE_EDIT_AGAINST_STORED, ONE_EDIT_AGAINST_FRESH = 1.75e-3, 2.9e-3
FROM_FIRST_AGAINST_FRESH = 2.9e-3
_MOST_POSITIONS_AN_EDIT = 2000
_LAYERS = 2
_MOST_POSITIONS = 65_536
"""Keys lie below this, and below the model's own limit."""


@dataclass(frozen=True)
class Keys:
    """Keys before they are turned, and where they stand."""

    values: torch.Tensor
    """float64 `[layers, rows, qk_rope_head_dim]`, each the value of a bfloat16."""
    inv_freq: torch.Tensor
    """float32 `[qk_rope_head_dim / 2]`."""

    @classmethod
    def random(cls, config: dict[str, Any], num_rows: int, *, device: str, seed: int) -> Keys:
        """Draw normally distributed keys of a model."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (_LAYERS, num_rows, config["qk_rope_head_dim"])
        values = torch.randn(*shape, generator=generator, device=device).bfloat16()
        return cls(values.double(), inv_freq(config).to(device))

    def fresh(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what the model stores, bfloat16."""
        return turned(self.values, self.angles(positions)).bfloat16()

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what the model turns by, float64 `[rows, qk_rope_head_dim / 2]`."""
        return (positions.float().unsqueeze(-1) * self.inv_freq).double()


def turned(keys: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return float64 keys turned in adjacent pairs, exact as far as float64 is."""
    x, y = keys.double().view(*keys.shape[:-1], -1, 2).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2)


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance over the length of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


class Edited:
    """A pool with three copies of the keys: as first stored, chained, and turned from the first."""

    def __init__(self, keys: Keys, config: dict[str, Any], start: int) -> None:
        self._keys = keys
        rows = keys.values.shape[1]
        self._layout = MlaLayout(config["kv_lora_rank"], config["qk_rope_head_dim"])
        device = keys.values.device
        self._first, self._chained, self._from_first = torch.arange(3 * rows, device=device).view(3, rows).unbind()
        self._first_positions = torch.arange(start, start + rows, device=device)
        self._moved_by = 0
        self.stored = keys.fresh(self._first_positions)
        pool = torch.zeros(_LAYERS, 3 * rows, *self._layout.row_shape, dtype=torch.bfloat16, device=device)
        pool[:, :, 0, self._layout.band] = self.stored.repeat(1, 3, 1)
        self._layers = LayerBuffers.of(pool, self._layout)

    def edit(self, position_delta: int) -> None:
        """Move all keys."""
        positions = self._first_positions + self._moved_by
        table = move_table(self._keys.inv_freq, positions, position_delta)
        rotate_all_(self._layers, self._chained, table, is_neox_style=False)
        self._moved_by += position_delta
        table = move_table(self._keys.inv_freq, self._first_positions, self._moved_by)
        copy_rotate_all_(self._layers, self._first, self._from_first, table, is_neox_style=False)

    def errors(self) -> Iterator[tuple[str, float, float]]:
        """Yield for both ways how far they are from the exact turn of the stored keys, and from fresh ones."""
        positions = self._first_positions + self._moved_by
        angles = self._keys.angles(positions) - self._keys.angles(self._first_positions)
        exact, fresh = turned(self.stored, angles), self._keys.fresh(positions)
        for way, slots in (("chained", self._chained), ("from_first", self._from_first)):
            found = torch.stack([buffer[slots, 0, self._layout.band] for buffer in self._layers.buffers])
            yield way, relative_l2(found, exact), relative_l2(found, fresh)


def deltas(num_edits: int, *, rows: int, start: int, most: int, seed: int) -> list[int]:
    """Return by how many positions each edit moves keys that stand at `start` on, so that they stay below `most`."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = []
    at = start
    while len(found) < num_edits:
        delta = int(torch.randint(-_MOST_POSITIONS_AN_EDIT, _MOST_POSITIONS_AN_EDIT + 1, (1,), generator=generator))
        if delta and at + delta >= 0 and at + delta + rows <= most:
            found.append(delta)
            at += delta
    return found


def measure(model: str, *, device: str, rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and number of edits."""
    config = model_config(model)
    most = min(config["max_position_embeddings"], _MOST_POSITIONS)
    start = (most - rows) // 2
    edited = Edited(Keys.random(config, rows, device=device, seed=seed), config, start)
    layers, itemsize = config["num_hidden_layers"], torch.bfloat16.itemsize
    row_bytes = layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * itemsize
    for num_edits, delta in enumerate(deltas(max(EDITS), rows=rows, start=start, most=most, seed=seed), start=1):
        edited.edit(delta)
        if num_edits not in EDITS:
            continue
        for way, against_stored, against_fresh in edited.errors():
            row = {
                "op": "drift",
                "model": model,
                "way": way,
                "edits": num_edits,
                "against_stored": round(against_stored, 7),
                "against_fresh": round(against_fresh, 7),
                "dtype": "bfloat16",
                "device": device,
                "keys": _LAYERS * rows,
                "positions": most,
                "row_bytes": row_bytes,
                "first_value_bytes": layers * config["qk_rope_head_dim"] * itemsize if way == "from_first" else 0,
                "seed": seed,
            }
            yield {**row, "missed": list(missed(row))}


def missed(row: dict[str, Any]) -> Iterator[str]:
    """Yield the bounds that a row is above."""
    bounds = {}
    if row["edits"] == 1:
        bounds = {"against_stored": ONE_EDIT_AGAINST_STORED, "against_fresh": ONE_EDIT_AGAINST_FRESH}
    elif row["way"] == "from_first":
        bounds = {"against_fresh": FROM_FIRST_AGAINST_FRESH}
    for name, bound in bounds.items():
        if not row[name] <= bound:
            yield f"{name} is {row[name]:.2e}, expected {bound:.2e} or less"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows; exit 1 where one is above its bound."""
    parser = argparse.ArgumentParser(prog="python -m evals.micro.drift", description="Measure the drift of moved keys.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all")
    parser.add_argument("--rows", type=int, default=4096, help="keys of a layer (default: 4096)")
    parser.add_argument("--seed", type=int, default=0, help="of keys and edits (default: 0)")
    parser.add_argument("--commit", help="the commit to write into each row, where there is no repository to ask")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; use --device cpu")
    if not 1 <= options.rows <= 6000:
        parser.error(f"--rows: got {options.rows}, expected 1 to 6000, which the shortest context has room for")
    given = sys.argv[1:] if arguments is None else arguments
    facts = about(options.commit, " ".join(["python -m evals.micro.drift", *given]))
    is_missed = False
    for model in options.models:
        for row in measure(model, device=options.device, rows=options.rows, seed=options.seed):
            is_missed |= bool(row["missed"])
            if options.json:
                print(json.dumps({**row, **facts}), flush=True)
            else:
                figures = f"{row['against_stored']:.2e} {row['against_fresh']:.2e}"
                print(model, row["way"], row["edits"], figures, *row["missed"], flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
