"""Random operations against the plain model, on both of SGLang's tree cores. `make fuzz` does more of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.in_process.machine import CacheMachine
from tests.in_process.queue_machine import QueueMachine

pytestmark = pytest.mark.slow

_EXAMPLES = 20
_STEPS = 50
_ONE_STEP_EXAMPLES = 40
"""A few thousand operations: edits wait in a queue there, so more has to come together."""


def _run(machine: type[CacheMachine], core: str, num_examples: int) -> tuple[int, int]:
    """Run a machine; return how many operations it did, and how many R's were computed beside their request."""
    num_operations = num_spliced = 0

    class Machine(machine):  # type: ignore[misc,valid-type]
        def on_step(self) -> None:
            nonlocal num_operations
            num_operations += 1

        def end_all(self) -> None:
            nonlocal num_spliced
            super().end_all()
            num_spliced += self.world.admissions.num_spliced

    Machine.core = core
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=_STEPS,
            # The same examples in each run; `make fuzz` looks for others.
            derandomize=True,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return num_operations, num_spliced


def test_random_operations_leave_what_the_model_says(core: str) -> None:
    num_operations, _ = _run(CacheMachine, core, _EXAMPLES)
    # A thousand for each core; a rule is one operation or more.
    assert num_operations >= _EXAMPLES * _STEPS // 2


def test_so_they_do_where_edits_wait_for_their_request(core: str) -> None:
    num_operations, num_spliced = _run(QueueMachine, core, _ONE_STEP_EXAMPLES)
    assert num_operations >= _ONE_STEP_EXAMPLES * _STEPS // 2
    # Else nothing is shown of the one step.
    assert num_spliced >= _ONE_STEP_EXAMPLES
