from __future__ import annotations

import io
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
    seen: ClassVar[list[Any]] = []
    headers_seen: ClassVar[list[Any]] = []
    bodies_seen: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        self.headers_seen.append({name.lower(): value for name, value in self.headers.items()})
        self._answer()

    def do_POST(self) -> None:
        self.bodies_seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer()

    def _answer(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.replies["status"])
        self.end_headers()
        self.wfile.write(self.replies["body"])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    for seen in (_Server.seen, _Server.headers_seen, _Server.bodies_seen):
        seen.clear()
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


_ID = "KYc2t0XkLlV8bXwWq1mDfQ"
_EDIT = {"edit_id": "e1", "turn": "t1", "position": 3, "removed_tokens": 9, "replacement_tokens": 2}
_TURN = {"prompt_tokens": 50, "output_tokens": 4, "cached_tokens": 53, "edits": [_EDIT], "own_namespace": True}
_STATE = {"conversation_hash": "0" * 32, "own_tokens": 53, "turns": [{"turn": "t2", **_TURN}], "explicit_edits": []}
_RELEASED = {"conversation_hash": "0" * 32, "purge": {"dropped_tokens": 53, "held_tokens": 2, "scrubbed_tokens": 900}}


def test_conversation_is_shown_and_its_secrets_are_read_from_the_environment(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _Server.replies.update(body=json.dumps(_STATE).encode())
    monkeypatch.setenv("LEYLINE_CONVERSATION", _ID)
    monkeypatch.setenv("LEYLINE_CACHE_SALT", "salt")
    monkeypatch.setenv("LEYLINE_API_KEY", "key")

    assert main(["conversation", server, "--extra-key", "x"]) == 0

    assert _Server.seen == [("/leyline/conversation", "Bearer key")]
    headers = ("conversation", "cache-salt", "extra-key")
    assert [_Server.headers_seen[0][f"x-leyline-{name}"] for name in headers] == [_ID, "salt", "x"]
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        f"conversation {'0' * 32}: 53 tokens in a namespace of its own",
        "t2 50 + 4 tokens 53 cached (own) 1 edits",
        "e1 at 3: 9 -> 2 tokens",
    ]


def test_release_reads_the_id_from_stdin_and_says_what_was_freed(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _Server.replies.update(body=json.dumps(_RELEASED).encode())
    monkeypatch.delenv("LEYLINE_CONVERSATION", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(_ID + "\n"))

    assert main(["release", server, "--scrub"]) == 0

    assert _Server.bodies_seen == [{"conversation": _ID, "scrub": True}]
    assert "53 tokens dropped, 2 held by running requests, 900 scrubbed" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "answer"), [("conversation", _STATE), ("release", _RELEASED)])
def test_conversation_and_release_print_json(
    command: str,
    answer: dict[str, Any],
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _Server.replies.update(body=json.dumps(answer).encode())
    monkeypatch.setenv("LEYLINE_CONVERSATION", _ID)

    assert main([command, server, "--json"]) == 0

    printed = json.loads(capsys.readouterr().out)
    printed.get("purge", {}).pop("shared_tokens", None)
    assert printed == answer


@pytest.mark.parametrize("command", ["conversation", "release"])
@pytest.mark.parametrize(
    ("conversation_id", "status", "body", "code", "words"),
    [
        pytest.param("", 200, b"", 2, "no conversation's id in LEYLINE_CONVERSATION or on stdin", id="no id"),
        pytest.param("me", 200, b"", 2, "too short", id="guessable"),
        pytest.param(_ID, 404, b"{}", 1, "no Leyline plugin", id="no plugin"),
        pytest.param(_ID, 404, b'{"reason": "unknown_conversation"}', 1, "unknown_conversation", id="unknown"),
        pytest.param(_ID, 401, b"", 2, "answered 401", id="no key"),
    ],
)
def test_conversation_and_release_fail_without_a_traceback(
    command: str,
    conversation_id: str,
    status: int,
    body: bytes,
    code: int,
    words: str,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _Server.replies.update(status=status, body=body)
    monkeypatch.setenv("LEYLINE_CONVERSATION", conversation_id)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    assert main([command, server]) == code

    assert words in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:port", "nowhere"])
def test_release_tells_an_unreachable_server_apart(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEYLINE_CONVERSATION", _ID)

    assert main(["release", url, "--timeout", "2"]) == 2

    assert capsys.readouterr().err.startswith("leyline: ")
