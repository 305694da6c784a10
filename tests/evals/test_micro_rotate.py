import pytest
import torch
from leyline_kernels.layer_buffers import LayerBuffers
from leyline_kernels.layout import MlaLayout

from evals.micro.rotate import Pool, Rows, assert_right, bytes_of, main, mover, percentiles
from evals.micro.shapes import MODELS, model_config


@pytest.fixture
def pool():
    layers = [torch.randn(16, 1, 576, generator=torch.Generator().manual_seed(idx)).bfloat16() for idx in range(27)]
    return Pool("deepseek-v2-lite", LayerBuffers.of(layers, MlaLayout(512, 64)))


def rows():
    # A quarter turn of every pair.
    return Rows(torch.tensor([1, 2]), torch.tensor([5, 6]), (torch.zeros(2, 32), torch.ones(2, 32)))


def test_every_byte_is_counted_once(pool):
    # 27 layers of 576 or 64 values of 2 bytes, read and written; 32 cosines and sines of 4; slots of 8.
    assert bytes_of(pool, "copy", 100) == 100 * (2 * 27 * 576 * 2 + 2 * 32 * 4 + 2 * 8)
    assert bytes_of(pool, "in_place", 100) == 100 * (2 * 27 * 64 * 2 + 2 * 32 * 4 + 8)


def test_the_shapes_have_the_bytes_that_the_models_publish():
    row_bytes = {
        name: 2 * sizes["num_hidden_layers"] * (sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"])
        for name, sizes in ((name, model_config(name)) for name in MODELS)
    }
    assert row_bytes == {
        "deepseek-v2-lite": 31_104,
        "joyai-llm-flash": 46_080,
        "glm-4.7-flash": 54_144,
        "moonlight-16b-a3b": 31_104,
    }


@pytest.mark.parametrize("path", ["copy", "in_place"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_right_move_may_be_timed(pool, path, backend):
    # On a CPU both are the reference.
    assert_right(backend, path, pool, rows(), mover(backend, path, pool))


@pytest.mark.parametrize(("backend", "path"), [("triton", "copy"), ("triton", "in_place"), ("sglang_mla", "copy")])
def test_a_move_that_does_something_else_is_not_timed(pool, backend, path):
    def move(moved):
        pool.layers.buffers[26][moved.dst] = 1.0

    with pytest.raises(AssertionError, match=f"{backend} {path} of 2 rows is wrong"):
        assert_right(backend, path, pool, rows(), move)


def test_percentiles_are_named():
    assert percentiles([float(value) for value in range(101)]) == {"p20_us": 20.0, "p50_us": 50.0, "p80_us": 80.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "torch finds none" in capsys.readouterr().err
