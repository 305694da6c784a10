"""The models whose shapes the benchmarks measure: `models/NAME/config.json`, as published (sources in `models/`)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

MODELS_DIR = Path(__file__).parent / "models"
MODELS = ("deepseek-v2-lite", "joyai-llm-flash", "glm-4.7-flash", "moonlight-16b-a3b")


def model_config(name: str) -> dict[str, Any]:
    """Return the configuration of one of `MODELS`."""
    config: dict[str, Any] = json.loads((MODELS_DIR / name / "config.json").read_text())
    return config


def inv_freq(config: dict[str, Any]) -> torch.Tensor:
    """Return what SGLang turns the model's keys by, radians a position, float32 `[qk_rope_head_dim / 2]`.

    DeepSeek's YaRN turns a pair that goes round often within the original length as if unscaled, one that hardly does
    `factor` times slower, and blends between the two (arXiv 2309.00071, section 3.2).
    """
    dim, base = int(config["qk_rope_head_dim"]), float(config["rope_theta"])
    unscaled: torch.Tensor = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return unscaled

    def pair_that_turns(num_rotations: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return float(dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(base)))

    low = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(scaling["beta_slow"])), dim - 1)
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scaled: torch.Tensor = unscaled / scaling["factor"]
    return scaled * slowed + unscaled * (1 - slowed)
