import json
import os
import subprocess
import sys

import pytest
import torch
from leyline_kernels.rope_tables import delta_table, move_table


def test_a_table_has_norm_1_and_one_entry_a_pair(make_inv_freq):
    cos, sin = delta_table(make_inv_freq(64), -12_345)
    assert cos.shape == sin.shape == (32,)
    assert cos.dtype == sin.dtype == torch.float32
    # Each entry is rounded by at most 2**-25 (values up to 1), which moves cos² + sin² by below 2**-23.
    assert (cos.double() ** 2 + sin.double() ** 2 - 1).abs().max() < 2**-23


@pytest.mark.parametrize("position_delta", [100_000, -131_072])
def test_a_large_delta_keeps_its_digits(make_inv_freq, position_delta):
    inv_freq = make_inv_freq(64)
    cos, sin = delta_table(inv_freq, position_delta)
    # Multiplied in integers: exact, where float32 angles of this size are off by up to 0.004.
    exact = torch.tensor([float(position_delta) * float(value) for value in inv_freq], dtype=torch.float64)
    # float64 angles of 1e5 are off by 1e-11; what is left is the rounding of the entry, 2**-25.
    assert (cos - exact.cos()).abs().max() < 2**-24
    assert (sin - exact.sin()).abs().max() < 2**-24


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_delta_for_each_row_gives_the_rows_of_single_tables(make_inv_freq, dtype):
    inv_freq = make_inv_freq(32)
    deltas = [0, 1, -1988, 70_000]
    cos, sin = delta_table(inv_freq, torch.tensor(deltas, dtype=dtype))
    assert cos.shape == (4, 16)
    for row, position_delta in enumerate(deltas):
        single = delta_table(inv_freq, position_delta)
        assert torch.equal(cos[row], single[0])
        assert torch.equal(sin[row], single[1])


def test_no_delta_is_the_identity(make_inv_freq):
    cos, sin = delta_table(make_inv_freq(64), 0)
    assert torch.equal(cos, torch.ones(32))
    assert torch.equal(sin, torch.zeros(32))


@pytest.mark.parametrize(
    ("inv_freq", "position_delta", "wanted"),
    [
        pytest.param(torch.ones(2, 8), 1, r"inv_freq: .* shape \(2, 8\), expected a float vector", id="matrix"),
        pytest.param(torch.ones(8, dtype=torch.int64), 1, "inv_freq: got torch.int64", id="integer_freq"),
        pytest.param(torch.ones(8), torch.ones(3), "position_delta: got torch.float32", id="float_delta"),
        pytest.param(torch.ones(8), torch.tensor(3), r"position_delta: .* shape \(\)", id="scalar_tensor"),
    ],
)
def test_input_of_another_kind_is_refused(inv_freq, position_delta, wanted):
    with pytest.raises(ValueError, match=wanted):
        delta_table(inv_freq, position_delta)


def test_a_row_that_stays_where_it_is_has_the_identity(make_inv_freq):
    cos, sin = move_table(make_inv_freq(64), torch.tensor([0, 17, 99_999]), 0)
    assert torch.equal(cos, torch.ones(3, 32))
    assert torch.equal(sin, torch.zeros(3, 32))


@pytest.mark.parametrize("position_delta", [-1, 700, -60_000, 131_072])
def test_a_rows_move_is_the_difference_of_the_two_rounded_angles(make_inv_freq, position_delta):
    inv_freq = make_inv_freq(64)
    old = torch.randint(60_000, 2**20 - 140_000, (500,), generator=torch.Generator().manual_seed(1))
    cos, sin = move_table(inv_freq, old, position_delta)
    angles = ((old + position_delta).float().unsqueeze(-1) * inv_freq).double()
    angles -= (old.float().unsqueeze(-1) * inv_freq).double()
    # What is left is the rounding of the entry, 2**-25. The difference matters: without it the error is 0.03.
    assert (cos - angles.cos()).abs().max() < 2**-24
    assert (sin - angles.sin()).abs().max() < 2**-24
    assert (delta_table(inv_freq, position_delta)[1] - angles.sin()).abs().max() > 0.01


@pytest.mark.parametrize(
    ("inv_freq", "old", "wanted"),
    [
        pytest.param(torch.ones(8).double(), [1], "inv_freq: got torch.float64", id="float64_freq"),
        pytest.param(torch.ones(2, 8), [1], r"inv_freq: .* shape \(2, 8\)", id="matrix"),
        pytest.param(torch.ones(8), [1.0], "old_positions: got torch.float32", id="float_positions"),
        pytest.param(torch.ones(8), [[1]], r"old_positions: .* shape \(1, 1\)", id="position_matrix"),
    ],
)
def test_positions_of_another_kind_are_refused(inv_freq, old, wanted):
    with pytest.raises(ValueError, match=wanted):
        move_table(inv_freq, torch.tensor(old), 3)


# In a process of its own: SGLang needs its CPU stand-ins, which a process takes at its start.
SERVER_FREQUENCIES = """
import json, torch
try:
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding as Rotary
except ImportError as error:
    raise SystemExit(print(json.dumps(str(error))))
rotary = Rotary.__new__(Rotary)
# Only what the formula reads: the constructor would build a table of 65,536 positions.
torch.nn.Module.__init__(rotary)
rotary.base, rotary.rotary_dim, rotary.device, rotary.max_position_embeddings = 10_000, 64, "cpu", 4096
rotary.beta_fast, rotary.beta_slow, rotary.extrapolation_factor = 32, 1, 1
print(json.dumps(rotary._compute_inv_freq(16.0).tolist()))
"""


@pytest.mark.sglang
def test_the_oracle_has_the_servers_yarn_frequencies(rope):
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SERVER_FREQUENCIES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    frequencies = json.loads(run.stdout.splitlines()[-1])
    if isinstance(frequencies, str):
        pytest.skip(f"SGLang cannot be imported here: {frequencies}")
    # Both in float32, a handful of roundings of 6e-8 each.
    torch.testing.assert_close(rope.yarn_inv_freq(64), torch.tensor(frequencies), rtol=1e-6, atol=0)
