"""Import SGLang before the tests do: it warns of all that a CPU lacks, and here warnings are errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.in_process.harness import CORES
    from tests.in_process.stand_ins import predictable_secrets


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    """Each of SGLang's radix tree cores."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _same_every_time() -> Iterator[None]:
    """Nonces and edit ids that are the same in each run, and one thread: the tensors here are tiny."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with predictable_secrets(0):
        yield
    torch.set_num_threads(num_threads)
