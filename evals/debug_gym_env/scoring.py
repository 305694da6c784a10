"""Count the pristine tests that pass on an agent's code, in a folder that has both.

The code runs in pytest's own process, so it can reach what counts. Tests of ours that must fail stand among the
pristine ones, under names that nobody can know beforehand: where one of them passes or is missing, nothing has passed.
"""

from __future__ import annotations

import ast
import os
import secrets
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from sandbox import Sandbox

_MUST_FAIL = """

def test_{0}():
    assert 1 == 2

class Must{0}(__import__("unittest").TestCase):
    def test_{0}_in_a_class(self):
        self.assertEqual(1, 2)
"""


def tests_of(file: Path) -> set[str]:
    """Return the names of the test functions in a file, whatever code it imports."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return {function.name for function in functions if function.name.startswith("test")}


def num_passed(sandbox: Sandbox, env: Mapping[str, str], *, timeout_s: float) -> int:
    """Run `test.py` in the sandbox's folder, and count what passed."""
    folder, token = sandbox.folder, secrets.token_hex(8)
    checks, report = folder / f"pristine_{token}.py", folder / "report.xml"
    # The standard library has a package `test`, which would be met first.
    (folder / "test.py").rename(checks)
    wanted = tests_of(checks)
    with checks.open("a") as file:
        file.write(_MUST_FAIL.format(token))
    # The agent's modules stand behind all others, and no file of its own configures or extends Python or pytest.
    command = [sys.executable, "-I", "-m", "pytest", "-q", "--import-mode=append", "--noconftest", "-c", os.devnull]
    command += [f"--rootdir={folder}", "-p", "no:cacheprovider", f"--junitxml={report}", checks.name]
    sandbox.run(command, env=env, timeout_s=timeout_s)
    passed = _outcomes(report)
    if any(passed.get(name) is not False for name in tests_of(checks) - wanted):
        return 0
    return sum(passed.get(name, False) for name in wanted)


def _outcomes(report: Path) -> dict[str, bool]:
    """Return from pytest's XML which tests passed: they neither failed, erred nor were skipped."""
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    bad = ("failure", "error", "skipped")
    return {case.get("name", ""): all(case.find(tag) is None for tag in bad) for case in cases}
