from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyline_agent.explain import ConversationFileError, read_conversation

_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": None, "unknown": 1}, {"role": "assistant"}]


def _file(folder: Path, content: Any) -> Path:
    file = folder / "a.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "content",
    [_MESSAGES, {"messages": _MESSAGES}, {"messages": _MESSAGES, "tools": None}],
    ids=["list", "dict", "null"],
)
def test_messages_are_taken_as_they_are(content: Any, tmp_path: Path) -> None:
    conversation = read_conversation(_file(tmp_path, content))

    assert [message.to_openai() for message in conversation.messages] == _MESSAGES
    assert (conversation.tools, conversation.source) == ((), "a.json")


def test_tools_and_source_are_read(tmp_path: Path) -> None:
    file = _file(tmp_path, {"messages": _MESSAGES, "tools": [{"type": "function"}], "source": "a run"})
    conversation = read_conversation(str(file))

    assert (conversation.tools, conversation.source) == (({"type": "function"},), "a run")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"{", r"a\.json:1:2: not JSON", id="not JSON"),
        pytest.param(b"\xff", "not UTF-8 text at byte 0", id="not text"),
        pytest.param(b"[" * 100_000, "not JSON", id="nested without end"),
        pytest.param(b'{"role": "user"}', r"an object with the keys \['role'\]", id="one message"),
        pytest.param(b'{"messages": {}}', r"expected \{\"messages\"", id="no list"),
        pytest.param(b'"text"', "got str", id="a text"),
        pytest.param(b'[{"content": "x"}]', r"messages\[0\]", id="no role"),
        pytest.param(b'{"messages": [], "tools": [1]}', "expected a list of tool schemas", id="tools"),
        pytest.param(None, "cannot read it: No such file", id="no file"),
    ],
)
def test_what_is_no_conversation_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConversationFileError, match=words) as caught:
        read_conversation(file)
    assert str(file) in str(caught.value)
