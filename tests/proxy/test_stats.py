from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from leyline_agent.cli import main
from leyline_agent.core.protocol import Outcome, Reason, Status, outcome_header
from tests.proxy.scripted import Received, Reply, ScriptedUpstream, agent_messages, answer_of, stats_of

Ask = Callable[..., httpx.Response]


def _refused(received: Received) -> Reply:
    reply = answer_of(received)
    outcome = Outcome(status=Status.REFUSED, reason=Reason.POOL_FULL, message="no slots")
    reply.headers = [("x-leyline", outcome_header(outcome)), ("content-type", "application/json")]
    return reply


def test_stats_count_what_was_kept_moved_and_recomputed(ask: Ask, upstream: ScriptedUpstream, proxy: str) -> None:
    for turn in (3, 4):
        ask(agent_messages(turn, "a"))
    ask(agent_messages(1, "b"), headers={"x-leyline-conversation": "b"})
    upstream.script = _refused
    ask(agent_messages(5, "a"))

    stats = stats_of(proxy)
    counts = {
        "turns": 3,
        "splices": 1,
        "prompt_tokens": 300,
        "cached_tokens": 240,
        "kept_tokens": 7,
        "moved_tokens": 30,
        "recomputed_tokens": 60,
        "prefilled_tokens": 0,
        "fallbacks": {"pool_full": 1},
    }
    first, second = stats["conversations"]
    assert {name: first[name] for name in counts} == counts
    assert (first["by"], first["hit_rate"], second["by"], second["turns"]) == ("prefix", 0.8, "header", 1)
    assert (stats["totals"]["turns"], stats["totals"]["fallbacks"]) == (4, {"pool_full": 1})
    assert (stats["requests"], stats["notes"], stats["policy"]) == (4, "answered", "of the test")
    assert len({one["conversation"] for one in stats["conversations"]}) == 2
    assert not [note for note in upstream.notes if note and note["conversation"] in json.dumps(stats)]


def test_totals_keep_what_is_forgotten(start_proxy: Callable[..., str], ask: Ask) -> None:
    proxy = start_proxy(max_conversations=2)
    for salt in "abcd":
        ask(agent_messages(1, salt), to=proxy)

    stats = stats_of(proxy)
    assert (len(stats["conversations"]), stats["forgotten_conversations"], stats["totals"]["turns"]) == (2, 2, 4)


