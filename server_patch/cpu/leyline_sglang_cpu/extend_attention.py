"""Attention of `torch_native` for the new queries only.

SGLang's own function pads the queries to the whole sequence and computes all of it again, whatever is cached, and
memory grows with the square of the length; so on a CPU a cached prefix saves nothing. Its decoding copies keys and
values of the whole sequence separately and repeats them for each head. Both are replaced here by one function, which
hands to SGLang's own whatever it does not do itself: sliding windows, encoders, cross attention, non-causal prefill.

Written with matrix products and a softmax. `scaled_dot_product_attention` is slower here in each of its forms: MLA's
keys and values differ in width, which excludes its fast CPU kernel unless values are padded to keys, and a query block
at an offset needs an explicit mask. Measured on 2 threads, 2 heads, 1,024 new of 31,024 tokens: this 146 ms, padded
and masked 190, as SGLang calls it 360.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Scores held at once: 4 MB in float32 stay in cache between the two products; 1 << 18 to 1 << 22 measured within 15%.
_SCORES = 1 << 20


def extend(
    stock: Callable[..., torch.Tensor],
    backend: object,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Write the attention of each sequence's last `extend_seq_lens` tokens into `output`, and return it.

    An AROUND hook of `TorchNativeAttnBackend._run_sdpa_forward_extend`, whose signature it has after `stock`.
    `query` and `output` are `[num_new_tokens, num_heads, width]`, the caches `[num_slots, num_kv_heads, width]`.
    """
    if not causal or _is_special(encoder_lens, is_cross_attn, sliding_window_size):
        return stock(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )
    sequences = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    start = 0
    for pool_idx, num_tokens, num_new in sequences:
        slots = req_to_token[pool_idx, :num_tokens]
        new = slice(start, start + num_new)
        _attend(query[new], output[new], k_cache, v_cache, slots, scaling)
        start += num_new
    return output


def decode(
    stock: Callable[..., torch.Tensor],
    backend: object,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Write the attention of each sequence's last token into `output`, and return it.

    An AROUND hook of `TorchNativeAttnBackend._run_sdpa_forward_decode`, shapes as in `extend`. A last token sees
    every key, causal or not, so `options` (`causal`, `enable_gqa`) change nothing.
    """
    if _is_special(encoder_lens, is_cross_attn, sliding_window_size):
        return stock(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            encoder_lens,
            scaling=scaling,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
            **options,
        )
    for idx, (pool_idx, num_tokens) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[pool_idx, :num_tokens]
        _attend(query[idx : idx + 1], output[idx : idx + 1], k_cache, v_cache, slots, scaling)
    return output


def _is_special(encoder_lens: torch.Tensor | None, is_cross_attn: bool, sliding_window_size: int | None) -> bool:
    """Return whether this is left to SGLang. It reads a window of None or below 0 as none."""
    return encoder_lens is not None or is_cross_attn or (sliding_window_size is not None and sliding_window_size >= 0)


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scaling: float | None,
) -> None:
    """Write the causal attention of one sequence's last `len(query)` tokens into `output`.

    The heads that share a KV head become rows of one matrix, so keys are neither repeated nor copied per head. Beyond
    one copy of the sequence's rows it takes memory for `_SCORES` scores, or one token's if those are more.
    """
    num_new, num_heads, key_width = query.shape
    num_kv_heads, value_width = k_cache.shape[1], v_cache.shape[2]
    group = num_heads // num_kv_heads
    num_cached = slots.shape[0] - num_new
    scale = key_width**-0.5 if scaling is None else scaling

    rows = k_cache.index_select(0, slots)
    # MLA's value is the head of its key's row: one copy serves both.
    shares_rows = v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
    value_rows = rows[..., :value_width] if shares_rows else v_cache.index_select(0, slots)
    keys = rows.to(query.dtype).permute(1, 2, 0)  # [num_kv_heads, key_width, T]
    values = value_rows.to(query.dtype).transpose(0, 1)  # [num_kv_heads, T, value_width]

    block = max(1, _SCORES // (num_heads * slots.shape[0]))
    scratch = query.new_empty(min(block, num_new) * num_heads * slots.shape[0])
    for start in range(0, num_new, block):
        end = min(start + block, num_new)
        num_queries, num_keys = end - start, num_cached + end
        grouped = query[start:end].view(num_queries, num_kv_heads, group, key_width).transpose(0, 1)
        shape = (num_kv_heads, num_queries * group, num_keys)
        scores = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm((grouped * scale).reshape(num_kv_heads, -1, key_width), keys[..., :num_keys], out=scores)
        # Only the block's own keys can lie ahead of its queries.
        own = scores.view(num_kv_heads, num_queries, group, num_keys)[..., num_cached + start :]
        ahead = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).triu(1)
        own.masked_fill_(ahead.unsqueeze(1), float("-inf"))
        torch.softmax(scores, dim=-1, out=scores)
        mixed = torch.bmm(scores, values[:, :num_keys])
        output[start:end] = mixed.view(num_kv_heads, num_queries, group, value_width).transpose(0, 1).flatten(1, 2)
