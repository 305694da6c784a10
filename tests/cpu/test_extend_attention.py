"""Attention for the new queries only equals SGLang's own, and leaves to SGLang what it does not do."""

from __future__ import annotations

import inspect
import itertools
import warnings
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from leyline_sglang_cpu import extend_attention

with warnings.catch_warnings():
    # SGLang warns at import of all that a CPU lacks.
    warnings.simplefilter("ignore")
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

# Weights sum to 1, so an output is at most the largest value (below 6 for a few thousand normal draws), and float32
# rounds each of the two sums, of up to T terms, with a relative error below T * eps in the worst case and about
# sqrt(T) * eps in the mean: 6 * 2 * sqrt(2100) * 6e-8 = 3.3e-5.
_TOLERANCE = 4e-5

_stock_extend = TorchNativeAttnBackend._run_sdpa_forward_extend
_stock_decode = TorchNativeAttnBackend._run_sdpa_forward_decode


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    is_mla: bool = False


SHAPES = [
    pytest.param(Shape(2, 1, 96, 64, is_mla=True), id="MLA, value is the head of the key's row"),
    pytest.param(Shape(16, 1, 96, 64, is_mla=True), id="MLA, 16 heads"),
    pytest.param(Shape(6, 2, 32, 32), id="GQA, groups of 3"),
    pytest.param(Shape(4, 4, 32, 32), id="MHA"),
    pytest.param(Shape(4, 1, 24, 16), id="MQA, values of their own width"),
]

# (cached, new) tokens of each sequence.
BATCHES = [
    pytest.param([(0, 7)], id="nothing cached"),
    pytest.param([(50, 7)], id="some cached"),
    pytest.param([(50, 1)], id="all but one cached"),
    pytest.param([(0, 1)], id="one token"),
    pytest.param([(0, 5), (40, 1), (33, 17)], id="three sequences"),
    pytest.param([(700, 1400), (3, 2)], id="several query blocks, then a short sequence"),
]


