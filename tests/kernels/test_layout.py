import pytest
import torch
from leyline_kernels.layout import KeyLayout, MlaLayout, check_rows


def test_the_mla_band_is_right_of_the_latent():
    layout = MlaLayout(kv_lora_rank=512, qk_rope_head_dim=64)
    assert layout.row_shape == (1, 576)
    assert layout.band == slice(512, 576)


def test_the_key_band_is_the_left_part_of_every_head():
    layout = KeyLayout(num_kv_heads=3, head_dim=128, rotary_dim=32)
    assert layout.row_shape == (3, 128)
    assert layout.band == slice(0, 32)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        pytest.param(lambda: MlaLayout(0, 64), "kv_lora_rank is positive, got 0", id="no_latent"),
        pytest.param(lambda: MlaLayout(512, 63), "qk_rope_head_dim is even.* got 63", id="odd_k_pe"),
        pytest.param(lambda: KeyLayout(0, 64, 64), "num_kv_heads is positive, got 0", id="no_heads"),
        pytest.param(lambda: KeyLayout(2, 64, 0), "rotary_dim is positive, got 0", id="no_rotary"),
        pytest.param(lambda: KeyLayout(2, 64, 33), "rotary_dim is even.* got 33", id="odd_rotary"),
        pytest.param(lambda: KeyLayout(2, 64, 66), r"at most head_dim \(64\), got 66", id="wide_rotary"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make, wanted):
    with pytest.raises(ValueError, match=wanted):
        make()


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        pytest.param(torch.zeros(4, 576), r"got shape \(4, 576\), expected \(num_rows, \*\(1, 576\)\)", id="two_dims"),
        pytest.param(torch.zeros(4, 1, 512), r"got shape \(4, 1, 512\)", id="width"),
        pytest.param(torch.zeros(4, 1, 576, dtype=torch.float64), "got torch.float64, expected float32", id="dtype"),
    ],
)
def test_rows_of_another_shape_or_type_are_refused(rows, wanted):
    with pytest.raises(ValueError, match=wanted):
        check_rows(rows, MlaLayout(512, 64))
