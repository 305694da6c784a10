"""From a chat request to what SGLang 0.5.23 gives to a chat template.

Does what `entrypoints/openai/serving_chat.py` and the request models of `protocol.py` do there, for text. What is the
server's own, such as its default template arguments or a model's encoding in Python, cannot be known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from leyline_agent.errors import RenderError

ContentFormat = Literal["string", "openai"]

_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")
_MESSAGE_FIELDS = ("role", "content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "prefix")
_TEXT_PARTS = frozenset({"text", "input_text"})
_LEFT_OUT_PARTS = frozenset({"thinking", "reasoning"})
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_MESSAGE_NAMES = frozenset({"message", "msg", "m"})


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, content_format: ContentFormat = "string"
) -> list[dict[str, Any]]:
    """Return messages as the server gives them to a chat template.

    Fields that it does not know are left out, nulls too; "" stands for no content; the arguments of calls are parsed;
    the parts of a content are joined where the template takes text alone, and those of a tool output anyway.

    Raises:
        RenderError: the server would refuse them, or they have parts whose tokens only the server knows.
    """
    return [_template_message(message, idx, content_format) for idx, message in enumerate(messages)]


def template_tools(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None = None
) -> list[dict[str, Any]] | None:
    """Return schemas of tools as the server gives them to a chat template; None where it gives none.

    A choice of no tool leaves out all of them, and the choice of one all others.
    """
    if not tools or tool_choice == "none":
        return None
    if isinstance(tool_choice, Mapping):
        chosen = tool_choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == chosen]
    return [_template_tool(tool) for tool in tools] or None


def template_arguments(request: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return what else a template is given: the request's `chat_template_kwargs`, and what its reasoning effort sets.

    Raises:
        RenderError: the server would refuse the effort.
    """
    arguments = dict(request.get("chat_template_kwargs") or {})
    effort, thinking = request.get("reasoning_effort"), None
    reasoning = request.get("reasoning")
    if isinstance(reasoning, Mapping):
        given = reasoning.get("effort", reasoning.get("reasoning_effort"))
        effort = effort if given is None else given
        enabled = reasoning.get("enabled", reasoning.get("enable"))
        if enabled is True or (isinstance(enabled, str) and enabled.strip().lower() in ("1", "true", "yes", "y", "on")):
            thinking = True
    if effort is not None:
        if isinstance(effort, bool) or not (effort in _EFFORTS or isinstance(effort, int | float)):
            raise RenderError(f"reasoning_effort: got {effort!r}, expected one of {', '.join(sorted(_EFFORTS))}")
        thinking = effort != "none"
        arguments.setdefault("reasoning_effort", effort)
    if thinking is not None:
        # Templates ask for one or the other.
        arguments.setdefault("thinking", thinking)
        arguments.setdefault("enable_thinking", thinking)
    if effort == "low" and "low_effort" in template and "truncate_history_thinking" in template:
        arguments.setdefault("low_effort", True)
    return arguments


def split_last_answer(messages: list[dict[str, Any]], *, continues: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the messages, and the text with which the answer is to begin.

    A chat request that ends with an assistant message of text has it continued if it says `continue_final_message`;
    else the server takes it for one of the user.
    """
    if not messages or messages[-1]["role"] != "assistant" or not isinstance(messages[-1]["content"], str):
        return messages, ""
    content = messages[-1]["content"]
    if continues:
        return messages[:-1], content
    return [*messages[:-1], {"role": "user", "content": content}], ""


@lru_cache(maxsize=16)
def content_format(template: str) -> ContentFormat:
    """Tell whether a template goes over the parts of a content itself ("openai") or wants text ("string")."""
    if any(word in template for word in _MEDIA_WORDS):
        return "openai"
    # Of the extra `tokenizers`, which only who renders needs. What transformers adds to Jinja is in its own function.
    from jinja2 import TemplateError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:
        return "string"
    return "openai" if any(_is_content(loop.iter) for loop in tree.find_all(nodes.For)) else "string"


def _is_content(node: Any) -> bool:
    """Tell whether an expression is the content of a message, filtered or cut."""
    from jinja2 import nodes

    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Getitem):
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    elif isinstance(node, nodes.Getattr):
        key = node.attr
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in _MESSAGE_NAMES


def _template_message(message: Mapping[str, Any], idx: int, content_format: ContentFormat) -> dict[str, Any]:
    role = str(message.get("role"))
    fields = ("role", "content") if role == "user" else _MESSAGE_FIELDS
    passed = {field: message[field] for field in fields if message.get(field) is not None}
    passed["role"] = role.lower()
    content = passed.setdefault("content", "")
    if isinstance(content, list | tuple):
        passed["content"] = _content(content, idx, content_format, is_tool=passed["role"] == "tool")
    if "tool_calls" in passed:
        passed["tool_calls"] = [_template_call(call, idx) for call in passed["tool_calls"]]
    return passed


def _content(
    parts: Sequence[Any], idx: int, content_format: ContentFormat, *, is_tool: bool
) -> str | list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in _TEXT_PARTS:
            kept.append({"type": "text", "text": part["text"]})
        elif content_format == "openai" and kind not in _LEFT_OUT_PARTS:
            raise RenderError(
                f"messages[{idx}].content: got a part of type {kind!r}, expected text: how many tokens it is only the "
                "server knows; use ServerTokenizer"
            )
    if content_format == "string" or is_tool:
        return " ".join(part["text"] for part in kept)
    return kept


def _template_call(call: Any, idx: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RenderError(f"messages[{idx}].tool_calls: got {call!r:.80}, expected a call with a 'function'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except ValueError as error:
            raise RenderError(
                f"messages[{idx}].tool_calls: the arguments of {function.get('name')!r} are no JSON ({error}); the "
                "server refuses such a message"
            ) from error
        if not isinstance(arguments, dict):
            raise RenderError(
                f"messages[{idx}].tool_calls: the arguments of {function.get('name')!r} are no JSON object; the server "
                "refuses such a message"
            )
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": call.get("type", "function"),
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Do what the server's request model does to a tool.

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
