import math
import warnings

import pytest
import torch

from evals.micro.shapes import MODELS, MODELS_DIR, inv_freq, model_config

with warnings.catch_warnings():
    # SGLang warns of what a CPU has not.
    warnings.simplefilter("ignore")
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding


@pytest.mark.parametrize("model", MODELS)
def test_sglang_takes_the_latent_path(model):
    found = ModelConfig(str(MODELS_DIR / model))
    assert found.attention_arch is AttentionArch.MLA
    assert (found.kv_lora_rank, found.qk_rope_head_dim) == (512, 64)


@pytest.mark.parametrize("model", MODELS)
def test_keys_are_turned_as_sglang_turns_them(model):
    config = model_config(model)
    scaling = config.get("rope_scaling") or {"factor": 1.0}
    more = {name: value for name, value in scaling.items() if name in ("beta_fast", "beta_slow", "mscale")}
    # Made for a short context: the table of angles is not what is asked for. Its length enters YaRN's ramp, though.
    length = scaling.get("original_max_position_embeddings", 16)
    rotary = DeepseekScalingRotaryEmbedding(
        64, 64, length, config["rope_theta"], False, scaling["factor"], torch.float32, device="cpu", **more
    )
    # Their products and powers of float32 are rounded in another order.
    torch.testing.assert_close(inv_freq(config), rotary._compute_inv_freq(scaling["factor"]), rtol=2e-6, atol=0)


def test_yarn_slows_what_hardly_turns_and_leaves_what_turns_often():
    config = model_config("deepseek-v2-lite")
    plain = {**config, "rope_scaling": None}
    ratio = inv_freq(plain) / inv_freq(config)
    assert ratio[0] == 1
    assert math.isclose(ratio[-1], 40, rel_tol=1e-5)
