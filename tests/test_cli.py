from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest

from leyline_agent.cli import main
from leyline_agent.policy import shipped_policies
from tests.explain.conversations import WordTokenizer, write_conversation

_COMMANDS = (
    *(
        "policies",
        "validate",
        "explain",
        "compare",
        "plan",
        "health",
        "conversation",
        "release",
        "proxy",
        "stats",
        "completion",
    ),
)
_MESSAGES = [
    {"role": "user", "content": "task"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "bash", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "a long output\n" * 9},
    {"role": "assistant", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "go on"},
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


def test_every_mistake_of_a_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("version: 1\nrulez: []\nkep: {}\n", encoding="utf-8")

    for command in (["validate", str(file)], ["explain", str(file)]):
        assert main(command) == 1
        err = capsys.readouterr().err
        assert err.index(f"{file}:2:1: rulez: unknown key") < err.index(f"{file}:3:1: kep: unknown key")
    assert main(["validate", "--json", str(file)]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["key"], [other["key"] for other in report["others"]]) == ("rulez", ["kep"])


def test_validate_runs_no_function_that_is_not_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stale.yaml"
    name = "leyline_agent.policy.detectors:stale_tool_calls"
    file.write_text(
        f'version: 1\nrules: [{{name: r, select: {{role: tool, python: "{name}"}}, replace: "[x]"}}]', encoding="utf-8"
    )

    assert main(["validate", str(file)]) == 1
    assert "allow" in capsys.readouterr().err
    assert main(["validate", str(file), "--allow-python", name]) == 0


def test_policies_lists_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_policies())
    assert max(map(len, lines)) <= 100


def test_policies_as_json_say_when_to_use_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--json"]) == 0

    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == list(shipped_policies())
    assert all(entry[key] for entry in entries for key in ("description", "when", "cost", "risk", "path"))


def test_explain_prints_prose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "keep_last_tool_outputs"]) == 0

    assert "every tool output older than 2 turns" in " ".join(capsys.readouterr().out.split())


def test_explain_of_a_bad_policy_fails_without_a_traceback(bad_policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", bad_policy]) == 1

    assert capsys.readouterr().err.startswith(f"leyline: {bad_policy}:2:1: rulez: ")


def test_explain_shows_what_happens_in_each_turn(messages_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "keep_last_tool_outputs", messages_file]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert "Tokens: an estimate" in text
    assert "replaced message 2 (about 36 -> 10 tokens): tool output of bash, 2 turns old" in text


def test_explain_prints_json(messages_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "--directives", "keep_last_tool_outputs", messages_file]) == 0

    report = json.loads(capsys.readouterr().out)
    last = report["turns"][-1]
    assert (report["counted"], report["exact"]) == ("estimate", False)
    assert last["messages"][2] == {"role": "tool", "tool_call_id": "a", "content": "[evicted: bash, 9 lines]"}
    assert [(edit["start"], edit["rule"]) for edit in last["edits"]] == [(2, "old tool outputs")]
    assert last["kept_tokens"] + last["moved_tokens"] + last["recomputed_tokens"] == last["tokens_after"]
    assert last["recomputed_tokens_without_splice"] == last["recomputed_tokens"] + last["moved_tokens"]
    assert len(last["directives"]) == last["num_directives"] == 1


def test_explain_writes_a_page(messages_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", "keep_last_tool_outputs", messages_file, "--html", str(page)]) == 0

    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"wrote {page}\n"


def test_explain_writes_no_page_into_nowhere(
    messages_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "none", messages_file, "--html", str(tmp_path / "no" / "page.html")]) == 2

    assert "cannot write it" in capsys.readouterr().err


def test_explain_survives_half_a_surrogate_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}]
    file = write_conversation(tmp_path, messages)

    assert main(["explain", "none", file, "--json", "--html", str(tmp_path / "page.html")]) == 0
    assert json.loads(capsys.readouterr().out)["turns"][0]["messages"] == messages[:1]


def test_text_that_no_terminal_can_show_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / "conversation.json"
    file.write_text(json.dumps({"source": "\ud800", "messages": _MESSAGES}), encoding="utf-8")
    command = [sys.executable, "-m", "leyline_agent.cli", "explain", "none", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "\\ud800: 6 messages" in done.stdout


@pytest.mark.parametrize("option", ["--json", "--directives", "--html=x.html", "--tokenizer=x", "--server=x"])
def test_explain_without_a_trajectory_takes_no_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "none", option]) == 2

    assert "give a TRAJECTORY" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "compare"])
