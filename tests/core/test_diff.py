import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_agent.core import alignment, diff
from leyline_agent.core.alignment import DIRECTIVE_COST, REPLACEMENT_COST, Run
from leyline_agent.core.diff import diff_token_ids
from leyline_agent.core.plan import apply_directives
from leyline_agent.core.protocol import Mode, Reason
from leyline_agent.errors import PlanError

# A run between two edits is worth a directive and a prefill of its own from this length on.
WORTH_KEEPING = DIRECTIVE_COST + REPLACEMENT_COST + 1


def fresh(rng, num_tokens, vocab=100_000):
    return [rng.randrange(vocab) for _ in range(num_tokens)]


def edited(rng, old_ids, *, num_edits, removed, replacement, appended=100):
    """Replace `removed` tokens at random places; return the new ids and how many of the old ones the edits left."""
    cuts = sorted(rng.sample(range(len(old_ids) - removed + 1), num_edits))
    new_ids, at, kept = [], 0, 0
    for cut in cuts:
        if cut < at:
            continue
        new_ids += old_ids[at:cut] + replacement(rng)
        kept += cut - at
        at = cut + removed
    return new_ids + old_ids[at:] + fresh(rng, appended), kept + len(old_ids) - at


def checked(old_ids, new_ids):
    """Diff, check every invariant, and return the directives and the number of kept tokens."""
    copies = list(old_ids), list(new_ids)
    directives = diff_token_ids(old_ids, new_ids)
    assert (list(old_ids), list(new_ids)) == copies
    result = apply_directives(old_ids, directives)
    assert result == list(new_ids[: len(result)])
    end = -1
    for directive in directives:
        assert directive.mode is Mode.AMORTIZE
        assert directive.end > directive.start or directive.replacement_ids
        assert directive.start > end, "neighbours that touch are one directive"
        end = directive.end
    return directives, len(result) - sum(len(directive.replacement_ids) for directive in directives)


def longest_common_subsequence(old_ids, new_ids):
    """Count by bits (Hyyrö): one long addition a token."""
    mask_of = {}
    for idx, token_id in enumerate(old_ids):
        mask_of[token_id] = mask_of.get(token_id, 0) | 1 << idx
    everything = (1 << len(old_ids)) - 1
    row = everything
    for token_id in new_ids:
        met = row & mask_of.get(token_id, 0)
        row = (row + met | row - met) & everything
    return len(old_ids) - row.bit_count()


token_lists = st.lists(st.integers(0, 3), max_size=120) | st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(token_lists, token_lists)
def test_applying_the_directives_gives_a_prefix_of_the_new_ids(old_ids, new_ids):
    _, kept = checked(old_ids, new_ids)
    assert kept <= longest_common_subsequence(old_ids, new_ids)


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.sampled_from([2, 20, 50_000]), st.data())
def test_edits_of_a_text_that_repeats_are_undone_by_the_directives(rng, num_edits, vocab, data):
    block = fresh(rng, data.draw(st.integers(1, 200)), vocab)
    old_ids = (block * 600)[: data.draw(st.integers(50, 600))]
    stub = fresh(rng, data.draw(st.integers(0, 30)), vocab)
    removed = data.draw(st.integers(0, 40))
    new_ids, _ = edited(rng, old_ids, num_edits=num_edits, removed=removed, replacement=lambda _: stub)
    checked(old_ids, new_ids)


@given(token_lists, token_lists)
def test_nothing_edited_gives_no_directive(old_ids, appended):
    assert diff_token_ids(old_ids, old_ids) == []
    assert diff_token_ids(old_ids, old_ids + appended) == []


@given(st.randoms(use_true_random=False), st.integers(1, 8), st.integers(0, 60), st.integers(0, 40))
def test_kept_tokens_are_those_the_edits_left_but_for_short_runs(rng, num_edits, removed, replacement_tokens):
    old_ids = fresh(rng, 800)
    new_ids, left = edited(
        rng, old_ids, num_edits=num_edits, removed=removed, replacement=lambda r: fresh(r, replacement_tokens)
    )
    directives, kept = checked(old_ids, new_ids)
    # Each edit bounds one run on its right; a run too short to be worth its directive may be given up.
    assert kept >= left - (WORTH_KEEPING - 1) * num_edits
    assert len(directives) <= num_edits + 1


