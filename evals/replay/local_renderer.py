"""The chat template and tokenizer of a model folder, applied as SGLang's chat route applies them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.replay.errors import ReplayError
from evals.replay.ideal import ChatDict
from leyline_agent.chat_template import template_messages, template_tools


class LocalRenderer:
    """A `PromptRenderer` on a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, model_dir: Path | str) -> LocalRenderer:
        """Load a model's tokenizer; nothing is downloaded.

        Raises:
            ReplayError: transformers is not installed, or the folder holds no tokenizer with a chat template.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ReplayError("the ideal needs a tokenizer: pip install '/path/to/leyline[tokenizers]'") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ReplayError(f"no tokenizer in {str(model_dir)!r}; give the served model's folder") from error
        if not tokenizer.chat_template:
            raise ReplayError(f"the tokenizer in {str(model_dir)!r} has no chat template; give a chat model's folder")
        return cls(tokenizer)

    def render(self, messages: Sequence[ChatDict], tools: Sequence[ChatDict], *, generation_prompt: bool) -> str:
        """Return the prompt's text."""
        text = self._tokenizer.apply_chat_template(
            template_messages(messages),
            tools=template_tools(tools),
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def token_starts(self, text: str) -> list[int]:
        """Return the index of the character at which each token of the text starts."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [start for start, _ in encoded["offset_mapping"]]
