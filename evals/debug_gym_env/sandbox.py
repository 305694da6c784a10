"""Where an agent's commands run: a folder of their own, limits of time and size, and bubblewrap where it works.

The standard library alone, on Python 3.11 and 3.12: the harness asks it, and debug-gym's environment uses it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_MAX_FILE_BYTES = 64 << 20
"""Of any file that a command writes, its output included."""
_MAX_OUTPUT_CHARS = 200_000
"""What is kept of an output: beyond any prompt, yet no danger to memory."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/nix/store", "/gnu/store")
_RESOLVER = "/run/systemd/resolve"
"""Where /etc/resolv.conf points to on many machines."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How to start a command in `folder`."""

    folder: Path
    """The only one that commands can write to, beside `temporary`. In the sandbox little else can be read."""
    temporary: Path
    """Stands for /tmp in the sandbox."""
    is_isolated: bool
    """Whether bubblewrap is used."""
    network: bool = False

    def prefix(self) -> list[str]:
        """Return what stands before a command's own words."""
        if not self.is_isolated:
            return []
        return [
            *("bwrap", "--die-with-parent", "--unshare-all", "--new-session"),
            *(["--share-net", "--ro-bind-try", _RESOLVER, _RESOLVER] if self.network else []),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--bind", str(self.temporary), "/tmp"),
            *_readable(),
            *("--bind", str(self.folder), str(self.folder), "--remount-ro", "/", "--chdir", str(self.folder)),
        ]

    def run(self, command: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
        """Return exit code and output, errors last; the code is None where the time was up.

        Everything that the command started ends with it; outside bubblewrap, as far as it stayed in its session.
        """
        limited = ["/bin/bash", "-c", f'ulimit -f {_MAX_FILE_BYTES >> 10}; exec "$@"', "bash", *command]
        # To files: a command that prints without end must not fill the memory, nor one that lives on hold the pipe.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                [*self.prefix(), *limited],
                cwd=self.folder,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            code: int | None
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read(4 * _MAX_OUTPUT_CHARS).decode("utf-8", errors="replace"))
        output = "".join(texts)
        if len(output) > _MAX_OUTPUT_CHARS:
            output = f"{output[:_MAX_OUTPUT_CHARS]}\n[cut after {_MAX_OUTPUT_CHARS} characters]"
        return code, output


@cache
def isolation_works() -> bool:
    """Tell whether bubblewrap is installed and may make the namespaces that it needs here."""
    if shutil.which("bwrap") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder), Path(folder), is_isolated=True)
        done = subprocess.run([*sandbox.prefix(), "/bin/true"], capture_output=True, timeout=30, check=False)
        return done.returncode == 0


@cache
def _readable() -> tuple[str, ...]:
    """Return bubblewrap's options for what commands can read: the system, and the Python that runs this.

    No more: home folders hold keys, this project the scripts that solve the tasks, and other runs their solutions.
    """
    options: list[str] = []
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    # A virtual environment's `python` may be a link to a link, and the environment may be named through one.
    pythons, link = [Path(sys.prefix), Path(sys.base_prefix)], Path(sys.executable)
    while link.is_symlink():
        link = link.parent / link.readlink()
        pythons.append(link.parent)
    for path in dict.fromkeys([*pythons, *(path.resolve() for path in pythons)]):
        options += ["--ro-bind", str(path), str(path)]
    return tuple(options)