@pytest.mark.parametrize("kind", ["amortize", "append"])
def test_any_sequence_of_ints_is_taken(kind):
    old_ids, new_ids = tuple(range(100)), range(100) if kind == "append" else range(50, 150)
    assert checked(old_ids, new_ids)[1] == (100 if kind == "append" else 50)


@pytest.mark.parametrize(
    ("old_ids", "new_ids", "expected"),
    [
        pytest.param([], [], [], id="both_empty"),
        pytest.param([], [1, 2], [], id="old_empty"),
        pytest.param([1, 2], [], [(0, 2, ())], id="new_empty"),
        pytest.param([1, 2, 3, 4], [1, 2], [(2, 4, ())], id="cut_short"),
        pytest.param([1, 2, 3], [1, 2, 9, 9], [(2, 3, ())], id="tail_replaced"),
        pytest.param(list(range(50)), list(range(100, 150)), [(0, 50, ())], id="nothing_in_common"),
    ],
)
def test_a_tail_that_is_gone_is_removed_without_a_replacement(old_ids, new_ids, expected):
    found = [(d.start, d.end, d.replacement_ids) for d in checked(old_ids, new_ids)[0]]
    assert found == expected


def test_one_output_replaced_and_text_appended():
    rng = random.Random(1)
    old_ids, stub = fresh(rng, 5000), fresh(rng, 12)
    new_ids = old_ids[:1000] + stub + old_ids[3000:] + fresh(rng, 300)
    (directive,) = diff_token_ids(old_ids, new_ids)
    assert (directive.start, directive.end, directive.replacement_ids) == (1000, 3000, tuple(stub))


def test_what_a_template_rewrote_comes_out_beside_the_edit():
    rng = random.Random(2)
    old_ids = fresh(rng, 3000)
    new_ids = list(old_ids)
    new_ids[2500:2500] = fresh(rng, 3)
    new_ids[2000:2006] = fresh(rng, 5)
    new_ids[700:1200] = fresh(rng, 12)
    new_ids[300:340] = []
    directives, kept = checked(old_ids, new_ids)
    assert [(d.start, d.end) for d in directives] == [(300, 340), (700, 1200), (2000, 2006), (2500, 2500)]
    assert kept == 3000 - 40 - 500 - 6


# Every offset, so that some put a gram of the short run where the search samples the old text.
@pytest.mark.parametrize("offset", range(8))
def test_a_short_run_between_two_replacements_is_prefilled_with_them(offset):
    rng = random.Random(3)
    left, short, right = fresh(rng, 100), fresh(rng, WORTH_KEEPING - 3), fresh(rng, 100)
    old_ids = left + fresh(rng, 50 + offset) + short + fresh(rng, 50) + right
    new_ids = left + fresh(rng, 5) + short + fresh(rng, 5) + right
    (directive,) = checked(old_ids, new_ids)[0]
    assert (directive.start, directive.end) == (100, len(old_ids) - 100)


@pytest.mark.parametrize("offset", range(8))
def test_a_short_run_at_the_end_is_left_to_the_rest_of_the_prompt(offset):
    rng = random.Random(3)
    left, short = fresh(rng, 100), fresh(rng, WORTH_KEEPING - 6)
    old_ids = left + fresh(rng, 50 + offset) + short
    (directive,) = checked(old_ids, left + fresh(rng, 5) + short)[0]
    assert (directive.start, directive.end, directive.replacement_ids) == (100, len(old_ids), ())


@pytest.mark.parametrize("offset", range(0, 32, 3))
def test_a_run_worth_keeping_is_found_wherever_it_stands(offset):
    rng = random.Random(3)
    left, worthy, right = fresh(rng, 100), fresh(rng, WORTH_KEEPING), fresh(rng, 100)
    old_ids = left + fresh(rng, 50 + offset) + worthy + fresh(rng, 50) + right
    new_ids = left + fresh(rng, 5) + worthy + fresh(rng, 5) + right
    assert checked(old_ids, new_ids)[1] == 200 + WORTH_KEEPING


