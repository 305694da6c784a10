"""Fork servers off a process that has imported SGLang: all but the first are ready in 3 s instead of 10.

For tests. Knows that SGLang's modules can be imported before its plugins are loaded: it patches what they name wherever
it was imported to. Knows nothing of its command line.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, process
from pathlib import Path
from unittest.mock import patch

_PRELOADED = [
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
]
_READ_WHEN_USED = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"}


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether a server with these variables, beside the usual ones, is the same however it was started.

    SGLang reads some of its variables while it is imported.
    """
    return not any(name.startswith("SGLANG_") for name in env.keys() - _READ_WHEN_USED)


class ForkedServer:
    """A process of `sglang.launch_server` that leads a group of its own. As much of `subprocess.Popen` as is needed."""

    def __init__(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], imported_with: Mapping[str, str], log: Path
    ) -> None:
        """Start it.

        Args:
            arguments: of its command line.
            environment: all its variables.
            imported_with: those that the process which imports SGLang has on top of this one's, if it is to be started.
            log: the file that its output is added to.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        with patch.dict(os.environ, imported_with):
            forkserver.ensure_running()
        self._process = context.Process(target=_serve, args=(list(arguments), dict(environment), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process has not ended within so many seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("sglang.launch_server", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Signal to it, unless it has ended."""
        # Killed from outside, it can be gone before its exit code is here.
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)


def _end_with(sentinel: int) -> None:
    """Kill this server as the process ends that wanted it."""
    connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def _serve(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Become the first process of a server."""
    os.setsid()
    for number, file in enumerate((os.devnull, log, log)):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
    sys.stdin = os.fdopen(0)
    wanted_by = multiprocessing.parent_process()
    assert wanted_by is not None
    threading.Thread(target=_end_with, args=(wanted_by.sentinel,), daemon=True).start()
    # By these SGLang's first process knows that it is the first.
    process.current_process()._parent_pid = None  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[:] = ["sglang.launch_server", *arguments]
    # SGLang asks for processes that are spawned.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
