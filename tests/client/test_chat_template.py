"""What a template is given, held against SGLang's own code where that can run without a server."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_agent import RenderError
from leyline_agent.chat_template import content_format, split_last_answer, template_arguments, template_messages

_TEMPLATES = {
    "text": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "item": "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "attribute": "{% for msg in messages %}{% for part in msg.content %}{{ part }}{% endfor %}{% endfor %}",
    "filtered": "{% for message in messages %}{% for p in message.content | list %}{{ p }}{% endfor %}{% endfor %}",
    "sliced": "{% for message in messages %}{% for p in message['content'][1:] %}{{ p }}{% endfor %}{% endfor %}",
    "another name": "{% for turn in messages %}{% for part in turn.content %}{{ part }}{% endfor %}{% endfor %}",
    "media": "{{ '<image>' }}",
    "generation": "{% generation %}{% for part in message.content %}{{ part }}{% endfor %}{% endgeneration %}",
    "broken": "{% for %}",
}


@pytest.mark.parametrize("template", [pytest.param(text, id=name) for name, text in _TEMPLATES.items()])
def test_the_format_of_a_content_is_the_servers(template: str) -> None:
    utils = pytest.importorskip("sglang.srt.parser.jinja_template_utils")

    assert content_format(template) == utils.detect_jinja_template_content_format(template)


@pytest.mark.parametrize(
    "request_fields",
    [
        {},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
        {"reasoning_effort": 0.5},
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "t": 1}},
        {"chat_template_kwargs": {"thinking": True}},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"effort": "high"}, "reasoning_effort": "none"},
        {"reasoning": {"enabled": True}},
        {"reasoning": {"enabled": "off"}},
        {"reasoning": {"enable": "yes"}},
    ],
    ids=str,
)
def test_arguments_are_those_of_the_servers_request(request_fields: dict[str, Any]) -> None:
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    given = {key: dict(value) if isinstance(value, dict) else value for key, value in request_fields.items()}
    request = protocol.ChatCompletionRequest.model_validate({"messages": [], "model": "m", **given})
    # As `_apply_jinja_template` puts them together.
    expected = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    expected |= request.chat_template_kwargs or {}

    assert template_arguments(request_fields, "") == expected


def test_a_low_effort_is_an_argument_of_the_one_template_that_has_it() -> None:
    assert template_arguments({"reasoning_effort": "low"}, "low_effort truncate_history_thinking")["low_effort"] is True
    assert "low_effort" not in template_arguments({"reasoning_effort": "low"}, "low_effort")


@pytest.mark.parametrize("effort", ["a lot", True])
def test_an_effort_that_the_server_refuses_is_refused(effort: object) -> None:
    with pytest.raises(RenderError, match=r"reasoning_effort: got .*, expected one of high, low"):
        template_arguments({"reasoning_effort": effort}, "")


def test_parts_stay_where_the_template_goes_over_them_and_are_joined_in_tool_outputs() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "t"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": parts}, {"role": "tool", "tool_call_id": "c", "content": parts}]

    kept, output = template_messages(messages, content_format="openai")

    assert kept["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert output["content"] == "a b"
    assert [message["content"] for message in template_messages(messages)] == ["a b", "a b"]


def test_an_image_is_refused_where_the_template_would_render_it() -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}

    with pytest.raises(RenderError, match=r"messages\[0\].content: got a part of type 'image_url'.*ServerTokenizer"):
        template_messages([message], content_format="openai")


def test_a_last_answer_is_continued_or_becomes_the_users() -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "I"}]

    assert split_last_answer(messages, continues=True) == (messages[:1], "I")
    assert split_last_answer(messages, continues=False) == ([messages[0], {"role": "user", "content": "I"}], "")
    assert split_last_answer(messages[:1], continues=True) == (messages[:1], "")
