"""Everything on the refuse list is refused, by name and with a reason. A fake scheduler: most of it cannot run here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from leyline_sglang import compat


class RotaryEmbedding:
    base = 10_000

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return torch.ones(4) / base


class UnifiedRadixCache:
    linker = None
    _components_tuple = (SimpleNamespace(component_type=SimpleNamespace(name="FULL")),)


class MLATokenToKVPool:
    dtype = store_dtype = torch.bfloat16
    use_dsa = dcp_replicated = False


def _scheduler(
    *,
    settings: dict[str, Any] | None = None,
    pool: Any = None,
    tree: Any = None,
    rotary: Any = None,
    page_size: int = 1,
) -> Any:
    plain = {name: value for name, value, _ in compat._SETTINGS}
    layer = SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=rotary or RotaryEmbedding()))
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer, layer]))
    return SimpleNamespace(
        server_args=SimpleNamespace(resolved_dict=lambda: plain | (settings or {})),
        tree_cache=tree or UnifiedRadixCache(),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page_size, get_kvcache=lambda: pool or MLATokenToKVPool()),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        rust_server=None,
    )


def test_the_plain_server_is_supported() -> None:
    assert compat.unsupported(_scheduler()) == []


@pytest.mark.parametrize("name", [name for name, _, _ in compat._SETTINGS])
def test_every_setting_off_its_plain_value_is_refused(name: str) -> None:
    plain = {setting: value for setting, value, _ in compat._SETTINGS}[name]
    other = True if plain is False else 2 if plain == 1 else "other"
    (reason,) = compat.unsupported(_scheduler(settings={name: other}))
    assert reason == next(why for setting, _, why in compat._SETTINGS if setting == name)


@pytest.mark.sglang
def test_every_setting_exists_in_sglang_under_its_name() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.server_args import ServerArgs

        known = set(ServerArgs.__struct_fields__) if hasattr(ServerArgs, "__struct_fields__") else set(dir(ServerArgs))
    assert {name for name, _, _ in compat._SETTINGS} <= known


def _kind(name: str, base: type, **fields: Any) -> Any:
    return type(name, (base,), fields)()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"page_size": 16}, "page size 16"),
        ({"tree": _kind("LMCacheUnifiedRadixCache", UnifiedRadixCache)}, "LMCacheUnifiedRadixCache"),
        ({"tree": _kind("UnifiedRadixCache", UnifiedRadixCache, linker=object())}, "linker"),
        (
            {
                "tree": _kind(
                    "UnifiedRadixCache",
                    UnifiedRadixCache,
                    _components_tuple=(SimpleNamespace(component_type=SimpleNamespace(name="SWA")),),
                )
            },
            "sliding-window",
        ),
        ({"pool": _kind("MLATokenToKVPoolFP4", MLATokenToKVPool)}, "MLATokenToKVPoolFP4"),
        ({"pool": _kind("MLATokenToKVPool", MLATokenToKVPool, store_dtype=torch.uint8)}, "stored as torch.uint8"),
        (
            {
                "pool": _kind(
                    "MLATokenToKVPool", MLATokenToKVPool, dtype=torch.float8_e4m3fn, store_dtype=torch.float8_e4m3fn
                )
            },
            "float8",
        ),
        ({"pool": _kind("MLATokenToKVPool", MLATokenToKVPool, use_dsa=True)}, "DSA"),
        ({"pool": _kind("MLATokenToKVPool", MLATokenToKVPool, dcp_replicated=True)}, "sharded"),
        ({"rotary": _kind("MRotaryEmbedding", RotaryEmbedding)}, "MRotaryEmbedding"),
        ({"rotary": _kind("DynamicNTKScalingRotaryEmbedding", RotaryEmbedding)}, "DynamicNTK"),
        ({"rotary": _kind("Phi3LongRoPEScaledRotaryEmbedding", RotaryEmbedding)}, "LongRoPE"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_the_server_is_made_of_is_looked_at(changed: dict[str, Any], said: str) -> None:
    (reason,) = compat.unsupported(_scheduler(**changed))
    assert said in reason


def test_another_version_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.6.0")
    assert "0.6.0" in compat.unsupported(_scheduler())[0]


def test_the_rust_server_is_refused() -> None:
    scheduler = _scheduler()
    scheduler.rust_server = object()
    assert "SGLANG_RUST_SERVER" in compat.unsupported(scheduler)[0]
