"""The chat template and tokenizer of a model folder, applied as SGLang's chat route applies them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.replay.errors import ReplayError
from evals.replay.ideal import ChatDict

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "defer_loading")


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
            raise ReplayError("the ideal needs a tokenizer: pip install 'leyline-agent[tokenizers]'") from error
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
            [_as_server_renders(message) for message in messages],
            tools=[_tool_as_server_renders(tool) for tool in tools] or None,
            add_generation_prompt=generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def token_starts(self, text: str) -> list[int]:
        """Return the index of the character at which each token of the text starts."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [start for start, _ in encoded["offset_mapping"]]


def _tool_as_server_renders(tool: ChatDict) -> dict[str, Any]:
    """Do what the chat route's request model does to a tool schema (seen in SGLang 0.5.23).

    A function keeps the order of its fields, and gets null for a description or parameters that are absent; the tool
    around it always gets `defer_loading`.
    """
    given = tool["function"]
    function = {field: value for field, value in given.items() if field in _FUNCTION_FIELDS}
    function |= {field: None for field in ("description", "parameters") if field not in given}
    return {
        "type": tool.get("type", "function"),
        "function": function,
        "defer_loading": tool.get("defer_loading"),
    }


def _as_server_renders(message: ChatDict) -> dict[str, Any]:
    """Do what the chat route does before the template: no null content, call arguments as objects."""
    rendered = dict(message)
    if rendered.get("content") is None:
        rendered["content"] = ""
    if rendered.get("tool_calls"):
        rendered["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in rendered["tool_calls"]
        ]
    return rendered
