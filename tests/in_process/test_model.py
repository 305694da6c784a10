"""Random operations against the plain model, on both of SGLang's tree cores. `make fuzz` does more of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.in_process.machine import CacheMachine

pytestmark = pytest.mark.slow

_EXAMPLES = 20
_STEPS = 50


def test_random_operations_leave_what_the_model_says(core: str) -> None:
    num_operations = 0

    class Machine(CacheMachine):
        def on_step(self) -> None:
            nonlocal num_operations
            num_operations += 1

    Machine.core = core
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=_EXAMPLES,
            stateful_step_count=_STEPS,
            # The same examples in each run; `make fuzz` looks for others.
            derandomize=True,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A thousand for each core; a rule is one operation or more.
    assert num_operations >= _EXAMPLES * _STEPS // 2
