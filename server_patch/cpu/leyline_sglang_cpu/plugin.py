"""The SGLang plugin of a CPU install: MLA always absorbed, attention over new queries only.

Entry point `leyline_cpu` in the group `sglang.srt.plugins`; SGLang calls `activate` in each of its processes. Knows
nothing of Leyline's splices.
"""

from __future__ import annotations


def activate() -> None:
    """Register both changes with SGLang, if this process serves on a CPU; otherwise do nothing."""
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return

    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from leyline_sglang_cpu import extend_attention

    # torch_native reads keys and values from the pool, where MLA stores latents, so it can only run absorbed.
    # Without an entry of its own it gets triton's, which expands the latents where nothing is cached yet, and fails.
    AttentionBackendRegistry.register("torch_native", lambda attn, forward_batch: AttnForwardMethod.MLA)

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}._run_sdpa_forward_extend", extend_attention.extend, HookType.AROUND)
    HookRegistry.register(f"{backend}._run_sdpa_forward_decode", extend_attention.decode, HookType.AROUND)
