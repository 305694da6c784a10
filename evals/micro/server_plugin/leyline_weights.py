"""An SGLang plugin for benchmarks: random weights that listen, for an MLA model served with `--load-format dummy`.

SGLang's own dummy weights are so small that the next token depends on the last one alone. With `BENCH_SEED` set they
are drawn anew, on the device that they are on, before the model derives anything from them (`w_kc` and `w_vc` of
absorbed attention). Norms are 1, biases 0, matrices N(0, gain / sqrt(fan_in)). The gains serve two ends:

- The next token depends on the context and on positions: queries and above all the rotated part of keys are large, so
  attention prefers some tokens to others by where they stand, and it puts more into the residual stream than MLPs do.
- It does not depend on rounding: what 2 L blocks add to the residual stream is as large as what it begins with. With
  gains of 1 it grows from almost nothing, every layer multiplies what the last one got wrong, and at 27 layers bfloat16
  and float32 disagree on the next token of nearly all prompts, so that no two runs could be compared.

Every parameter has a seed of its own, of `BENCH_SEED` and its name. One rank; knows nothing of splices.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

SEED_VARIABLE = "BENCH_SEED"
_LOADER = "sglang.srt.model_loader.loader.initialize_dummy_weights"
_QUERY_GAIN, _ROTATED_KEY_GAIN = 1.5, 3.0
_ATTENTION_GAIN, _MLP_GAIN = 5.0, 0.5
"""Of all layers together, against an embedding of 1."""

logger = logging.getLogger(__name__)


def gain(name: str, *, num_layers: int, width: int) -> float:
    """Return by how much a matrix's values are larger than 1 / sqrt(fan_in)."""
    parts = name.split(".")
    if "embed_tokens" in parts:
        return math.sqrt(width)
    if "o_proj" in parts:
        return _ATTENTION_GAIN / math.sqrt(num_layers)
    # `w2_weight`: what all experts of a layer give, stacked along the first of three dimensions.
    if "down_proj" in parts or "w2_weight" in parts:
        return _MLP_GAIN / math.sqrt(num_layers)
    return _QUERY_GAIN if "q_proj" in parts or "q_b_proj" in parts else 1.0


def fill_(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter of `model`, in place and without a copy.

    Raises:
        ValueError: a parameter has no floating point values, as in a quantized model, or no layer has latent attention.
    """
    attentions = list(_attentions(model))
    if not attentions:
        raise ValueError(f"{type(model).__name__}: no layer has latent attention, whose keys these weights make large")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = parameter.data
            if not weight.is_floating_point() or weight.dtype.itemsize < 2:
                raise ValueError(f"{name}: got {weight.dtype}, expected fp32, bf16 or fp16; serve without quantization")
            if weight.dim() < 2:
                weight.fill_(1.0 if "norm" in name and name.endswith(".weight") else 0.0)
                continue
            fan_in = weight.shape[-1]
            deviation = gain(name, num_layers=len(attentions), width=fan_in) / math.sqrt(fan_in)
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            # Of 63 bits, as larger ones are refused.
            generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "little") >> 1)
            weight.normal_(0.0, deviation, generator=generator)
        for attention in attentions:
            latent = _first(attention, "fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa")
            query = _first(attention, "q_b_proj", "q_proj")
            # The last rows are the part that is rotated.
            latent.weight.data[-attention.qk_rope_head_dim :].mul_(_ROTATED_KEY_GAIN)
            # YaRN's own factor on scores would make some models more sensitive than others.
            query.weight.data.div_(attention.scaling * math.sqrt(attention.qk_head_dim))


def _attentions(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and hasattr(module, "qk_rope_head_dim"):
            yield module


def _first(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def activate() -> None:
    """Have the loader of dummy weights draw these, where `BENCH_SEED` is set.

    Raises:
        ValueError: it is no integer.
    """
    text = os.environ.get(SEED_VARIABLE)
    if text is None:
        return
    try:
        seed = int(text)
    except ValueError as error:
        raise ValueError(f"{SEED_VARIABLE}: got {text!r}, expected an integer") from error

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def initialize(model: torch.nn.Module, *_: object, **__: object) -> None:
        started = time.perf_counter()
        fill_(model, seed)
        num_values = sum(parameter.numel() for parameter in model.parameters())
        seconds = time.perf_counter() - started
        logger.warning("leyline_weights: drew %.2e values with seed %d in %.1f s", num_values, seed, seconds)

    HookRegistry.register(_LOADER, initialize, HookType.REPLACE)