def test_a_short_run_between_two_removals_saves_their_prefill():
    rng = random.Random(3)
    left, short, right = fresh(rng, 100), fresh(rng, 5), fresh(rng, 100)
    old_ids = left + fresh(rng, 50) + short + fresh(rng, 50) + right
    directives, kept = checked(old_ids, left + short + right)
    assert kept == 205
    assert all(not directive.replacement_ids for directive in directives)


def agent_text(rng, *, num_turns, stubbed, outputs, call_tokens):
    """Turns of framing, call, framing, output; the outputs in `stubbed` are all the same stub."""
    framing = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
    stub = list(range(20, 34))
    calls = [fresh(random.Random(turn), call_tokens) for turn in range(num_turns)]
    token_ids = []
    for turn in range(num_turns):
        token_ids += framing[0] + calls[turn] + framing[1] + (stub if turn in stubbed else outputs[turn])
    return token_ids


@pytest.mark.parametrize("equal_outputs", [False, True], ids=["outputs_differ", "outputs_equal"])
@pytest.mark.parametrize("call_tokens", [15, 60])
def test_equal_stubs_in_old_and_new_do_not_lead_astray(equal_outputs, call_tokens):
    rng = random.Random(4)
    outputs = [fresh(rng, 400)] * 60 if equal_outputs else [fresh(rng, rng.randrange(50, 900)) for _ in range(60)]
    text = {"num_turns": 60, "outputs": outputs, "call_tokens": call_tokens}
    # Every third output was a stub before; now every other is too, and some of the first are back.
    before = set(range(0, 60, 3))
    after = before - {9, 30} | set(range(1, 50, 2))
    old_ids = agent_text(rng, stubbed=before, **text)
    new_ids = agent_text(rng, stubbed=after, **text) + fresh(rng, 200)
    _, kept = checked(old_ids, new_ids)
    left = len(agent_text(rng, stubbed=before | after, **text)) - 14 * len(before ^ after)
    # Each turn whose neighbours are both edited is 26 tokens of framing and call at least; nothing may be lost but
    # the few framing tokens that fit either side of a cut.
    assert kept >= 0.99 * left


REPEATING = {
    "all_equal": lambda rng: [7] * 8000,
    "all_zero": lambda rng: [0] * 8000,
    "period_2": lambda rng: [5, 6] * 4000,
    "period_7": lambda rng: (fresh(rng, 7) * 1200)[:8000],
    "block_of_125": lambda rng: fresh(rng, 125) * 64,
    "equal_bodies": lambda rng: [t for body in [fresh(rng, 480)] for _ in range(16) for t in fresh(rng, 20) + body],
    "two_tokens": lambda rng: fresh(rng, 8000, 2),
}


@pytest.mark.parametrize("shape", REPEATING)
@pytest.mark.parametrize(
    ("removed", "replacement_tokens"), [(500, 12), (37, 0), (0, 30), (125, 40)], ids=["stub", "drop", "insert", "equal"]
)
def test_repeating_text_keeps_almost_all_of_what_the_edits_left(shape, removed, replacement_tokens):
    rng = random.Random(5)
    old_ids = REPEATING[shape](rng)
    new_ids, left = edited(
        rng, old_ids, num_edits=8, removed=removed, replacement=lambda r: fresh(r, replacement_tokens)
    )
    # Long runs are laid as early in the old text as they fit, which may leave no old tokens for a run of below 63
    # (what the first round is sure to find) between two of them: two such runs of 28 are 1.3% in the worst case here.
    assert checked(old_ids, new_ids)[1] >= 0.98 * left


@pytest.mark.parametrize("shape", ["random", *REPEATING])
def test_the_work_stays_far_below_the_default_budget(shape):
    rng = random.Random(6)
    old_ids = fresh(rng, 8000) if shape == "random" else REPEATING[shape](rng)
    new_ids, _ = edited(rng, old_ids, num_edits=10, removed=300, replacement=lambda r: fresh(r, 12))
    assert diff_token_ids(old_ids, new_ids, budget=60_000)


def test_past_the_budget_the_diff_gives_up_with_its_reason():
    rng = random.Random(7)
    with pytest.raises(PlanError, match="budget of 1000") as caught:
        diff_token_ids(fresh(rng, 3000), fresh(rng, 3000), budget=1000)
    assert caught.value.reason == Reason.DIFF_BUDGET


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_that_no_vocabulary_holds_are_refused(bad):
    with pytest.raises(PlanError, match=str(bad)) as caught:
        diff_token_ids([1, 2, 3], [1, bad, 3])
    assert caught.value.reason == Reason.TOKEN_OUT_OF_VOCABULARY


