"""The generated model listens to its context, and its template suits an agent's growing conversation."""

from __future__ import annotations

import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.models import random_mla
from evals.models.random_mla import ensure_model

with warnings.catch_warnings():
    # SGLang warns at import of all that a CPU lacks.
    warnings.simplefilter("ignore")
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOL = {"type": "function", "function": {"name": "run", "description": "Run it.", "parameters": {"type": "object"}}}

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You fix bugs."},
    {"role": "user", "content": "Find the bug.\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls \\"x\\""}'}},
            {"id": "b", "type": "function", "function": {"name": "run", "arguments": {"command": "pwd"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "  x.py\n"},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": "Done – it was <|x|>."},
]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


def test_shuffling_the_context_changes_the_next_token(model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rng = random.Random(0)
    prompts = [[rng.randrange(10, model.config.vocab_size) for _ in range(200)] for _ in range(100)]
    shuffled = [[*rng.sample(prompt[:-1], len(prompt) - 1), prompt[-1]] for prompt in prompts]
    with torch.no_grad():
        first, second = (
            model(torch.tensor(batch), logits_to_keep=1).logits[:, -1].argmax(-1) for batch in (prompts, shuffled)
        )
    assert int((first != second).sum()) >= 90


def test_a_seed_gives_the_same_files_and_another_seed_others(model_dir: Path, tmp_path: Path) -> None:
    again, other = ensure_model(tmp_path), ensure_model(tmp_path, seed=1)
    assert again.name == model_dir.name != other.name
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (model_dir / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()


def test_concurrent_callers_get_one_complete_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_generate = threading.Barrier(2, timeout=10)

    def generate(folder: Path, *_: Any) -> None:
        both_generate.wait()
        (folder / "weights").write_text("complete")
        both_generate.wait()

    monkeypatch.setattr(random_mla, "_generate", generate)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(ensure_model(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [folders[0]] * 2
    assert [file.read_text() for file in folders[0].iterdir()] == ["complete"]
    assert list(tmp_path.iterdir()) == [folders[0]]


def test_a_failed_generation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(random_mla, "_generate", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        ensure_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path))
    assert random_mla.default_cache_dir() == tmp_path
    monkeypatch.delenv("LEYLINE_CACHE")
    assert random_mla.default_cache_dir() == Path.home() / ".cache" / "leyline"


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
def test_a_longer_conversation_extends_the_ids_of_a_shorter_one(tokenizer: Any, tools: Any) -> None:
    def ids(count: int, **options: Any) -> list[int]:
        found: list[int] = tokenizer.apply_chat_template(
            CONVERSATION[:count], tools=tools, return_dict=False, **options
        )
        return found

    for count in range(1, len(CONVERSATION)):
        longer = ids(count + 1)
        assert longer[: len(ids(count))] == ids(count)
        if CONVERSATION[count]["role"] == "assistant":
            prompt = ids(count, add_generation_prompt=True)
            assert longer[: len(prompt)] == prompt


def test_every_text_round_trips(tokenizer: Any) -> None:
    text = "def f():\n\treturn  'ü' # 数 \x00 \r\n</tool_call>  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sglangs_parser_reads_the_calls_that_the_template_writes(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(CONVERSATION[:3], tokenize=False)
    answer = rendered.rpartition("<|assistant|>")[2].removesuffix("<|end|>")
    parsed = Qwen25Detector().detect_and_parse(answer, [Tool(type="function", function=Function(name="run"))])
    assert [call.name for call in parsed.calls] == ["run", "run"]
    assert [call.parameters for call in parsed.calls] == ['{"command": "ls \\"x\\""}', '{"command": "pwd"}']
    assert parsed.normal_text == ""


def test_tools_come_before_the_conversation(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(CONVERSATION[:2], tools=[TOOL], tokenize=False)
    assert 0 < rendered.index('"Run it."') < rendered.index("You fix bugs.") < rendered.index("Find the bug.\n")


def test_an_unknown_role_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role developer"):
        tokenizer.apply_chat_template([{"role": "developer", "content": "x"}])
