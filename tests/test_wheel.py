"""The distribution as a user gets it: built, and installed into an environment that has nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_TEST_ONLY = ("leyline_probe", "leyline_search", "leyline_sglang_cpu", "leyline_rows")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Not isolated: the build tool is there, and need not be fetched again.
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(_ROOT))
    (built,) = folder.glob("leyline_agent-*.whl")
    return built


def test_it_has_every_policy_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    policies = sorted(path.name for path in (_ROOT / "policies").glob("*.yaml"))
    assert policies
    assert sorted(Path(name).name for name in names if name.startswith("leyline_agent/policies/")) == sorted(
        path.name for path in (_ROOT / "policies").iterdir() if path.is_file()
    )
    assert not [name for name in names if name.startswith("tests/") or any(part in name for part in _TEST_ONLY)]
    assert {"leyline_kernels/rotate.py", "leyline_sglang/compat.py"} <= set(names)


def test_alone_it_validates_and_lists_the_shipped_policies(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "empty" / "bin" / "python"
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty"))
    # pip is told where, so that it need not be installed first.
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    _run(*pip, "install", "-q", "-c", str(_ROOT / "constraints.txt"), str(wheel))
    leyline = str(python.with_name("leyline"))
    listed = _run(leyline, "policies", cwd=tmp_path).split("\n")
    names = [path.stem for path in (_ROOT / "policies").glob("*.yaml")]
    assert sorted(line.split()[0] for line in listed if line) == sorted(names)
    assert _run(leyline, "validate", *names, cwd=tmp_path).count(": valid") == len(names)


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])} …: {done.stdout}{done.stderr}"
    return done.stdout
