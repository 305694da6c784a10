"""The operators without which PyPI's torchvision cannot be imported beside a CPU-only torch.

SGLang and transformers import torchvision for image models. The wheel's compiled library needs CUDA's, so it is not
loaded, and torchvision then stops at import where it registers shape functions for operators which that library would
have declared. Declaring them is enough: a text model never calls them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Keeps the declarations alive: torch drops them with the library object.
_libraries: list[Any] = []


def declare_operators(torchvision_folder: Path) -> None:
    """Declare `torchvision::nms` and `torchvision::qnms`, unless torchvision's compiled library can be loaded."""
    import torch

    if _libraries or _can_load(torchvision_folder):
        return
    make_library: Any = torch.library.Library
    library = make_library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _can_load(torchvision_folder: Path) -> bool:
    import torch

    load_library: Any = torch.ops.load_library
    for file in torchvision_folder.glob("_C*.so"):
        try:
            load_library(file)
        except OSError:
            continue
        return True
    return False
