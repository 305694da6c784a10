"""The operators without which PyPI's torchvision cannot be imported beside a CPU-only torch.

SGLang imports torchvision for image models. The wheel's compiled library needs CUDA, so it is not loaded, and
torchvision then stops at import where it registers shape functions for operators which that library would have
declared. Declaring them is enough: a text model never calls them.
"""

from __future__ import annotations

# Keeps the declarations alive: torch drops them with the library object.
_libraries: list[object] = []


def declare_operators() -> None:
    """Declare `torchvision::nms` and `torchvision::qnms` where torch was built without CUDA; at most once."""
    import torch

    if torch.backends.cuda.is_built() or _libraries:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
