import pytest

from leyline_agent.core.edits import Edit, apply_edits
from leyline_agent.core.messages import Message


def message(text):
    return Message.from_openai({"role": "user", "content": text})


MESSAGES = [message(text) for text in "abcdef"]
STUB = message("stub")


def texts(edits):
    return "".join(m.text[0] for m in apply_edits(MESSAGES, edits))


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        pytest.param([], "abcdef", id="none"),
        pytest.param([Edit(1, 2, (STUB,))], "ascdef", id="replace"),
        pytest.param([Edit(0, 1), Edit(5, 6)], "bcde", id="drop_both_ends"),
        pytest.param([Edit(1, 4, (STUB,))], "asef", id="collapse"),
        pytest.param([Edit(6, 6, (STUB,))], "abcdefs", id="append"),
        pytest.param([Edit(1, 2, (STUB, STUB)), Edit(2, 3)], "assdef", id="touching"),
    ],
)
def test_edits_are_applied(edits, expected):
    before = list(MESSAGES)
    assert texts(edits) == expected
    assert before == MESSAGES


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param([Edit(2, 4), Edit(3, 5)], id="overlap"),
        pytest.param([Edit(3, 4), Edit(0, 1)], id="unsorted"),
        pytest.param([Edit(5, 7, rule="late")], id="beyond"),
        pytest.param([Edit(4, 3)], id="backwards"),
    ],
)
def test_edits_that_do_not_fit_are_refused_by_rule_and_place(edits):
    bad = edits[-1]
    with pytest.raises(ValueError, match=rf"edit \[{bad.start}, {bad.end}\) of rule '{bad.rule}'"):
        apply_edits(MESSAGES, edits)
