import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_agent.core.plan import apply_directives, check_directives, make_plan
from leyline_agent.core.protocol import Directive, Mode, Reason
from leyline_agent.core.spans import Span
from leyline_agent.errors import PlanError


@st.composite
def bases_with_directives(draw):
    base_ids = draw(st.lists(st.integers(0, 99), max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(base_ids)), max_size=8)))
    if len(cuts) % 2:
        cuts.pop()
    replacements = st.lists(st.integers(100, 199), max_size=5)
    modes = st.sampled_from(Mode)
    directives = [
        Directive(start=start, end=end, replacement_ids=tuple(draw(replacements)), mode=draw(modes))
        for start, end in zip(cuts[::2], cuts[1::2], strict=True)
    ]
    return base_ids, directives


@given(bases_with_directives())
def test_prefix_replacements_and_kept_runs_tile_the_new_prompt(case):
    base_ids, directives = case
    plan = make_plan(directives, base_tokens=len(base_ids))
    at = plan.prefix_tokens
    for step in plan.steps:
        assert step.replacement.start == at
        assert step.kept.dst.start == step.replacement.end
        at = step.kept.dst.end
    assert at == plan.new_tokens


@given(bases_with_directives())
def test_prefix_removed_and_kept_runs_tile_the_base(case):
    base_ids, directives = case
    plan = make_plan(directives, base_tokens=len(base_ids))
    at = plan.prefix_tokens
    for step in plan.steps:
        assert step.removed.start == at
        assert step.kept.src.start == step.removed.end
        at = step.kept.src.end
    assert at == len(base_ids)


@given(bases_with_directives())
def test_a_kept_run_moves_as_a_whole_by_all_deltas_to_its_left(case):
    base_ids, directives = case
    shift = 0
    for step in make_plan(directives, base_tokens=len(base_ids)).steps:
        shift += directives[step.directive_idx].position_delta
        assert len(step.kept.src) == len(step.kept.dst)
        assert step.kept.position_delta == shift


@given(bases_with_directives())
def test_following_the_steps_gives_what_applying_the_directives_gives(case):
    base_ids, directives = case
    plan = make_plan(directives, base_tokens=len(base_ids))
    built = base_ids[: plan.prefix_tokens]
    for step in plan.steps:
        replacement_ids = directives[step.directive_idx].replacement_ids
        assert len(replacement_ids) == len(step.replacement)
        built += replacement_ids
        built += base_ids[step.kept.src.start : step.kept.src.end]
    assert built == apply_directives(base_ids, directives)


def test_a_worked_example():
    base_ids = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    directives = [Directive(start=2, end=5, replacement_ids=(50,)), Directive(start=7, end=7, replacement_ids=(70, 71))]
    assert apply_directives(base_ids, directives) == [0, 1, 50, 5, 6, 70, 71, 7, 8, 9]
    plan = make_plan(directives, base_tokens=10)
    assert (plan.prefix_tokens, plan.new_tokens, plan.first_forget) == (2, 10, None)
    assert [(step.kept.src, step.kept.dst) for step in plan.steps] == [
        (Span(5, 7), Span(3, 5)),
        (Span(7, 10), Span(7, 10)),
    ]


def test_no_directive_keeps_everything():
    plan = make_plan([], base_tokens=7)
    assert (plan.prefix_tokens, plan.steps, plan.new_tokens, plan.first_forget) == (7, (), 7, None)
    assert apply_directives([1, 2], []) == [1, 2]


def test_the_first_forget_is_marked():
    modes = [Mode.AMORTIZE, Mode.FORGET, Mode.AMORTIZE, Mode.FORGET]
    directives = [Directive(start=2 * i, end=2 * i + 1, mode=mode) for i, mode in enumerate(modes)]
    assert make_plan(directives, base_tokens=8).first_forget == 1


@pytest.mark.parametrize(
    ("directives", "reason", "wanted"),
    [
        pytest.param([(4, 6, ()), (1, 2, ())], Reason.BAD_DIRECTIVES, "directive 1 .* starts before 6", id="unsorted"),
        pytest.param([(1, 4, ()), (3, 5, ())], Reason.BAD_DIRECTIVES, "directive 1 .* starts before 4", id="overlap"),
        pytest.param([(8, 11, ())], Reason.BAD_DIRECTIVES, "beyond the base's 10 tokens", id="beyond"),
        pytest.param([(1, 2, (100,))], Reason.TOKEN_OUT_OF_VOCABULARY, "token id 100 .* of 100", id="token"),
    ],
)
def test_directives_that_do_not_fit_are_refused_with_a_reason(directives, reason, wanted):
    made = [Directive(start=start, end=end, replacement_ids=ids) for start, end, ids in directives]
    with pytest.raises(PlanError, match=wanted) as caught:
        check_directives(made, base_tokens=10, vocab_size=100)
    assert caught.value.reason == reason


def test_values_that_bypassed_the_wire_model_are_refused_too():
    backwards = Directive.model_construct(start=5, end=3, replacement_ids=(), mode=Mode.AMORTIZE)
    with pytest.raises(PlanError, match="end lies before start"):
        check_directives([backwards], base_tokens=10)
    negative = Directive.model_construct(start=3, end=5, replacement_ids=(-1,), mode=Mode.AMORTIZE)
    with pytest.raises(PlanError) as caught:
        check_directives([negative], base_tokens=10)
    assert caught.value.reason == Reason.TOKEN_OUT_OF_VOCABULARY


@pytest.mark.parametrize("function", [make_plan, None], ids=["make_plan", "apply_directives"])
def test_plan_and_application_check_their_directives(function):
    beyond = [Directive(start=1, end=4)]
    with pytest.raises(PlanError, match="beyond the base's 3 tokens"):
        function(beyond, base_tokens=3) if function else apply_directives([1, 2, 3], beyond)


def test_a_vocabulary_that_is_not_known_is_not_checked():
    check_directives([Directive(start=0, end=1, replacement_ids=(10**9,))], base_tokens=1)
