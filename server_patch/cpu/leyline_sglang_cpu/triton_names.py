"""A stand-in for triton where it is not installed.

SGLang decorates and names triton kernels at import, and torch looks for a few classes; on a CPU nothing launches one,
and the real package is 1 GB. Where a module or attribute is asked for, there is one: names in capitals are empty
classes (they serve as base classes, in `isinstance` and in `except`), all others are modules that can be called as a
decorator and leave the function as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def _cdiv(dividend: int, divisor: int) -> int:
    return -(dividend // -divisor)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


class _Config:
    """Takes the arguments of an autotuner's configuration; torch derives a class from it."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.kwargs = kwargs or {}
        self.options = options


class _Constexpr:
    """Holds a compile-time constant; SGLang makes some at import."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


# What modules compute with at import, so that an empty name would not do.
_KNOWN: dict[str, Any] = {
    "triton.__version__": "3.0.0",
    "triton.cdiv": _cdiv,
    "triton.next_power_of_2": _next_power_of_2,
    "triton.Config": _Config,
    "triton.language.constexpr": _Constexpr,
}


class TritonModule(ModuleType):
    """A module that has every name, can decorate functions, and is false and empty."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if path in _KNOWN:
            value = _KNOWN[path]
        elif name.startswith("__"):
            raise AttributeError(name)
        elif name[0].isupper():
            is_error = name.endswith("Error") or name == "OutOfResources"
            value = type(name, (Exception,) if is_error else (), {})
        else:
            value = sys.modules.get(path) or TritonModule(path)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decorate, with or without arguments: `@triton.jit`, `@triton.jit(...)`."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        return decorate

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())
