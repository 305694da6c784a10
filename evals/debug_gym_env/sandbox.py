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


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How to start a command in `folder`."""

    folder: Path
    """The only one that commands can write to, beside `temporary`."""
    temporary: Path
    """Stands for /tmp in the sandbox."""
    is_isolated: bool
    """Whether bubblewrap is used."""
    network: bool = False

    def prefix(self) -> list[str]:
        """Return what stands before a command's own words."""
        if not self.is_isolated:
            return []
        # The system to read; of home folders, which hold keys, the Python that runs this alone.
        readable = [str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix)]
        binds = [part for path in readable for part in ("--ro-bind", path, path)]
        homes = [part for path in _homes() for part in ("--tmpfs", path)]
        return [
            *("bwrap", "--die-with-parent", "--unshare-all", "--new-session"),
            *(["--share-net"] if self.network else []),
            *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
            *homes,
            *("--bind", str(self.temporary), "/tmp"),
            *binds,
            *("--bind", str(self.folder), str(self.folder), "--chdir", str(self.folder)),
        ]

    def run(self, command: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
        """Return exit code and output, errors last; the code is None where the time was up.

        Everything that the command started ends with it.
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


def _homes() -> list[str]:
    return [path for path in ("/root", "/home", "/run/user") if Path(path).is_dir()]
