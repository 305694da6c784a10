"""The stand-ins appear only where the real package is absent and the process serves on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def _python(code: str, *, engine: str | None = "1", path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, since finders and modules are per process."""
    env = {key: value for key, value in os.environ.items() if key not in ("SGLANG_USE_CPU_ENGINE", "PYTHONPATH")}
    if engine is not None:
        env["SGLANG_USE_CPU_ENGINE"] = engine
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def _has_real_triton() -> bool:
    return _python("import triton", engine=None).returncode == 0


def test_a_missing_kernel_has_a_name_and_raises_when_called() -> None:
    done = _python("import sgl_kernel; from sgl_kernel import gelu; gelu(1)")
    assert "NotImplementedError: sgl_kernel.gelu is a compiled kernel" in done.stderr


def test_submodules_of_sgl_kernel_stay_missing() -> None:
    # SGLang catches ImportError there and defines what it needs itself.
    assert "No module named 'sgl_kernel.scalar_type'" in _python("import sgl_kernel.scalar_type").stderr


@pytest.mark.parametrize("engine", [None, "0"], ids=["unset", "0"])
@pytest.mark.parametrize("package", ["sgl_kernel", "triton"])
def test_no_stand_in_unless_sglang_serves_on_a_cpu(package: str, engine: str | None) -> None:
    if package == "triton" and _has_real_triton():
        pytest.skip("a real triton is installed")
    assert f"No module named '{package}'" in _python(f"import {package}", engine=engine).stderr


@pytest.mark.parametrize("package", ["sgl_kernel", "triton"])
def test_an_installed_package_wins(package: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("REAL = True")
    done = _python(f"import {package}; assert {package}.REAL is True", path=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_missing_submodule_of_an_installed_triton_stays_missing(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("")
    assert "No module named 'triton.nowhere'" in _python("import triton.nowhere", path=tmp_path).stderr


def test_triton_decorates_names_and_computes() -> None:
    if _has_real_triton():
        pytest.skip("a real triton is installed")
    code = """
import triton, triton.language as tl
from triton.runtime.autotuner import OutOfResources
from triton.backends.compiler import GPUTarget
def kernel(x): return x + 1
assert triton.jit(kernel) is kernel
assert triton.jit(do_not_specialize=["x"])(kernel)(1) == 2
assert triton.autotune(configs=[triton.Config({"A": 1}, num_warps=4)], key=[])(kernel) is kernel
assert (triton.cdiv(7, 2), triton.next_power_of_2(5), triton.next_power_of_2(1)) == (4, 8, 1)
assert tl.constexpr(3).value == 3 and not triton.nothing and list(triton.nothing) == []
assert issubclass(OutOfResources, Exception) and isinstance(GPUTarget, type)
assert triton.runtime.driver is triton.runtime.driver
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr


def test_torchvision_can_be_imported() -> None:
    done = _python("import torchvision", engine=None)
    assert done.returncode == 0, done.stderr


def test_torchvisions_operators_are_left_to_its_own_library_where_that_loads(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from leyline_sglang_cpu.torchvision_ops import declare_operators
torch.ops.load_library = lambda file: None
declare_operators(Path(sys.path[0]))
assert not hasattr(torch.ops.torchvision, "nms")
"""
    (tmp_path / "_C.so").touch()
    done = _python(code.replace("sys.path[0]", repr(str(tmp_path))), engine=None)
    assert done.returncode == 0, done.stderr


def test_nothing_on_disk_has_the_name_of_a_real_package() -> None:
    package = find_spec("leyline_sglang_cpu")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent.parent
    assert not [name for name in ("sgl_kernel", "triton", "torchvision") if (root / name).exists()]


def test_the_plugin_does_nothing_without_sglangs_switch() -> None:
    code = """
from leyline_sglang_cpu.plugin import activate
import sys, types
# A stand-in for sglang.srt.utils, which cannot be imported on this machine without the switch.
for name in ("sglang", "sglang.srt"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["sglang.srt.utils"] = utils = types.ModuleType("sglang.srt.utils")
utils.is_cpu = lambda: False
activate()
"""
    done = _python(code, engine=None)
    assert done.returncode == 0, done.stderr
