from __future__ import annotations

import sys

import pytest

from evals.micro.steps import count_steps


def add_up(numbers: range) -> int:
    total = 0
    for number in numbers:
        total += number
    return total


def test_steps_are_those_of_all_that_is_called_and_the_same_each_time() -> None:
    def sum_of(length: int) -> int:
        return add_up(range(length))

    (few, total), (many, _), (again, _) = (
        count_steps(lambda length=length: sum_of(length)) for length in (10, 110, 10)
    )

    assert total == 45
    assert few == again
    # Four instructions go round a loop.
    assert 3 * 100 <= many - few <= 8 * 100


def test_whoever_traced_before_goes_on() -> None:
    def other(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(other)
    try:
        with pytest.raises(ZeroDivisionError):
            count_steps(lambda: 1 // 0)
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)
