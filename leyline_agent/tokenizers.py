"""From messages to the token ids of their prompt: the server's `/tokenize`, or a local Hugging Face tokenizer.

Only `plan="client"` and previews need one; an ordinary turn tokenizes nothing on the client.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx

from leyline_agent.errors import SpliceTransportError

_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")


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
                f"POST /tokenize gave no token ids ({error}); plan='client' needs a server of SGLang 0.5.23 itself, "
                "not a gateway, or a LocalTokenizer"
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
            raise ImportError("a local tokenizer needs: pip install 'leyline-agent[tokenizers]'") from error
        return cls(AutoTokenizer.from_pretrained(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        """Return the prompt's ids."""
        template_arguments = dict(arguments.get("chat_template_kwargs") or {})
        if arguments.get("reasoning_effort") is not None:
            template_arguments.setdefault("reasoning_effort", arguments["reasoning_effort"])
        token_ids = self._tokenizer.apply_chat_template(
            template_messages(messages),
            tools=template_tools(tools, arguments.get("tool_choice")),
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **template_arguments,
        )
        return list(token_ids)


def server_root(base_url: str) -> str:
    """Return the server's root, whether or not the URL ends with `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as SGLang gives them to a chat template: calls' arguments parsed, no nulls, "" for no content."""
    return [_template_message(message) for message in messages]


def template_tools(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None = None
) -> list[dict[str, Any]] | None:
    """Return schemas of tools as SGLang gives them to a chat template; None where it gives none.

    A choice of no tool leaves out all of them, and the choice of one all others.
    """
    if not tools or tool_choice == "none":
        return None
    if isinstance(tool_choice, Mapping):
        chosen = tool_choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == chosen]
    return [_template_tool(tool) for tool in tools] or None


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    passed = {key: copy.deepcopy(value) for key, value in message.items() if value is not None}
    passed.setdefault("content", "")
    for call in passed.get("tool_calls") or ():
        function = call.get("function") or {}
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                # A template that takes arguments as text still can.
                continue
    return passed


def _template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Do what the request model of SGLang 0.5.23 does to a tool (`entrypoints/openai/protocol.py`).

    Fields that it does not know go. A function keeps the order of its own, and gets null for a description or for
    parameters that are absent; the tool around it always gets `defer_loading`, and hands it down to the function.
    """
    given = tool.get("function")
    if not isinstance(given, Mapping):
        # A server refuses it; a template may take it.
        return dict(tool)
    fields = [field for field in dict.fromkeys((*given, *_FUNCTION_FIELDS)) if field in _FUNCTION_FIELDS]
    function = {field: given.get(field) for field in fields}
    if function["defer_loading"] is None:
        function["defer_loading"] = tool.get("defer_loading")
    for field in ("strict", "defer_loading"):
        if function[field] is None:
            del function[field]
    return {
        "type": tool.get("type", "function"),
        "function": function,
        "defer_loading": tool.get("defer_loading"),
    }
