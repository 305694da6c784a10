"""Stand-ins for packages that debug-gym imports and that neither its OpenAI client nor its local environments use.

Import it before `debug_gym`. A package that is installed is left alone; of the others every name can be imported,
inherited from, caught and annotated with, and calling one says what is missing.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_PACKAGES = ("anthropic", "azure", "datasets", "kubernetes", "swebench", "swesmith", "transformers")


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (_StandIn,), {})


class _StandIn(Exception, metaclass=_AnyName):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} is a stand-in: its package is not in evals/debug_gym_env")


class _Package(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # Tables of SWE-bench, which are merged as the module is imported.
        return {} if name.isupper() else _AnyName(name, (_StandIn,), {})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder(frozenset(name for name in _PACKAGES if find_spec(name) is None)))
