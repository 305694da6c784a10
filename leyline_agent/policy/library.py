"""The policies that come with the package, and what their headers say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

_HEADER = re.compile(r"#\s*(When|Cost|Risk):\s*(.*)")


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A shipped policy."""

    name: str
    path: Path
    when: str
    """When to use it."""
    cost: str
    risk: str
    description: str
    """What it does, in a line."""


def shipped_policies() -> tuple[str, ...]:
    """Names of the policies that come with the package."""
    return tuple(sorted(path.stem for path in shipped_folder().glob("*.yaml")))


def policy_library() -> tuple[LibraryEntry, ...]:
    """Return the policies that come with the package, by name."""
    return tuple(_entry(shipped_folder() / f"{name}.yaml") for name in shipped_policies())


def shipped_folder() -> Path:
    """`policies/`: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "policies"
    return installed if installed.is_dir() else package.parent / "policies"


def _entry(path: Path) -> LibraryEntry:
    text = path.read_text(encoding="utf-8")
    header = {"When": "", "Cost": "", "Risk": ""}
    part = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        found = _HEADER.match(line)
        if found:
            part = found[1]
            header[part] = found[2].strip()
        elif part:
            header[part] += " " + line.lstrip("# ").strip()
    description = yaml.safe_load(text).get("description") or ""
    return LibraryEntry(path.stem, path, header["When"], header["Cost"], header["Risk"], " ".join(description.split()))
