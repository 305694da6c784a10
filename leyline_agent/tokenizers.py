"""From messages to the token ids of their prompt: the server's `/tokenize`, or a local Hugging Face tokenizer.

Only `plan="client"`, previews and an exact counter need one; an ordinary turn tokenizes nothing on the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx

from leyline_agent.chat_template import (
    content_format,
    split_last_answer,
    template_arguments,
    template_messages,
    template_tools,
)
from leyline_agent.errors import RenderError, SpliceTransportError
from leyline_agent.policy.counting import MESSAGE_TOKENS, TextTokens


class Tokenizer(Protocol):
    """What renders a chat request's messages into ids."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        """Return the prompt's ids. `arguments` are other fields of the chat request, such as chat_template_kwargs."""
        ...


class ServerTokenizer:
    """The server's own `/tokenize`: exactly the ids of a chat request. One HTTP request a call, safe across threads."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=server_root(base_url),
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=timeout,
            transport=transport,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        """Return the prompt's ids.

        Raises:
            SpliceTransportError: the server cannot be reached, or has no `/tokenize` (a gateway has none).
        """
        body: dict[str, Any] = {**arguments, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if not add_generation_prompt:
            # Leave it out where it is wanted: only then does the server render as it does for a chat request.
            body["add_generation_prompt"] = False
        try:
            response = self._http.post("/tokenize", json=body)
            response.raise_for_status()
            token_ids: list[int] = response.json()["tokens"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise SpliceTransportError(
                f"POST {self._http.base_url.join('/tokenize')} gave no token ids ({error}); is that a server of SGLang "
                "0.5.23, and up? It must be the server itself, not a gateway; a LocalTokenizer needs none"
            ) from error
        return token_ids

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class LocalTokenizer:
    """A Hugging Face tokenizer with a chat template, given the messages as SGLang gives them to it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, path: str) -> LocalTokenizer:
        """Load a tokenizer's folder.

        Raises:
            ImportError: the extra `tokenizers` is not installed.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError("a local tokenizer needs: pip install '/path/to/leyline[tokenizers]'") from error
        return cls(AutoTokenizer.from_pretrained(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        """Return the prompt's ids.

        Raises:
            RenderError: the template or the server would refuse the request, or only the server can render it.
        """
        template = self._template(tools)
        given = template_messages(messages, content_format=content_format(template))
        continues = bool(arguments.get("continue_final_message"))
        if continues and not add_generation_prompt:
            raise RenderError("continue_final_message needs the generation prompt, which opens the answer")
        begun = ""
        if add_generation_prompt:
            given, begun = split_last_answer(given, continues=continues)
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "tokenize": True,
            "return_dict": False,
            **template_arguments(arguments, template),
        }
        schemas = template_tools(tools, arguments.get("tool_choice"))
        try:
            token_ids = self._tokenizer.apply_chat_template(given, tools=schemas, **options)
        except Exception as error:
            # The server tries again, for templates that want the functions bare.
            bare = [tool.get("function", tool) for tool in schemas or ()]
            try:
                token_ids = self._tokenizer.apply_chat_template(given, tools=bare or None, **options)
            except Exception:
                raise RenderError(f"the chat template refuses the request: {error}") from error
        return [*token_ids, *self._answer_ids(begun)]

    def counter(self, *, per_message: int = MESSAGE_TOKENS) -> TextTokens:
        """Return what counts a policy's tokens with this tokenizer.

        Texts are counted exactly, each on its own; what a template puts around a message is `per_message` tokens.
        """

        def count(text: str) -> int:
            return len(self._tokenizer.encode(text, add_special_tokens=False))

        return TextTokens(count, "tokenizer", per_message=per_message)

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):
            # Some models have one of their own for requests with tools.
            template = template.get("tool_use") if tools and "tool_use" in template else template.get("default")
        if not isinstance(template, str):
            raise RenderError("the tokenizer has no chat template; expected one of a chat model")
        return template

    def _answer_ids(self, begun: str) -> list[int]:
        """Return the ids of an answer's first words, as the server appends them."""
        token_ids = list(self._tokenizer.encode(begun)) if begun else []
        return token_ids[1:] if token_ids and token_ids[0] == self._tokenizer.bos_token_id else token_ids


def server_root(base_url: str) -> str:
    """Return the server's root, whether or not the URL ends with `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1")