def test_a_share_of_a_context_window_needs_one(
    command: str, messages_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "share.yaml"
    file.write_text(
        'version: 1\nrules: [{name: r, select: {role: tool}, replace: "[x]", when: {context: 0.5}}]', encoding="utf-8"
    )

    assert main([command, str(file), messages_file]) == 1
    err = capsys.readouterr().err
    assert f"leyline: {file}: rule 'r' fires at a share of the context window" in err
    assert "--context-window 128000" in err
    assert main([command, str(file), messages_file, "--context-window", "9000"]) == 0


def test_compare_puts_policies_side_by_side(messages_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "none", "keep_last_tool_outputs", messages_file]) == 0

    none, keep = (line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:])
    assert (none, keep) == (["none", "0"], ["keep_last_tool_outputs", "1"])


def test_compare_prints_json_of_all_shipped_policies(messages_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--all", "--json", messages_file]) == 0

    report = json.loads(capsys.readouterr().out)
    assert (report["counted"], report["exact"]) == ("estimate", False)
    assert [row["policy"] for row in report["policies"]] == list(shipped_policies())
    assert {"edits", "moved_tokens", "recomputed_tokens_without_splice"} <= report["policies"][0].keys()


def test_compare_needs_a_policy(messages_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", messages_file]) == 2

    assert "got no policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"{", "not JSON", id="not JSON"),
        pytest.param(b'{"role": "user"}', "expected", id="one message"),
        pytest.param(None, "cannot read", id="no file"),
    ],
)
@pytest.mark.parametrize("command", [["explain", "none"], ["compare", "none"], ["plan", "--server=http://x", "none"]])
def test_what_is_no_conversation_is_refused(
    command: list[str], content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "messages.json"
    if content is not None:
        file.write_bytes(content)

    assert main([*command, str(file)]) == 2

    assert words in capsys.readouterr().err


def test_plan_needs_something_that_makes_ids(messages_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "none", messages_file]) == 2

    assert "--tokenizer PATH or --server URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("nowhere", "no such folder", id="nowhere"),
        # Loads transformers.
        pytest.param(".", "no tokenizer could be loaded", id="no tokenizer", marks=pytest.mark.slow),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused(
    path: str, words: str, messages_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "none", messages_file, "--tokenizer", str(tmp_path / path)]) == 2

    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_local_tokenizer_counts_exactly(
    model_dir: Path, messages_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--json", "keep_last_tool_outputs", messages_file, "--tokenizer", str(model_dir)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["plan", "keep_last_tool_outputs", messages_file, "--tokenizer", str(model_dir)]) == 0
    plan = json.loads(capsys.readouterr().out)

    last = report["turns"][-1]
    assert (report["exact"], report["counted"]) == (True, f"the tokenizer in {model_dir}")
    assert [plan[key] for key in ("kept_tokens", "moved_tokens", "recomputed_tokens")] == [
        last[key] for key in ("kept_tokens", "moved_tokens", "recomputed_tokens")
    ]
    assert all(directive["mode"] == "amortize" for directive in plan["directives"])


@pytest.mark.parametrize("argv", [[], ["plan", "none"], ["validate"], ["fly"], ["completion", "sh"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert "usage: leyline" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["explain", "FILE"], ["compare", "FILE", "none"], ["plan", "FILE", "none"]])
def test_a_recording_in_the_place_of_the_policy_is_told(
    argv: list[str], messages_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([messages_file if word == "FILE" else word for word in argv]) == 2

    assert f"{argv[0]}: {messages_file} is no policy; name one before the recording" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 1, "rules": [{"nam": "a"}]}', "did you mean 'name'?"),
        ('{"version": 1, "rules": 3}', "rules: got 3, expected a list"),
    ],
)
def test_a_policy_may_be_json_and_its_mistakes_are_told(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.json"
    file.write_text(text, encoding="utf-8")

    assert main(["explain", str(file)]) == 1
    assert words in capsys.readouterr().err


def test_a_proxy_may_be_told_the_context_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "share.yaml"
    file.write_text(
        'version: 1\nrules: [{name: r, select: {role: tool}, replace: "[x]", when: {context: 0.5}}]', encoding="utf-8"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        command = ["proxy", "--policy", str(file), "--upstream", "http://127.0.0.1:9", "--port", port]

        assert main(command) == 1
        assert "--context-window 128000" in capsys.readouterr().err
        # The policy is all right: what is left is the port.
        assert main([*command, "--context-window", "9000"]) == 2
        assert port in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-5", "128k"])
def test_a_context_window_is_a_whole_number_above_0(
    size: str, messages_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["explain", "none", messages_file, f"--context-window={size}"])

    assert caught.value.code == 2
    assert f"got '{size}', expected a whole number above 0" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert (caught.value.code, capsys.readouterr().out) == (0, f"leyline {version('leyline-agent')}\n")


@pytest.mark.parametrize(
    "argv", [["health", "localhost:30000"], ["release", "localhost"], ["plan", "none", "FILE", "--server", "localhost"]]
)
def test_a_url_without_its_scheme_is_told(
    argv: list[str], messages_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEYLINE_CONVERSATION", "x" * 32)

    assert main([messages_file if word == "FILE" else word for word in argv]) == 2

    assert "localhost" in (err := capsys.readouterr().err)
    assert "expected a URL such as http://127.0.0.1:30000" in err


def test_the_command_runs_as_a_module_and_survives_a_closed_pipe(messages_file: str) -> None:
    command = f"{sys.executable} -m leyline_agent.cli explain keep_last_tool_outputs {messages_file} | true"
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
        if self.path == "/tokenize" and self.replies["status"] == 200:
            self.replies["body"] = json.dumps({"tokens": WordTokenizer().render(**self.bodies_seen[-1])}).encode()
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
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_health_takes_a_clients_base_url(end: str, server: str) -> None:
    _Server.replies.update(body=b'{"supported": true}')

    assert main(["health", server + end]) == 0
    assert _Server.seen == [("/leyline/capabilities", None)]


def test_health_says_what_a_server_installed(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"supported": True, "version": "0.1.0", "sglang": "0.5.23", "installed": ["the note"], "conversations": 3}
    _Server.replies.update(body=json.dumps(body).encode())

    assert main(["health", f"{server}/"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        *("can splice: yes", "plugin: 0.1.0", "SGLang: 0.5.23", "installed: the note", "conversations: 3"),
    ]
    assert _Server.seen == [("/leyline/capabilities", None)]


def test_health_says_what_a_server_refuses_and_why(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"supported": False, "enabled": True, "unsupported": ["page size 16", "LoRA"]}
    _Server.replies.update(body=json.dumps(body).encode())

    assert main(["health", server]) == 1

    out = capsys.readouterr().out
    assert "can splice: no" in out
    assert [line for line in out.splitlines() if line.startswith("refuses")] == [
        "refuses all splices, since: page size 16",
        "refuses all splices, since: LoRA",
    ]


def test_health_prints_json(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--json", server]) == 0

    assert json.loads(capsys.readouterr().out) == {"supported": True, "plugin": "0.1.0"}


def test_a_server_counts_exactly(
    server: str, messages_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEYLINE_API_KEY", "key")

    assert main(["explain", "none", messages_file, "--json", "--server", server]) == 0

    report = json.loads(capsys.readouterr().out)
    words = len(WordTokenizer().render(_MESSAGES[:1]))
    assert (report["counted"], report["exact"]) == (f"the server {server}", True)
    assert report["turns"][0]["tokens_after"] == words
    assert set(_Server.seen) == {("/tokenize", "Bearer key")}


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:port", "nowhere"])
def test_counting_tells_an_unreachable_server_apart(
    url: str, messages_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "none", messages_file, "--server", url, "--timeout", "2"]) == 2

    assert capsys.readouterr().err.startswith("leyline: ")


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
_EXPLICIT = {**_EDIT, "edit_id": "e2", "turn": None}
_STATE = {
    "conversation_hash": "0" * 32,
    "own_tokens": 53,
    "turns": [{"turn": "t2", **_TURN}],
    "explicit_edits": [_EXPLICIT],
}
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
        "by explicit splices",
        "e2 at 3: 9 -> 2 tokens",
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")

    assert main(["completion", shell]) == 0

    script = capsys.readouterr().out
    assert all(word in script for word in ("explain", "directives", "keep_last_tool_outputs"))


def test_bash_completes_commands_and_policies() -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    script = subprocess.run(
        [sys.executable, "-m", "leyline_agent.cli", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    asked = 'complete_() { COMP_WORDS=(leyline "$@") COMP_CWORD=$#; _shtab_leyline; echo "${COMPREPLY[@]}"; }'
    ends = "complete_ comp\ncomplete_ explain keep_l\n"
    done = subprocess.run([bash], input=f"{script}\n{asked}\n{ends}", capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["compare completion", "keep_last_tool_outputs"]


def test_completion_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert main(["completion", "bash"]) == 2

    assert "pip install '/path/to/leyline[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_documents_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    assert "exit codes: 0 good; 1 not good" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_docs_have_each_command(command: str) -> None:
    assert f"## leyline {command}" in (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
