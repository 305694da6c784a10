"""RoPE written out a second time, in float64, sharing no code with the package."""

import math
from types import SimpleNamespace

import pytest
import torch


def plain_inv_freq(rope_dim, base=10_000.0):
    """theta_i = base ** (-2i / d), RoFormer (arXiv 2104.09864), equation 15."""
    return (1.0 / base ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)).float()


def yarn_inv_freq(rope_dim, base=10_000.0, *, factor=16.0, trained_positions=4096, beta_fast=32, beta_slow=1):
    """YaRN (arXiv 2309.00071), section 3.2: slow pairs interpolated by `factor`, fast ones kept, a ramp between.

    The ramp's ends are rounded outwards, as in the authors' code and in serving engines.
    """

    def pair_that_turns(times):
        return rope_dim * math.log(trained_positions / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), rope_dim - 1)
    slow = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = plain_inv_freq(rope_dim, base)
    return inv_freq / factor * slow + inv_freq * (1 - slow)


def turn(keys, angles, is_neox_style):
    """Turn `keys` [..., rope_dim] by `angles` [..., rope_dim / 2] as complex numbers."""
    half = keys.shape[-1] // 2
    pairs = torch.stack((keys[..., :half], keys[..., half:]), -1) if is_neox_style else keys.unflatten(-1, (half, 2))
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.double().contiguous()) * torch.polar(angles * 0 + 1, angles)
    )
    return torch.cat((turned[..., 0], turned[..., 1]), -1) if is_neox_style else turned.flatten(-2)


def relative_l2(found, expected):
    """Largest relative L2 distance of any row's head."""
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.fixture(params=["plain", "yarn"])
def make_inv_freq(request):
    return {"plain": plain_inv_freq, "yarn": yarn_inv_freq}[request.param]


@pytest.fixture
def rope():
    return SimpleNamespace(
        plain_inv_freq=plain_inv_freq, yarn_inv_freq=yarn_inv_freq, turn=turn, relative_l2=relative_l2
    )
