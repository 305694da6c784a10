"""A small MLA model with random weights, generated where it is needed so that no weights are in the repository.

DeepSeek-V2's architecture (latent attention, YaRN rope, all layers dense), a byte-level BPE tokenizer trained on the
sources of Python's standard library, and a chat template with tools. It says nothing sensible, but what it says depends
on the whole context, so a wrong cache shows in its output; see `_initialise_`.

Run as `python -m evals.models.random_mla`, it generates the model if absent and prints its folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

_MAX_CORPUS_BYTES = 2_000_000
_VOCAB_SIZE = 4096
_SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

# Two heads, so that two tensor-parallel ranks have one each. No layer has experts, since all are dense, but both
# transformers and SGLang read their number and frequency.
_ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 256,
    # Wide, so that a token's prefill costs something beside the fixed cost of a request, as it does with a real model,
    # while the rows of the cache stay narrow.
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 65536,
    # DeepSeek-V2 has mscale equal to mscale_all_dim, which makes the factor in its cos_sin_cache 1. Here it is 1.07,
    # so that a position delta which wrongly applies it is seen.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
}


def default_cache_dir() -> Path:
    """Return `$LEYLINE_CACHE`, or `~/.cache/leyline`."""
    configured = os.environ.get("LEYLINE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "leyline"


def ensure_model(cache_dir: Path | None = None, *, seed: int = 0) -> Path:
    """Return the folder of the model for `seed` below `cache_dir`, generated first if it is absent (about 10 s).

    The folder's name carries a digest of all that the model is made from, so a change of this file's recipe, of
    Python's sources or of a library makes a new one beside the old. A folder appears complete or not at all; of
    concurrent callers one wins, and all get the same folder.
    """
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    template = _template()
    corpus = list(_corpus())
    folder = cache_dir / f"random-mla-{_digest(seed, template, corpus)}"
    if folder.is_dir():
        return folder

    cache_dir.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache_dir))
    try:
        _generate(unfinished, seed, template, corpus)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            # Another caller may have put the same model there meanwhile; anything else is an error.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def train_tokenizer() -> Any:
    """Return the model's tokenizer with its chat template, without the model (about 2 s)."""
    return _train_tokenizer(list(_corpus()), _template())


def _template() -> str:
    return Path(__file__).with_name("chat_template.jinja").read_text()


def _corpus() -> Iterator[str]:
    """Yield the standard library's top-level sources in the order of their names, up to `_MAX_CORPUS_BYTES`."""
    total_bytes = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        total_bytes += len(text.encode())
        if total_bytes > _MAX_CORPUS_BYTES:
            return
        yield text


def _digest(seed: int, template: str, corpus: list[str]) -> str:
    recipe = {
        "seed": seed,
        "architecture": _ARCHITECTURE,
        "vocab_size": _VOCAB_SIZE,
        "special_tokens": _SPECIAL_TOKENS,
        "template": template,
        "corpus": hashlib.sha256("".join(corpus).encode()).hexdigest(),
        "code": Path(__file__).read_text(),
        "libraries": [version(name) for name in ("tokenizers", "torch", "transformers")],
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _generate(folder: Path, seed: int, template: str, corpus: list[str]) -> None:
    """Write tokenizer, configuration and weights into `folder`."""
    # Here and not at the top: an existing model is found without the seconds that these take to import.
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, GenerationConfig
    from transformers.utils import logging

    tokenizer = _train_tokenizer(corpus, template)
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = DeepseekV2Config(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, dtype="float32", **ids, **_ARCHITECTURE
    )
    model = DeepseekV2ForCausalLM(config).to(torch.float32)
    _initialise_(model, seed)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shows_progress:
            logging.enable_progress_bar()


def _train_tokenizer(corpus: list[str], template: str) -> Any:
    """Return a byte-level BPE tokenizer: every text round-trips through it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        chat_template=template,
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=_SPECIAL_TOKENS[2:],
        clean_up_tokenization_spaces=False,
        model_max_length=_ARCHITECTURE["max_position_embeddings"],
    )


def _initialise_(model: Any, seed: int) -> None:
    """Fill the weights in place so that the next token depends on the whole context.

    Norms are 1 and matrices N(0, 1/sqrt(fan_in)), which keeps every layer's signal at the same size. The projections to
    queries and keys get twice that: attention then prefers some tokens to others, instead of averaging them all.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            gain = 2.0 if any(part in name for part in (".q_proj.", ".kv_a_proj_with_mqa.", ".kv_b_proj.")) else 1.0
            weight.normal_(0.0, gain / math.sqrt(weight.shape[1]), generator=generator)


def main(arguments: list[str] | None = None) -> int:
    """Generate the model if absent and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m evals.models.random_mla", description=main.__doc__)
    parser.add_argument("--cache-dir", type=Path, help="default: $LEYLINE_CACHE, or ~/.cache/leyline")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(ensure_model(options.cache_dir, seed=options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