def test_a_reason_is_logged_once_a_proxy(
    ask: Ask, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.script = _refused
    for salt in "abc":
        ask(agent_messages(1, salt))

    assert len([record for record in caplog.records if "pool_full: no slots" in record.message]) == 1


def test_stats_need_their_key_where_there_is_one(
    start_proxy: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = start_proxy(stats_key="the key")
    monkeypatch.delenv("LEYLINE_API_KEY", raising=False)

    assert main(["stats", proxy]) == 1
    assert "LEYLINE_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("LEYLINE_API_KEY", "the key")
    assert main(["stats", proxy]) == 0


def test_stats_are_off_where_strangers_may_ask(start_proxy: Callable[..., str], ask: Ask) -> None:
    # 0.0.0.0 is reached by loopback too.
    proxy = start_proxy(host="0.0.0.0").replace("0.0.0.0", "127.0.0.1")

    answer = httpx.get(f"{proxy}/leyline/proxy/stats", trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "stats_off")
    assert ask(agent_messages(1), to=proxy).status_code == 200


def test_the_command_prints_a_table(
    ask: Ask, proxy: str, upstream: ScriptedUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    for turn in (3, 4):
        ask(agent_messages(turn, "a"))
    ask([{"role": 7}])
    for salt in map(str, range(25)):
        ask(agent_messages(1, salt))

    assert main(["stats", proxy + "/v1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["stats", proxy, "--all"]) == 0
    lines_of_all = capsys.readouterr().out.splitlines()

    assert lines[0] == f"policy of the test, upstream {upstream.url}, notes: answered"
    assert lines[1].split() == ["conversation", "turns", "splices", "kept", "moved", "recomputed", "hit", "fallbacks"]
    assert lines[22] == "… and 6 more, see --all"
    assert lines[23].split() == ["all", "27", "1", "7", "30", "540"]
    assert "went without a note" not in "".join(lines)
    assert lines[24] == "went through unedited: 1 (unreadable_messages)"
    assert len(lines_of_all) == 30
    assert lines_of_all[27].split()[1:] == ["2", "1", "7", "30", "40", "80.0%"]
    assert max(map(len, lines_of_all[1:])) <= 100


def test_the_command_prints_json(ask: Ask, proxy: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask(agent_messages(1))

    assert main(["stats", proxy, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["turns"] == 1


def test_stats_tell_what_is_no_proxy_apart(upstream: ScriptedUpstream, capsys: pytest.CaptureFixture[str]) -> None:
    upstream.script = lambda received: Reply(404, [], [b"<html>"])

    assert main(["stats", upstream.url]) == 1
    assert "is it one?" in capsys.readouterr().err
    assert main(["stats", "http://127.0.0.1:9", "--timeout", "2"]) == 2
    assert "is the proxy up?" in capsys.readouterr().err
    assert main(["stats", "127.0.0.1:9"]) == 2
    assert "127.0.0.1:9: expected a URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["--policy", "absent"], 1, "no such file", id="no policy"),
        pytest.param(["--upstream", "nowhere"], 2, "expected a URL", id="no URL"),
        pytest.param(["--upstream", "http://u:pw@127.0.0.1:9"], 2, "without a user, a password", id="a password"),
        pytest.param(["--upstream", "http://"], 2, "expected a host", id="no host"),
        pytest.param(["--upstream", "http://127.0.0.1:99999"], 2, "expected a host", id="no port of any host"),
        pytest.param(
            ["--upstream", "http://127.0.0.1:9/v1/chat/completions"], 2, "expected the server's root", id="a route"
        ),
        pytest.param(["--port", "99999"], 2, "port: got 99999, expected 0 to 65535", id="no port"),
        pytest.param(["--host", "192.0.2.1"], 2, "cannot listen on 192.0.2.1", id="no address of ours"),
        pytest.param(["--key-file", "/absent"], 2, "--key-file /absent: cannot read it", id="no key file"),
        pytest.param(["--timeout", "0"], 2, "timeout_s: got 0.0", id="no time"),
        pytest.param(["--max-conversations", "0"], 2, "max_conversations: got 0", id="no room"),
    ],
)
def test_the_proxy_does_not_start_with_bad_options(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--policy", "none", "--upstream", "http://127.0.0.1:9", "--port", "0", *arguments]

    assert main(["proxy", *given]) == code
    err = capsys.readouterr().err
    assert words in err
    assert "u:pw" not in err


def test_a_short_key_is_refused_and_not_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("short-key\n")

    given = ["--policy", "none", "--upstream", "http://127.0.0.1:9", "--port", "0", "--key-file", str(file)]
    assert main(["proxy", *given]) == 2

    err = capsys.readouterr().err
    assert "expected 16 random ones or more" in err
    assert "short-key" not in err


def test_the_command_serves_until_it_is_interrupted(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"a key of the tests, not a secret")
    command = [sys.executable, "-m", "leyline_agent.cli", "proxy", "--policy", "keep_last_tool_outputs", "--gate=off"]
    command += ["--template-changes=reprefill"]
    command += ["--upstream", upstream.url + "/v1", "--port", "0", "--key-file", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        proxy = line.split()[2]
        assert line == f"leyline proxy: {proxy} -> {upstream.url}/v1\n"
        for num_turns in (3, 4):
            body = {"messages": agent_messages(num_turns)}
            answer = httpx.post(f"{proxy}/chat/completions", json=body, trust_env=False, timeout=30)
        process.send_signal(2)
        _, err = process.communicate(timeout=20)

    assert answer.status_code == 200
    assert (process.returncode, err) == (0, "")
    assert [received.path for received in upstream.received] == ["/v1/chat/completions"] * 2
    assert upstream.last.note is not None
    assert (upstream.last.note["gate"], upstream.last.note["template_changes"]) == ("off", "reprefill")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("leyline_agent.proxy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)

    assert main(["proxy", "--policy", "none", "--upstream", "http://127.0.0.1:9"]) == 2
    assert "pip install '/path/to/leyline[proxy]'" in capsys.readouterr().err
