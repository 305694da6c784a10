"""A stand-in for `sgl_kernel`, SGLang's compiled kernels.

PyPI has the CUDA build only; the CPU build is published elsewhere. On a CPU without that build SGLang takes its plain
torch paths, yet still imports names from `sgl_kernel`. Every name therefore exists, and raises when called: a missing
kernel is never a silent wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn


class KernelModule(ModuleType):
    """A module in which every public name is a function that raises `NotImplementedError`."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(
                f"{self.__name__}.{name} is a compiled kernel of SGLang that this CPU install lacks. "
                "Choose options that run on plain torch (see evals/serving.py), or install SGLang's CPU build."
            )

        return missing
