import sys

import pytest
import torch
from leyline_kernels import reference
from leyline_kernels.dispatch import backend_of, copy_rotate_all_, rotate_all_, run_table, warm_up
from leyline_kernels.layer_buffers import LayerBuffers
from leyline_kernels.layout import MlaLayout
from leyline_kernels.rope_tables import move_table

LAYOUT = MlaLayout(kv_lora_rank=40, qk_rope_head_dim=32)


def pool(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return LayerBuffers.of(torch.randn(3, 8, 1, 72, generator=generator).to(device), LAYOUT)


def table(num_rows):
    return move_table(torch.logspace(0, -4, 16), torch.arange(num_rows) + 40_000, -1988)


def test_the_device_decides():
    assert backend_of(torch.device("cpu")) == "torch"
    assert backend_of(torch.device("cuda", 1)) == "triton"


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="device: got meta, expected a pool on a CPU or on CUDA"):
        backend_of(torch.device("meta"))


@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "interleaved"])
def test_on_a_cpu_every_layer_is_copied_by_the_reference(is_neox_style):
    layers, (cos, sin) = pool(), table(2)
    expected = [buffer.clone() for buffer in layers.buffers]
    src, dst = torch.tensor([1, 2]), torch.tensor([5, 4])
    for buffer in expected:
        reference.copy_rotate_(buffer, src, dst, layout=LAYOUT, cos=cos, sin=sin, is_neox_style=is_neox_style)
    copy_rotate_all_(layers, src, dst, (cos, sin), is_neox_style=is_neox_style)
    assert all(torch.equal(*pair) for pair in zip(layers.buffers, expected, strict=True))


@pytest.mark.parametrize("is_neox_style", [True, False], ids=["neox", "interleaved"])
def test_on_a_cpu_every_layer_is_turned_by_the_reference(is_neox_style):
    layers, (cos, sin) = pool(), table(2)
    expected = [buffer.clone() for buffer in layers.buffers]
    slots = torch.tensor([1, 2])
    for buffer in expected:
        reference.rotate_(buffer, slots, layout=LAYOUT, cos=cos, sin=sin, is_neox_style=is_neox_style)
    rotate_all_(layers, slots, (cos, sin), is_neox_style=is_neox_style)
    assert all(torch.equal(*pair) for pair in zip(layers.buffers, expected, strict=True))


def test_checked_slots_that_overlap_are_refused_and_the_pool_left_as_it_was():
    layers = pool()
    before = [buffer.clone() for buffer in layers.buffers]
    with pytest.raises(ValueError, match="1 slots in common"):
        copy_rotate_all_(
            layers, torch.tensor([1, 2]), torch.tensor([2, 3]), table(2), is_neox_style=False, check_slots=True
        )
    assert all(torch.equal(*pair) for pair in zip(layers.buffers, before, strict=True))


def test_checked_slots_that_turn_twice_are_refused():
    with pytest.raises(ValueError, match="occur more than once"):
        rotate_all_(pool(), torch.tensor([2, 2]), table(2), is_neox_style=False, check_slots=True)


def test_a_warm_up_on_a_cpu_does_nothing():
    layers = pool()
    before = [buffer.clone() for buffer in layers.buffers]
    warm_up(layers, is_neox_style=False)
    assert all(torch.equal(*pair) for pair in zip(layers.buffers, before, strict=True))


class _OnCuda(LayerBuffers):
    """Says that it is on CUDA, which is all that dispatch asks."""

    __slots__ = ()

    @property
    def device(self):
        return torch.device("cuda")


def test_without_triton_a_pool_on_cuda_is_an_error_and_nothing_is_moved(monkeypatch):
    layers = pool()
    on_cuda = _OnCuda(layers.buffers, layers.addresses, layers.row_alignment_bytes, LAYOUT)
    before = [buffer.clone() for buffer in layers.buffers]
    monkeypatch.delitem(sys.modules, "leyline_kernels.rotate", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="needs triton, which CUDA builds of torch bring"):
        rotate_all_(on_cuda, torch.tensor([1]), table(1), is_neox_style=False)
    assert all(torch.equal(*pair) for pair in zip(layers.buffers, before, strict=True))


@pytest.mark.gpu
def test_on_cuda_it_is_the_kernel_with_the_references_bits():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from leyline_kernels import rotate

    launched = []
    layers, expected, (cos, sin) = pool("cuda"), pool(), table(2)
    on_device = (cos.cuda(), sin.cuda())
    src, dst = torch.tensor([1, 2]), torch.tensor([5, 4])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("copy_rotate_", "rotate_"):
            real = getattr(rotate, name)
            patch.setattr(rotate, name, lambda *args, _real=real, **kw: (launched.append(_real), _real(*args, **kw)))
        copy_rotate_all_(layers, src.cuda(), dst.cuda(), on_device, is_neox_style=False)
        rotate_all_(layers, src.cuda(), on_device, is_neox_style=False)
    copy_rotate_all_(expected, src, dst, (cos, sin), is_neox_style=False)
    rotate_all_(expected, src, (cos, sin), is_neox_style=False)
    assert len(launched) == 2
    assert all(torch.equal(a.cpu(), b) for a, b in zip(layers.buffers, expected.buffers, strict=True))


def test_on_a_cpu_the_table_of_a_run_is_that_of_its_positions():
    inv_freq = torch.logspace(0, -4, 16)
    found = run_table(inv_freq, 3, old_start=40_000, position_delta=-1988)
    expected = move_table(inv_freq, torch.arange(40_000, 40_003), -1988)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_run_that_stays_has_one_table_that_turns_nothing():
    cos, sin = run_table(torch.logspace(0, -4, 16), 3, old_start=40_000, position_delta=0)
    assert cos.tolist() == [1.0] * 16
    assert sin.tolist() == [0.0] * 16
