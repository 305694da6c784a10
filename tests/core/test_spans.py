import pytest

from leyline_agent.core.spans import Span


def test_length_and_shift():
    assert len(Span(3, 8)) == 5
    assert Span(3, 8).shifted(-3) == Span(0, 5)
    assert len(Span(2, 2)) == 0


def test_spans_sort_by_start():
    assert sorted([Span(5, 6), Span(1, 9), Span(1, 2)]) == [Span(1, 2), Span(1, 9), Span(5, 6)]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2)])
def test_a_span_that_is_none_is_refused(start, end):
    with pytest.raises(ValueError, match=rf"got \[{start}, {end}\)"):
        Span(start, end)


def test_no_shift_beyond_the_start():
    with pytest.raises(ValueError, match=r"got \[-1, 1\)"):
        Span(1, 3).shifted(-2)
