"""What rows of results have in common: percentiles, and what they name of the machine and the versions."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest of the values that `percent` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def about(git: str | None, command: str) -> dict[str, Any]:
    """Return GPU, driver, versions, commit (of the working tree where `git` is None) and the command line."""
    return {
        "gpu": _first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        **{package: _version(package) for package in ("torch", "triton", "sglang")},
        "python": platform.python_version(),
        "git": git or _first_line("git", "describe", "--always", "--dirty"),
        "command": command,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
