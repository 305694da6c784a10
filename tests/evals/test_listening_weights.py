import importlib.util
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import evals.micro

PLUGIN = Path(evals.micro.__file__).parent / "server_plugin" / "leyline_weights.py"
HIDDEN, LATENT, ROPE = 256, 96, 32


@pytest.fixture(scope="module")
def weights() -> ModuleType:
    spec = importlib.util.spec_from_file_location("leyline_weights", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def matrix(*shape, dtype=torch.float32):
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    return holder


def attention(*, scaling=1.0):
    layer = torch.nn.Module()
    layer.qk_rope_head_dim, layer.qk_head_dim, layer.scaling = ROPE, 64, scaling / math.sqrt(64)
    layer.q_proj, layer.kv_b_proj = matrix(512, HIDDEN), matrix(512, LATENT)
    layer.kv_a_proj_with_mqa, layer.kv_a_layernorm = matrix(LATENT + ROPE, HIDDEN), matrix(LATENT)
    layer.o_proj = matrix(HIDDEN, 512)
    return layer


def model(dtype=torch.float32, *, num_layers=4, scaling=1.0):
    """Named as SGLang names the parameters of its MLA models."""
    whole = torch.nn.Module()
    whole.embed_tokens, whole.lm_head, whole.norm = matrix(512, HIDDEN), matrix(512, HIDDEN), matrix(HIDDEN)
    whole.layers = torch.nn.ModuleList()
    for _ in range(num_layers):
        layer, layer.mlp, layer.mlp.experts = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
        layer.self_attn, layer.mlp.gate = attention(scaling=scaling), matrix(8, HIDDEN)
        layer.mlp.gate.e_score_correction_bias = torch.nn.Parameter(torch.full((8,), 7.0))
        layer.mlp.experts.w13_weight = torch.nn.Parameter(torch.empty(8, 128, HIDDEN))
        layer.mlp.experts.w2_weight = torch.nn.Parameter(torch.empty(8, HIDDEN, 64))
        whole.layers.append(layer)
    return whole.to(dtype)


def filled(weights, **options):
    whole = model(**options)
    weights.fill_(whole, 3)
    return whole


def test_a_seed_gives_the_same_weights_wherever_a_parameter_stands(weights):
    longer, shorter = filled(weights, num_layers=4), model(num_layers=4)
    del shorter.layers[0].self_attn.o_proj
    weights.fill_(shorter, 3)
    for name, parameter in shorter.named_parameters():
        assert torch.equal(parameter, longer.get_parameter(name)), name


def test_another_seed_gives_other_weights(weights):
    first, second = model(), model()
    weights.fill_(first, 3)
    weights.fill_(second, 4)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_layers_differ(weights):
    layers = filled(weights).layers
    assert not torch.equal(layers[0].self_attn.q_proj.weight, layers[1].self_attn.q_proj.weight)


def test_norms_are_one_and_biases_zero(weights):
    whole = filled(weights)
    assert torch.equal(whole.layers[2].self_attn.kv_a_layernorm.weight, torch.ones(LATENT))
    assert torch.equal(whole.layers[2].mlp.gate.e_score_correction_bias, torch.zeros(8))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("embed_tokens.weight", 1.0, id="an embedding"),
        pytest.param("lm_head.weight", 1 / 16, id="a head"),
        pytest.param("layers.1.mlp.experts.w13_weight", 1 / 16, id="experts take in the last dimension"),
        # 4 layers: half of the gain of all.
        pytest.param("layers.1.mlp.experts.w2_weight", 0.25 / 8, id="what experts give"),
        pytest.param("layers.1.self_attn.o_proj.weight", 2.5 / math.sqrt(512), id="what attention gives"),
        pytest.param("layers.1.self_attn.q_proj.weight", 1.5 / 16, id="queries"),
    ],
)
def test_a_matrix_has_its_gain_over_the_root_of_its_fan_in(weights, name, expected):
    # The standard deviation of 100,000 values is known to 0.3%, of 30,000 to 0.5%.
    assert filled(weights).get_parameter(name).std().item() == pytest.approx(expected, rel=0.02)


def test_only_the_rotated_part_of_a_key_is_larger(weights):
    rows = filled(weights).layers[0].self_attn.kv_a_proj_with_mqa.weight
    assert rows[:LATENT].std().item() == pytest.approx(1 / 16, rel=0.03)
    assert rows[LATENT:].std().item() == pytest.approx(3 / 16, rel=0.03)


def test_the_models_own_factor_on_scores_is_divided_out(weights):
    plain, scaled = filled(weights), filled(weights, scaling=1.59)
    query = "layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(1.59 * scaled.get_parameter(query), plain.get_parameter(query))


def test_weights_are_drawn_where_they_are(weights):
    whole = model(torch.bfloat16)
    addresses = [parameter.data_ptr() for parameter in whole.parameters()]
    weights.fill_(whole, 3)
    assert [parameter.data_ptr() for parameter in whole.parameters()] == addresses
    assert whole.lm_head.weight.dtype == torch.bfloat16


def test_a_quantized_model_is_refused(weights):
    whole = model()
    whole.layers[0].self_attn.o_proj.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), False)
    with pytest.raises(ValueError, match=r"o_proj\.weight: got torch\.int8"):
        weights.fill_(whole, 3)


def test_a_model_without_latent_attention_is_refused(weights):
    with pytest.raises(ValueError, match="no layer has latent attention"):
        weights.fill_(torch.nn.Linear(4, 4), 3)


def test_a_seed_that_is_no_number_is_refused(weights, monkeypatch):
    monkeypatch.setenv("BENCH_SEED", "one")
    with pytest.raises(ValueError, match="BENCH_SEED: got 'one', expected an integer"):
        weights.activate()


def test_without_a_seed_nothing_is_installed(weights, monkeypatch):
    monkeypatch.delenv("BENCH_SEED", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.plugins.hook_registry", SimpleNamespace())
    weights.activate()
