"""Record the demo's trajectory: `python -m evals.replay.record [FILE]`, or `make record`.

Copies `broken_package` to a scratch folder, carries out `debugging_session.STEPS` there with real tools, each in a
process of its own with a time limit, and writes the messages with the outputs as they came. Nothing is changed in
the package itself. Two recordings differ in what the tools print of the machine: times, versions.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evals.replay.debugging_session import LAST_WORD, STEPS, SYSTEM, TASK, Step

BROKEN_PACKAGE = Path(__file__).with_name("broken_package")
DEMO_TRAJECTORY = Path(__file__).with_name("demo_trajectory.json")
TOOL_TIMEOUT_S = 30.0


def _tool_schema(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: list[dict[str, Any]] = [
    _tool_schema("pytest", "Run the tests quietly.", arguments="more command line arguments, or an empty string"),
    _tool_schema("cat", "Show a file with line numbers.", path="path of the file, relative to the project"),
    _tool_schema(
        "grep",
        "Search lines by an extended regular expression.",
        pattern="the expression",
        paths="files to search, separated by blanks; * is expanded",
    ),
    _tool_schema(
        "edit",
        "Replace a text that occurs exactly once.",
        path="the file",
        old="the text to replace",
        new="the new text",
    ),
    _tool_schema("python", "Run Python code in the project's folder.", code="the code"),
]


class Workbench:
    """The tools, on a copy of the broken package in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "stockroom"
        self._temporary = folder / "tmp"
        shutil.copytree(BROKEN_PACKAGE, self.project, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, tool: str, arguments: Mapping[str, str]) -> str:
        """Return what the tool printed, and its exit code where that is not 0."""
        tools: dict[str, Callable[..., str]] = {
            "pytest": self._pytest,
            "cat": self._cat,
            "grep": self._grep,
            "edit": self._edit,
            "python": self._python,
        }
        return tools[tool](**arguments)

    def _process(self, *command: str) -> str:
        # Nothing else of ours: pytest, for one, prints other summaries where it sees `CI`.
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "COLUMNS": "100",
            "LC_ALL": "C.UTF-8",
            "NO_COLOR": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        try:
            done = subprocess.run(
                command,
                cwd=self.project,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=TOOL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"[stopped after {TOOL_TIMEOUT_S:.0f} s]"
        return done.stdout if done.returncode == 0 else f"{done.stdout}[exit code {done.returncode}]"

    def _pytest(self, arguments: str) -> str:
        fixed = ("-q", "-p", "no:cacheprovider", f"--basetemp={self._temporary}")
        return self._process(sys.executable, "-m", "pytest", *fixed, *shlex.split(arguments))

    def _cat(self, path: str) -> str:
        return self._process("cat", "-n", path)

    def _grep(self, pattern: str, paths: str) -> str:
        files = sorted(
            str(found.relative_to(self.project)) for glob in paths.split() for found in self.project.glob(glob)
        )
        return self._process("grep", "-nE", pattern, *files)

    def _edit(self, path: str, old: str, new: str) -> str:
        file = self.project / path
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            return f"error: the text to replace occurs {text.count(old)} times in {path}; nothing was changed"
        file.write_text(text.replace(old, new), encoding="utf-8")
        line = text[: text.index(old)].count("\n") + 1
        return f"edited {path} at line {line}: {old.count(chr(10)) + 1} -> {new.count(chr(10)) + 1} lines"

    def _python(self, code: str) -> str:
        return self._process(sys.executable, "-c", code)


def _step_messages(step: Step, first_id: int, workbench: Workbench) -> list[dict[str, Any]]:
    """Carry out one step and return the assistant's message and the tools' answers."""
    calls, results = [], []
    for idx, call in enumerate(step.calls):
        call_id = f"call_{first_id + idx:04d}"
        function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
        calls.append({"id": call_id, "type": "function", "function": function})
        output = workbench.run(call.tool, call.arguments)
        results.append({"role": "tool", "tool_call_id": call_id, "name": call.tool, "content": output})
    return [{"role": "assistant", "content": step.thought, "tool_calls": calls}, *results]


def record() -> dict[str, Any]:
    """Run the session and return the trajectory.

    Raises:
        RuntimeError: the tests do not pass at the end, so the script and the package do not fit each other.
    """
    # A fixed folder, because tools print paths: two recordings then agree in them.
    folder = Path(tempfile.gettempdir()) / "leyline-recording"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    try:
        workbench = Workbench(folder)
        num_calls = 0
        for step in STEPS:
            messages.extend(_step_messages(step, num_calls + 1, workbench))
            num_calls += len(step.calls)
        last_run = workbench.run("pytest", {"arguments": ""})
        if "failed" in last_run or "error" in last_run:
            raise RuntimeError(
                "the scripted session no longer repairs broken_package; its last test run printed\n"
                f"{last_run}\nUpdate debugging_session.py to the package"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    messages.append({"role": "assistant", "content": LAST_WORD})
    return {
        "source": "evals/replay/record.py: a scripted agent repairs a package with real tools",
        "tools": TOOLS,
        "messages": messages,
    }


def main(argv: list[str]) -> int:
    """Record to the given file, by default the one in the repository."""
    file = Path(argv[0]) if argv else DEMO_TRAJECTORY
    trajectory = record()
    file.write_text(json.dumps(trajectory, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    num_chars = sum(len(json.dumps(message)) for message in trajectory["messages"])
    print(f"{file}: {len(STEPS)} steps, {len(trajectory['messages'])} messages, {num_chars:,} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
