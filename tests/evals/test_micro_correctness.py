import json
import subprocess
import sys
from pathlib import Path

import pytest

import evals.micro
from evals.micro.correctness import summary
from evals.micro.known_answers import Case, Next, Verdict
from evals.micro.shapes import model_config
from evals.serving import serve

PLUGIN = Path(evals.micro.__file__).parent / "server_plugin"


def answer(token: int, margin: float) -> Next:
    """The token, and one behind it."""
    return Next(token, ((token, -1.0), (token + 1, -1.0 - margin)), 0, {})


def verdict(
    idx: int = 0,
    *,
    margin: float = 0.5,
    noise: float = 0.0,
    removed: int = 7,
    wrong: int | None = 9,
    shuffled: int = 9,
    problem: str | None = None,
) -> Verdict:
    """A case whose reference is token 7."""
    answers = {
        "reference": answer(7, margin),
        "rebatched": answer(7, margin + noise),
        "remove": answer(removed, margin),
        "shuffled": answer(shuffled, margin),
    }
    if wrong is not None:
        answers["wrong"] = answer(wrong, margin)
    return Verdict(Case.random(idx, seed=0, vocab_size=5000), answers, problem)


def test_all_is_well_where_all_agree():
    assert summary([verdict(idx) for idx in range(10)])["missed"] == []


def test_only_margins_above_the_noise_of_all_prompts_qualify():
    figures = summary([verdict(0, margin=0.1), verdict(1, margin=0.3), verdict(2, margin=0.5, noise=0.2)])
    assert figures["qualified_share"] == round(2 / 3, 4)


def test_a_disagreement_within_the_noise_misses_nothing():
    figures = summary([verdict(0, margin=0.1, removed=8), verdict(1, margin=0.5, noise=0.2)])
    assert figures["agreement"] == 0.5
    assert figures["missed"] == []


def test_a_disagreement_above_the_noise_is_missed():
    figures = summary([verdict(0, margin=0.4, removed=8), verdict(1, margin=0.5, noise=0.2)])
    assert figures["missed"] == ["only 50.00% agree where the margin is above the noise, expected all"]
    assert figures["by_noise"]["p100"]["disagreeing_prompts"] == [0]


def test_no_margin_above_the_noise_is_missed():
    assert summary([verdict(margin=0.1, noise=0.2)])["missed"] == ["no margin is above the noise"]


def test_weights_that_ignore_the_order_of_the_context_are_missed():
    figures = summary([verdict(idx, shuffled=7 if idx < 2 else 9) for idx in range(10)])
    assert figures["missed"] == ["shuffling changes the next token in 80.0%, expected 90% or more"]


def test_a_wrong_rotation_that_changes_too_little_is_missed():
    figures = summary([verdict(idx, wrong=7 if idx < 5 else 9) for idx in range(10)])
    assert figures["missed"] == ["keys 64 positions off agree in 50.0%, expected under 50%"]


def test_a_case_that_was_not_spliced_counts_for_nothing_but_is_told():
    figures = summary([verdict(0), verdict(1, removed=8, problem="prompt 1, remove: not spliced")])
    assert (figures["judged"], figures["agreement"]) == (1, 1.0)
    assert figures["missed"] == ["1 prompts were not spliced as they should be: prompt 1, remove: not spliced"]


def test_nothing_judged_is_missed():
    assert summary([verdict(problem="evicted")])["missed"] == ["no prompt could be judged"]


def test_a_token_that_is_not_among_the_likeliest_counts_as_the_last_of_them():
    assert answer(7, 0.25).margin_of(7, 100) == 0.25


def test_the_span_stands_between_prefix_and_tail():
    case = Case.random(3, seed=1, vocab_size=5000)
    assert case.longer == [*case.prefix, *case.inserted, *case.tail]
    assert case.prompt == [*case.prefix, *case.tail, case.last]


def test_no_other_sequence_ends_as_the_prompt_does():
    # The shared namespace would have more of it cached than the conversation's own, and be served instead.
    case = Case.random(3, seed=1, vocab_size=5000)
    assert len({case.last, *case.others}) == 4


def test_a_case_depends_on_its_number_and_seed_alone():
    assert Case.random(3, seed=1, vocab_size=5000) == Case.random(3, seed=1, vocab_size=5000)
    assert Case.random(3, seed=1, vocab_size=5000) != Case.random(3, seed=2, vocab_size=5000)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-4.7-Flash in small: experts and low-rank queries too."""
    folder = tmp_path_factory.mktemp("small-glm")
    widths = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64}
    dims = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    others = {"n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 4096, "max_position_embeddings": 4096}
    config = model_config("glm-4.7-flash") | widths | heads | dims | others
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 1, "eos_token_id": 1}))
    return folder


@pytest.mark.sglang
def test_a_span_that_came_and_went_leaves_the_next_token_as_it_was(small_model: Path, tmp_path: Path):
    results = tmp_path / "correctness.jsonl"
    env = {"PYTHONPATH": str(PLUGIN), "BENCH_SEED": "1"}
    args = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-total-tokens", "32768"]
    with serve(small_model, env=env, extra_args=args, fork=True) as server:
        options = ["--url", server.url, "--model", "small", "--prompts", "12", "--at-once", "6"]
        command = [sys.executable, "-m", "evals.micro.correctness", *options, "--json-out", str(results)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    row = json.loads(results.read_text())
    assert row["missed"] == []
    assert (row["judged"], row["wrong_prompts"]) == (12, 12)
    # In float32 hardly anything lies within the noise.
    assert row["qualified_share"] > 0.8