class Pool:
    """Random keys and values in scattered slots, with NaN wherever no sequence has a slot."""

    def __init__(self, shape: Shape, batch: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(len(batch) * 1000 + batch[0][0])

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        self.seq_lens = torch.tensor([cached + new for cached, new in batch])
        self.prefix_lens = torch.tensor([cached for cached, _ in batch])
        self.new_lens = torch.tensor([new for _, new in batch])
        total, longest = int(self.seq_lens.sum()), int(self.seq_lens.max())
        num_slots = 2 * total + 1
        slots = torch.randperm(num_slots, generator=generator)[:total]
        self.k_cache = torch.full((num_slots, shape.num_kv_heads, shape.key_width), torch.nan)
        self.k_cache[slots] = normal(total, shape.num_kv_heads, shape.key_width)
        if shape.is_mla:
            self.v_cache = self.k_cache[..., : shape.value_width]
        else:
            self.v_cache = torch.full((num_slots, shape.num_kv_heads, shape.value_width), torch.nan)
            self.v_cache[slots] = normal(total, shape.num_kv_heads, shape.value_width)
        # The pool rows of the requests are neither in order nor the first.
        self.pool_indices = torch.arange(len(batch)).flip(0) + 1
        self.req_to_token = torch.zeros(len(batch) + 2, longest, dtype=torch.int32)
        for row, part in zip(self.pool_indices, slots.split(self.seq_lens.tolist()), strict=True):
            self.req_to_token[row, : len(part)] = part.to(torch.int32)
        num_new = int(self.new_lens.sum())
        self.query = normal(num_new, shape.num_heads, shape.key_width)
        self.output_shape = (num_new, shape.num_heads, shape.value_width)
        self.options: dict[str, Any] = {
            "scaling": 0.17,
            "enable_gqa": shape.num_heads != shape.num_kv_heads,
        }

    def extend_arguments(self) -> tuple[torch.Tensor, ...]:
        return (
            self.query,
            torch.full(self.output_shape, torch.nan),
            self.k_cache,
            self.v_cache,
            self.req_to_token,
            self.pool_indices,
            self.seq_lens,
            self.prefix_lens,
            self.new_lens,
        )

    def decode_arguments(self) -> tuple[torch.Tensor, ...]:
        shape = (len(self.seq_lens), *self.output_shape[1:])
        query, output = self.query[: shape[0]], torch.full(shape, torch.nan)
        return (query, output, self.k_cache, self.v_cache, self.req_to_token, self.pool_indices, self.seq_lens)


@pytest.fixture
def backend() -> TorchNativeAttnBackend:
    # Both functions use nothing of the backend but its static methods.
    return TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("handed to SGLang's own function")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_extend_equals_stock(backend: TorchNativeAttnBackend, shape: Shape, batch: list[tuple[int, int]]) -> None:
    pool = Pool(shape, batch)
    expected = _stock_extend(backend, *pool.extend_arguments(), causal=True, **pool.options)
    actual = extend_attention.extend(_refuse, backend, *pool.extend_arguments(), causal=True, **pool.options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("cached", range(0, 31, 3))
def test_output_does_not_depend_on_how_much_is_cached(backend: TorchNativeAttnBackend, cached: int) -> None:
    shape = Shape(2, 1, 96, 64, is_mla=True)
    pool = Pool(shape, [(0, 31)])
    whole = extend_attention.extend(_refuse, backend, *pool.extend_arguments(), causal=True, **pool.options)
    pool.prefix_lens, pool.new_lens = torch.tensor([cached]), torch.tensor([31 - cached])
    pool.query, pool.output_shape = pool.query[cached:], (31 - cached, *pool.output_shape[1:])
    rest = extend_attention.extend(_refuse, backend, *pool.extend_arguments(), causal=True, **pool.options)
    torch.testing.assert_close(rest, whole[cached:], rtol=0, atol=_TOLERANCE)


def test_blocks_of_one_query_equal_one_block(backend: TorchNativeAttnBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(Shape(6, 2, 32, 32), [(20, 9)])
    whole = extend_attention.extend(_refuse, backend, *pool.extend_arguments(), causal=True, **pool.options)
    monkeypatch.setattr(extend_attention, "_SCORES", 1)
    blocks = extend_attention.extend(_refuse, backend, *pool.extend_arguments(), causal=True, **pool.options)
    torch.testing.assert_close(blocks, whole, rtol=0, atol=_TOLERANCE)


def test_scaling_defaults_to_the_width_of_a_key(backend: TorchNativeAttnBackend) -> None:
    pool = Pool(Shape(4, 4, 32, 32), [(5, 6)])
    pool.options["scaling"] = None
    expected = _stock_extend(backend, *pool.extend_arguments(), causal=True, **pool.options)
    actual = extend_attention.extend(_refuse, backend, *pool.extend_arguments(), causal=True, **pool.options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", [[(0, 1)], [(40, 1)], [(2000, 1), (3, 1), (77, 1)]], ids=["1", "41", "2001, 4, 78"])
def test_decode_equals_stock(backend: TorchNativeAttnBackend, shape: Shape, lens: list[tuple[int, int]]) -> None:
    pool = Pool(shape, lens)
    expected = _stock_decode(backend, *pool.decode_arguments(), causal=False, **pool.options)
    actual = extend_attention.decode(_refuse, backend, *pool.decode_arguments(), causal=False, **pool.options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=_TOLERANCE)


SPECIAL = [
    pytest.param({"sliding_window_size": 0}, id="a window of 0, the token itself"),
    pytest.param({"sliding_window_size": 4}, id="sliding window"),
    pytest.param({"encoder_lens": torch.tensor([3])}, id="encoder"),
    pytest.param({"encoder_lens": torch.tensor([3]), "is_cross_attn": True}, id="cross attention"),
    pytest.param({"is_cross_attn": True}, id="cross attention without lengths"),
]


@pytest.mark.parametrize("special", [*SPECIAL, pytest.param({"causal": False}, id="not causal")])
def test_extend_hands_to_stock(special: dict[str, Any]) -> None:
    pool = Pool(Shape(4, 2, 32, 32), [(5, 6)])
    stock, arguments, backend = Mock(), pool.extend_arguments(), object()
    options = {"causal": True, **pool.options, **special}
    assert extend_attention.extend(stock, backend, *arguments, **options) is stock.return_value
    _assert_same_call(stock, _stock_extend, backend, arguments, options)


@pytest.mark.parametrize("special", SPECIAL)
def test_decode_hands_to_stock(special: dict[str, Any]) -> None:
    pool = Pool(Shape(4, 2, 32, 32), [(5, 1)])
    stock, arguments, backend = Mock(), pool.decode_arguments(), object()
    options = {"causal": False, **pool.options, **special}
    assert extend_attention.decode(stock, backend, *arguments, **options) is stock.return_value
    _assert_same_call(stock, _stock_decode, backend, arguments, options)


def test_a_negative_window_is_no_window(backend: TorchNativeAttnBackend) -> None:
    pool = Pool(Shape(4, 2, 32, 32), [(5, 6)])
    out = extend_attention.extend(
        _refuse, backend, *pool.extend_arguments(), causal=True, sliding_window_size=-1, **pool.options
    )
    assert not out.isnan().any()


def _assert_same_call(stock: Mock, signature: Any, backend: object, arguments: Any, options: dict[str, Any]) -> None:
    """Each of SGLang's parameters received the very object that was passed, or its default."""
    parameters = inspect.signature(signature)

    def bind(call_args: Any, call_options: Any) -> dict[str, Any]:
        bound = parameters.bind(*call_args, **call_options)
        bound.apply_defaults()
        return bound.arguments

    expected = bind((backend, *arguments), options)
    received = bind(stock.call_args.args, stock.call_args.kwargs)
    assert all(received[name] is expected[name] for name in itertools.chain(expected, received))
