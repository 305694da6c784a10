"""Follow a chain of files to a code: each file names the next one, the last has the code.

Where the agent is in the chain stands in the last output alone, so older ones can be dropped. Files off the chain have
codes too: who reads any file and submits what it says is wrong.
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Mapping
from typing import Any

from evals.mini_tasks.mini_task import World
from evals.mini_tasks.noise import make_code, make_names, make_notes
from evals.mini_tasks.tools import Parameter, Tool, show

_NUM_FILES = {"short": (3, 3), "medium": (8, 10), "long": (16, 20)}
_NUM_NOTES = {"short": (1, 2), "medium": (8, 10), "long": (16, 20)}


class FileChain(World):
    """Files in memory, half of them in the chain."""

    tools = (
        Tool("list_files", "List all files.", {}),
        Tool("read_file", "Read a file.", {"path": Parameter("string", "its path")}),
    )

    def __init__(self, rng: random.Random, length: str) -> None:
        num_files = rng.randint(*_NUM_FILES[length])
        paths = [f"notes/{name}.txt" for name in make_names(rng, 2 * num_files)]
        chain, others = paths[:num_files], paths[num_files:]
        self.answer = make_code(rng)
        self._files = {
            path: _text(rng, length, line)
            for branch, code in ((chain, self.answer), (others, make_code(rng)))
            for path, line in zip(branch, [*(f"next: {path}" for path in branch[1:]), f"code: {code}"], strict=True)
        }
        self.prompt = (
            f"Start with the file {chain[0]}. In each file a line that begins with `next:` names the file to read "
            "next, until one has a line that begins with `code:`. Submit that code. Other files are not in this chain."
        )
        self.reads = tuple(("read_file", {"path": path}) for path in chain)

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """List the files, or read one."""
        if name == "list_files":
            return "\n".join(sorted(self._files))
        path = posixpath.normpath(arguments["path"].strip()).lstrip("/")
        return self._files.get(path) or f"There is no file {show(arguments['path'])}. list_files lists all files."


def _text(rng: random.Random, length: str, line: str) -> str:
    lines = make_notes(rng, rng.randint(*_NUM_NOTES[length]))
    lines.insert(rng.randrange(len(lines) + 1), line)
    return "\n".join(lines)
