from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from leyline_agent.cli import main

_MESSAGES = [
    {"role": "user", "content": "task"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "bash", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "a long output\n" * 9},
    {"role": "assistant", "content": "one"},
    {"role": "assistant", "content": "two"},
]


@pytest.fixture
def messages_file(tmp_path: Path) -> str:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(_MESSAGES), encoding="utf-8")
    return str(file)


@pytest.fixture
def bad_policy(tmp_path: Path) -> str:
    file = tmp_path / "bad.yaml"
    file.write_text("version: 1\nrulez: []\n", encoding="utf-8")
    return str(file)


def test_validate_accepts_good_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "none", "keep_last_tool_outputs"]) == 0

    assert capsys.readouterr() == ("none: valid\nkeep_last_tool_outputs: valid\n", "")


def test_validate_reports_each_bad_policy_and_goes_on(bad_policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", bad_policy, "none", "absent"]) == 1

    out, err = capsys.readouterr()
    assert out == "none: valid\n"
    assert f"{bad_policy}:2:1: rulez: unknown key" in err
    assert "absent: no such file" in err


def test_validate_prints_json(bad_policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--json", bad_policy, "none"]) == 1

    bad, good = json.loads(capsys.readouterr().out)
    assert (bad["valid"], bad["line"], bad["column"], bad["key"]) == (False, 2, 1, "rulez")
    assert good == {"file": "none", "valid": True}


def test_explain_prints_prose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "keep_last_tool_outputs"]) == 0

    assert "every tool output older than 2 turns" in capsys.readouterr().out


def test_explain_of_a_bad_policy_fails_without_a_traceback(bad_policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", bad_policy]) == 1

    assert capsys.readouterr().err.startswith(f"leyline: {bad_policy}:2:1: rulez: ")


def test_plan_shows_each_edit(messages_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "keep_last_tool_outputs", messages_file]) == 0

    row, totals = capsys.readouterr().out.splitlines()
    assert row.split() == [
        *("2", "tool", "old", "tool", "outputs", "amortize", "126", "->", "24", "chars"),
        *("[evicted:", "bash,", "9", "lines]"),
    ]
    assert totals.startswith("1 edits of 5 messages")


def test_plan_shows_what_is_dropped(messages_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "drop.yaml"
    policy.write_text("version: 1\nrules: [{name: r, select: {role: tool}, drop: true}]", encoding="utf-8")

    assert main(["plan", str(policy), messages_file]) == 0

    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "(dropped)" in line] == ["1", "2"]


def test_plan_takes_an_object_with_messages_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps({"source": "a run", "messages": _MESSAGES}), encoding="utf-8")

    assert main(["plan", "--json", "keep_last_tool_outputs", str(file)]) == 0

    report = json.loads(capsys.readouterr().out)
    assert (report["num_messages"], report["num_edits"], report["chars_before"]) == (5, 1, 126)
    assert report["edits"] == [
        {
            "start": 2,
            "end": 3,
            "roles": ["tool"],
            "rule": "old tool outputs",
            "mode": "amortize",
            "chars_before": 126,
            "chars_after": 24,
            "replacement": [{"role": "tool", "tool_call_id": "a", "content": "[evicted: bash, 9 lines]"}],
        }
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"{", "not JSON", id="not JSON"),
        pytest.param(b"\xff", "not JSON", id="not text"),
        pytest.param(b"[" * 100_000, "not JSON", id="nested without end"),
        pytest.param(b'{"role": "user"}', "list of chat dicts", id="one message"),
        pytest.param(b'[{"content": "x"}]', "messages[0]", id="no role"),
        pytest.param(None, "cannot read", id="no file"),
    ],
)
def test_plan_refuses_what_is_no_conversation(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "messages.json"
    if content is not None:
        file.write_bytes(content)

    assert main(["plan", "none", str(file)]) == 2

    assert words in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["plan", "none"], ["validate"], ["fly"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert "usage: leyline" in capsys.readouterr().err


def test_the_command_runs_as_a_module_and_survives_a_closed_pipe(messages_file: str) -> None:
    command = f"{sys.executable} -m leyline_agent.cli plan keep_last_tool_outputs {messages_file} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)

    assert done.stderr == ""


class _Server(BaseHTTPRequestHandler):
    replies: ClassVar[dict[str, Any]] = {}
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.replies["status"])
        self.end_headers()
        self.wfile.write(self.replies["body"])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    _Server.seen.clear()
    _Server.replies.update(status=200, body=b'{"supported": true, "plugin": "0.1.0"}')
    with HTTPServer(("127.0.0.1", 0), _Server) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_health_prints_what_a_server_installed(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", f"{server}/"]) == 0

    assert json.loads(capsys.readouterr().out) == {"supported": True, "plugin": "0.1.0"}
    assert _Server.seen == [("/leyline/capabilities", None)]


def test_health_sends_the_key(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYLINE_API_KEY", "from the environment")

    main(["health", server])
    main(["health", server, "--api-key", "given"])

    assert [key for _, key in _Server.seen] == ["Bearer from the environment", "Bearer given"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        pytest.param(404, b"", "no Leyline plugin", id="no plugin"),
        pytest.param(401, b"", "LEYLINE_API_KEY", id="no key"),
        pytest.param(200, b'{"supported": false, "unsupported": ["page size"]}', "cannot splice", id="unsupported"),
        pytest.param(200, b'{"supported": true, "enabled": false}', "switched off", id="switched off"),
        pytest.param(200, b"{}", "cannot splice", id="another service"),
        pytest.param(200, b"<html>", "not JSON", id="not JSON"),
        pytest.param(200, b"[]", "expected an object", id="no object"),
    ],
)
def test_health_fails_where_nothing_can_be_spliced(
    status: int, body: bytes, words: str, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _Server.replies.update(status=status, body=body)

    assert main(["health", server]) == 1

    assert words in capsys.readouterr().err


def test_health_tells_an_unreachable_server_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "http://127.0.0.1:9", "--timeout", "2"]) == 2

    assert "no answer" in capsys.readouterr().err
