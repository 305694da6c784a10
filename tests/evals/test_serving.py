"""Servers start, say why they do not, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from evals.serving import SERVED_MODEL_NAME, RunningServer, ServerFailedError, free_port, serve

pytestmark = pytest.mark.sglang


def _alive_in_group(group: int) -> list[str]:
    """Return the command lines of the group's processes that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                found.append((stat.parent / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _variables(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def _wait_until_empty(group: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _alive_in_group(group):
        assert time.monotonic() < deadline, _alive_in_group(group)
        time.sleep(0.1)


def _chat(server: RunningServer, **body: object) -> httpx.Response:
    messages = [{"role": "user", "content": "List the files."}]
    request = {"model": SERVED_MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 4, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=request, timeout=60, trust_env=False)


def test_a_chat_request_with_tools_is_answered_and_the_same_one_comes_from_the_cache(
    unpatched_server: RunningServer,
) -> None:
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}]
    first, second = (_chat(unpatched_server, tools=tools) for _ in range(2))
    assert first.status_code == second.status_code == 200
    assert first.json()["choices"] == second.json()["choices"]
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_the_unpatched_server_has_no_plugin_and_room_for_two_long_prompts(unpatched_server: RunningServer) -> None:
    with httpx.Client(base_url=unpatched_server.url, trust_env=False) as http:
        assert http.get("/leyline/capabilities").status_code == 404
        facts = http.get("/server_info").json()
        assert facts["max_total_num_tokens"] >= 131_072
        assert http.get("/model_info").json()["served_model_name"] == SERVED_MODEL_NAME
        assert "sglang:prompt_tokens_total" in http.get("/metrics").text


def test_a_cached_prefix_is_not_computed_again(unpatched_server: RunningServer) -> None:
    def prefill_s(ids: list[int]) -> float:
        start = time.perf_counter()
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        httpx.post(f"{unpatched_server.url}/generate", json=body, timeout=120, trust_env=False).raise_for_status()
        return time.perf_counter() - start

    ids = [10 + idx % 4000 for idx in range(12_000)]
    # A hundredfold in fact; SGLang's own attention takes as long for both.
    assert prefill_s(ids) > 5 * prefill_s(ids)


def test_make_serve_says_where_and_ends_cleanly(model_dir: Path, tmp_path: Path) -> None:
    """The one server here whose processes are all spawned, as SGLang spawns them, and that has the plugin."""
    arguments = ["-m", "evals.serving", "--model", str(model_dir), "--port", str(free_port())]
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        lines = [caller.stdout.readline() for _ in range(3)]
        url = lines[1].split()[1].removesuffix(",")
        assert httpx.get(f"{url}/models", trust_env=False).json()["data"][0]["id"] == SERVED_MODEL_NAME
        found = httpx.get(f"{url.removesuffix('/v1')}/leyline/capabilities", trust_env=False).json()
        assert (found["supported"], found["unsupported"]) == (True, [])
        assert "generate_request" in found["installed"]
        (server,) = _children(caller.pid)
        assert len(_alive_in_group(server)) >= 3
        caller.terminate()
        assert caller.stdout.read() == "stopped\n"
    assert caller.returncode == 0
    assert _alive_in_group(server) == []


def test_no_process_is_left_when_the_caller_is_killed(model_dir: Path, tmp_path: Path) -> None:
    arguments = ["-m", "evals.serving", "--no-plugin", "--model", str(model_dir), "--log", str(tmp_path / "log")]
    with subprocess.Popen([sys.executable, *arguments, "--port", str(free_port())]) as caller:
        deadline = time.monotonic() + 60
        # SGLang loads the plugins that are named there, and no others.
        while not (
            servers := [pid for pid in _children(caller.pid) if b"SGLANG_PLUGINS=leyline_cpu\0" in _variables(pid)]
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(caller.pid, signal.SIGKILL)
    # Long before the server would have noticed by itself: it is still importing.
    _wait_until_empty(servers[0], timeout_s=5)


_FORKS = """
import os, pathlib, sys, time
from evals import forked_server
# Not waited for: importing is what the server is killed at here, too.
forked_server._PRELOADED.clear()
log = pathlib.Path(sys.argv[1])
log.touch()
print(forked_server.ForkedServer([], environment=os.environ, imported_with={}, log=log).pid, flush=True)
time.sleep(60)
"""


def test_no_forked_process_is_left_when_the_caller_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FORKS, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as caller:
        assert caller.stdout is not None
        server = int(caller.stdout.readline())
        deadline = time.monotonic() + 60
        while not _alive_in_group(server):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(caller.pid, signal.SIGKILL)
    _wait_until_empty(server, timeout_s=5)
    # Nor the process that forks: it is in the caller's group.
    _wait_until_empty(caller.pid, timeout_s=5)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ServerFailedError, match=r"(?s)ended with code .* before it was ready.*nonsense"), serve(model):
        pass


def test_a_dead_server_is_noticed_and_nothing_of_it_left(model_dir: Path, tmp_path: Path) -> None:
    with serve(model_dir, plugin=False, log_path=tmp_path / "log", fork=True) as server:
        server.assert_alive()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerFailedError, match="ended with code -9"):
            server.wait()
        with pytest.raises(AssertionError, match="ended with code -9"):
            server.assert_alive()
    assert _alive_in_group(server.pid) == []
