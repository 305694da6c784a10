"""Import finders for the packages that a CPU install of SGLang lacks.

Runs from a `.pth` file at the start of every interpreter of the environment, since SGLang's imports fail long before
it loads plugins. So it imports next to nothing, and decides only when somebody asks for one of the three names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def install() -> None:
    """Add the finders to `sys.meta_path`, once.

    The finders for whole packages come last, so that an installed package of the same name always wins.
    """
    if not any(isinstance(finder, _MissingPackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())
        sys.meta_path.append(_MissingPackageFinder())


def _serving_on_cpu() -> bool:
    """Return whether SGLang's own switch for CPU inference is on, as `sglang.srt.utils.is_cpu` reads it."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"


class _MissingPackageFinder(importlib.abc.MetaPathFinder):
    """Finds `sgl_kernel`, and `triton` with any submodule, where no installed package has been found.

    Submodules of `sgl_kernel` stay missing: SGLang expects an ImportError there, and then goes without.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        if not (fullname == "sgl_kernel" or package == "triton") or not _serving_on_cpu():
            return None
        # A missing submodule of a real package is that package's affair.
        loaded = sys.modules.get(package)
        if loaded is not None and not isinstance(getattr(loaded.__spec__, "loader", None), _NamesLoader):
            return None
        return importlib.machinery.ModuleSpec(fullname, _NamesLoader(), is_package=True)


class _NamesLoader(importlib.abc.Loader):
    """Makes the stand-in modules."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name.partition(".")[0] == "triton":
            from leyline_sglang_cpu.triton_names import TritonModule

            return TritonModule(spec.name)
        from leyline_sglang_cpu.sgl_kernel import KernelModule

        return KernelModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the modules answer for their names when asked."""


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators just before the installed torchvision runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Whoever imports a model of transformers imports torchvision too, so this does not ask about a server.
        if fullname == "torchvision":
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin is not None:
                from leyline_sglang_cpu.torchvision_ops import declare_operators

                declare_operators(Path(spec.origin).parent)
        return None