@pytest.mark.parametrize(
    "wrong",
    [pytest.param([Run(0, 0, 2), Run(4, 3, 2)], id="inner_run"), pytest.param([Run(0, 0, 3)], id="prefix")],
)
def test_a_wrong_alignment_is_never_handed_out(monkeypatch, wrong):
    monkeypatch.setattr(diff, "align", lambda *args, **kwargs: wrong)
    with pytest.raises(PlanError) as caught:
        diff_token_ids([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6])
    assert caught.value.reason == Reason.INTERNAL_ERROR


@pytest.mark.parametrize("at", [0, 16_383, 16_384, 39_999])
def test_a_wrong_token_in_a_long_kept_run_is_found(monkeypatch, at):
    monkeypatch.setattr(diff, "align", lambda *args, **kwargs: [Run(0, 0, 40_000)])
    old_ids = list(range(40_000))
    with pytest.raises(PlanError) as caught:
        diff_token_ids(old_ids, [*old_ids[:at], 77_777, *old_ids[at + 1 :]])
    assert caught.value.reason == Reason.INTERNAL_ERROR


def test_a_match_between_tokens_is_none():
    # In bytes the wanted pair stands one byte off in the old sequence, where its tokens are others.
    old_ids = [*range(1000, 1100), 0x01000000, 0x02000000, 0x00000000, *range(2000, 2100)]
    new_ids = [*range(1000, 1100), 0x00010000, *range(2000, 2100)]
    (directive,) = checked(old_ids, new_ids)[0]
    assert directive.replacement_ids == (0x00010000,)


def test_more_edits_than_runs_that_are_compared_at_once_are_found():
    rng = random.Random(8)
    old_ids = fresh(rng, 300 * 100)
    new_ids = []
    for start in range(0, len(old_ids), 100):
        new_ids += old_ids[start : start + 60] + fresh(rng, 5)
    assert alignment._CHAIN_RUNS < 300
    assert checked(old_ids, new_ids)[1] == 300 * 60


def test_an_output_read_again_is_not_served_from_the_evicted_one():
    """The old output became a stub; the same text came anew behind later messages, which keep their rows."""
    rng = random.Random(11)
    opening, output, later, stub, asked = (fresh(rng, n) for n in (200, 1400, 90, 9, 40))
    old_ids = [*opening, *output, *later, 7]
    new_ids = [*opening, *stub, *later, *asked, *output, *fresh(rng, 20)]
    directives = diff_token_ids(old_ids, new_ids)
    assert [(d.start, d.end, len(d.replacement_ids)) for d in directives] == [(200, 1600, 9), (1690, 1691, 0)]


def test_a_nearly_equal_output_read_again_is_not_served_from_the_evicted_one():
    """As above, and every hundredth line of it has changed meanwhile, so that it matches in several runs."""
    rng = random.Random(12)
    opening, output, later, stub, asked = (fresh(rng, n) for n in (200, 1400, 90, 9, 40))
    changed = [token if idx % 300 > 3 else token + 1 for idx, token in enumerate(output)]
    old_ids = [*opening, *output, *later, 7]
    new_ids = [*opening, *stub, *later, *asked, *changed]
    directives = diff_token_ids(old_ids, new_ids)
    assert [(d.start, d.end, len(d.replacement_ids)) for d in directives] == [(200, 1600, 9), (1690, 1691, 0)]


@pytest.mark.parametrize("typecode", "iI")
def test_ids_in_arrays_are_compared_as_those_in_lists(typecode):
    old, new = [1, 2, 3, *range(100, 160), 4], [1, 2, 9, *range(100, 160), 5, 2**31 - 1]
    assert diff_token_ids(array(typecode, old), array(typecode, new)) == diff_token_ids(old, new)


def test_a_negative_id_in_an_array_is_refused():
    with pytest.raises(PlanError, match="-1") as caught:
        diff_token_ids(array("i", [1, 2, 3]), array("i", [1, -1, 3]))
    assert caught.value.reason == Reason.TOKEN_OUT_OF_VOCABULARY
