"""Start and stop a real SGLang server on this machine, on its CPU unless told otherwise.

For tests, replays, runs and `make serve`. Knows SGLang's command line and its CPU switches; knows nothing of notes or
splices. Run as `python -m evals.serving`, it serves the test model until interrupted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import httpx

from evals.forked_server import ForkedServer, can_fork
from evals.models.random_mla import ensure_model
from leyline_agent.errors import LeylineError

SERVED_MODEL_NAME = "leyline"
"""What chat requests call the model."""

POOL_TOKENS = 131_072
"""Slots of the KV pool: two prompts of the test model's greatest length."""

_STOP_GRACE_S = 5.0
# Until killed processes are gone; longer only where nobody collects them once their parent is gone.
_KILL_GRACE_S = 2.0
_LOG_TAIL_LINES = 40

# SGLang's schedulers die with the process that started them; this makes that process die with ours, however ours ends.
# In the child, since code between fork and exec must not run in a program with threads. 1 is PR_SET_PDEATHSIG.
_LAUNCH = """
import ctypes, multiprocessing, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the process that wanted this server has gone")
if sys.argv.pop(1) == "fork":
    multiprocessing.set_start_method = lambda method, force=False: None
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # The model lies in a folder; nothing is to be looked up elsewhere.
    "HF_HUB_OFFLINE": "1",
    # Compiling costs more than it saves on small CPU tensors, and makes the time of a token erratic.
    "TORCHDYNAMO_DISABLE": "1",
    # More threads spin while they wait for each other: faster on an idle machine, ten times slower on a busy one.
    "OMP_NUM_THREADS": "1",
    # Otherwise /health takes a second each time, to generate a token. The server generates some before it says yes.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}


class ServerFailedError(LeylineError):
    """The server did not become ready, or ended by itself; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has generated tokens."""

    url: str
    """Without `/v1`."""
    pid: int
    """Of its first process, which is also the id of its process group."""
    log_path: Path
    _process: subprocess.Popen[bytes] | ForkedServer = field(repr=False)

    def assert_alive(self) -> None:
        """Raise `AssertionError`, with the tail of the log, if the server has ended."""
        code = self._process.poll()
        assert code is None, f"the server at {self.url} ended with code {code}\n{_log_tail(self.log_path)}"

    def wait(self) -> NoReturn:
        """Block for as long as the server lives.

        Raises:
            ServerFailedError: it ended by itself.
        """
        code = self._process.wait()
        raise ServerFailedError(f"the server ended with code {code}\n{_log_tail(self.log_path)}")


@contextmanager
def serve(
    model_dir: Path | str,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    port: int | None = None,
    plugin: bool = True,
    env: Mapping[str, str] | None = None,
    extra_args: Sequence[str] = (),
    api_key: str | None = None,
    admin_api_key: str | None = None,
    fork: bool = False,
    log_path: Path | None = None,
    ready_timeout_s: float = 180,
) -> Iterator[RunningServer]:
    """Serve a model on loopback, for as long as the context lasts.

    The whole process group is gone afterwards, whatever happened; were this process killed, the server ends too.

    Args:
        model_dir: a folder with configuration, tokenizer and weights, or for a GPU any name that SGLang can load.
        device: on `cuda` SGLang chooses what the CPU is told: backend, dtype, size of the pool, parsers.
        port: by default a free one.
        plugin: False leaves out all SGLang plugins but the CPU's own: the server as published.
        env: variables on top of this process's and ours.
        extra_args: more of `sglang.launch_server`'s arguments; they win over ours.
        api_key: what the server asks of its clients; by default nothing.
        admin_api_key: what it asks of its operators.
        fork: fork SGLang's processes, instead of spawning them as SGLang does, since importing it takes eight seconds a
            process: off one that has imported it, or, where variables in `env` change what is imported, off the
            server's first one. On a CPU only.
        log_path: where the server's output goes; by default a temporary file, removed if all goes well.
        ready_timeout_s: how long the server may take until it answers.

    Raises:
        ServerFailedError: it ended or timed out before it answered.
    """
    port = free_port() if port is None else port
    url = f"http://127.0.0.1:{port}"
    keep_log = log_path is not None
    if log_path is None:
        handle, name = tempfile.mkstemp(prefix="leyline-server-", suffix=".log")
        os.close(handle)
        log_path = Path(name)
    arguments = _arguments(model_dir, port, device, [*extra_args, *_key_args(api_key, admin_api_key)])
    environment = _environment(plugin, device, env or {})
    fork = fork and device == "cpu"
    with log_path.open("wb") as log:
        process: subprocess.Popen[bytes] | ForkedServer
        if fork and can_fork(env or {}):
            process = ForkedServer(arguments, environment=environment, imported_with=_ENVIRONMENT, log=log_path)
        else:
            process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), "fork" if fork else "spawn", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    try:
        _wait_until_ready(process, url, log_path, ready_timeout_s, admin_api_key or api_key)
        yield RunningServer(url, process.pid, log_path, process)
    finally:
        _stop(process)
    if not keep_log:
        log_path.unlink(missing_ok=True)


def _arguments(model_dir: Path | str, port: int, device: str, extra_args: Sequence[str]) -> list[str]:
    options = {"--model-path": str(model_dir), "--host": "127.0.0.1", "--port": str(port)}
    flags = ["--enable-cache-report", "--enable-metrics"]
    if device == "cpu":
        options |= {
            "--served-model-name": SERVED_MODEL_NAME,
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--dtype": "float32",
            "--max-total-tokens": str(POOL_TOKENS),
            # The form in which the test model's chat template writes calls.
            "--tool-call-parser": "qwen",
        }
        # An idle scheduler spins on a core otherwise, and the tests keep two servers on two cores.
        flags.append("--sleep-on-idle")
    pairs = [part for option in options.items() for part in option]
    return [*pairs, *flags, *extra_args]


def _key_args(api_key: str | None, admin_api_key: str | None) -> list[str]:
    keys = {"--api-key": api_key, "--admin-api-key": admin_api_key}
    return [part for option, key in keys.items() if key for part in (option, key)]


def _environment(plugin: bool, device: str, env: Mapping[str, str]) -> dict[str, str]:
    environment = {**os.environ, **_ENVIRONMENT} if device == "cpu" else dict(os.environ)
    if device != "cpu":
        environment.pop("SGLANG_USE_CPU_ENGINE", None)
    environment.pop("SGLANG_PLUGINS", None)
    if not plugin:
        environment["SGLANG_PLUGINS"] = "leyline_cpu"
    return {**environment, **env}


def free_port() -> int:
    """Return a loopback port that nobody has now."""
    while True:
        # Below those that systems give to outgoing connections, one of which would have it before the server does.
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_until_ready(
    process: subprocess.Popen[bytes] | ForkedServer, url: str, log_path: Path, timeout_s: float, api_key: str | None
) -> None:
    """Return once the server has generated its first tokens, and leave its cache empty."""
    deadline = time.monotonic() + timeout_s
    # Without the environment's proxies: this is loopback.
    headers = {"authorization": f"Bearer {api_key}"} if api_key else None
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, headers=headers) as http:
        while True:
            if process.poll() is not None:
                raise ServerFailedError(
                    f"the server ended with code {process.returncode} before it was ready\n{_log_tail(log_path)}"
                )
            with suppress(httpx.TransportError):
                if http.get("/health").is_success and http.post("/flush_cache").is_success:
                    return
            if b"address already in use" in log_path.read_bytes():
                # It goes on without serving anybody.
                raise ServerFailedError(f"the port of {url} was taken before the server had it; start it again")
            if time.monotonic() > deadline:
                raise ServerFailedError(f"no answer from {url} within {timeout_s:.0f} s\n{_log_tail(log_path)}")
            time.sleep(0.1)


def _log_tail(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join([f"the last lines of {log_path}:", *lines])


def _stop(process: subprocess.Popen[bytes] | ForkedServer) -> None:
    """End the process group: ask, wait, then kill whatever is left of it."""
    # As Ctrl-C does. SGLang looks for SIGTERM only every five seconds.
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_GRACE_S)
    # Not only after a timeout: the first process may end before its children do.
    deadline = time.monotonic() + _KILL_GRACE_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)


def main(arguments: list[str] | None = None) -> int:
    """Serve a model with the Leyline plugin, by default the generated test model, until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m evals.serving", description=main.__doc__)
    parser.add_argument("--model", type=Path, help="a folder with a model; by default the test model is generated")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--no-plugin", action="store_true", help="serve without Leyline, as published")
    parser.add_argument("--log", type=Path, help="where the server's log goes; default: build/server-PORT.log")
    options, extra_args = parser.parse_known_args(arguments)

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        model_dir = options.model or ensure_model()
        log_path = options.log or Path("build", f"server-{options.port}.log")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        print(f"starting SGLang on {model_dir} (about 15 s) …", flush=True)
        with serve(
            model_dir, port=options.port, plugin=not options.no_plugin, extra_args=extra_args, log_path=log_path
        ) as server:
            print(
                f"ready: {server.url}/v1, model {SERVED_MODEL_NAME!r}, log {server.log_path}\nstop it with Ctrl-C",
                flush=True,
            )
            server.wait()
        return 0
    except ServerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
