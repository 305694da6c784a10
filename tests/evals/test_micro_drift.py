import json

import pytest
import torch

from evals.micro import drift
from evals.micro.drift import deltas, main, measure, missed, relative_l2, turned


@pytest.fixture(scope="module")
def rows():
    return {(row["way"], row["edits"]): row for row in measure("deepseek-v2-lite", device="cpu", rows=256, seed=0)}


def test_one_edit_is_within_its_bounds(rows):
    assert rows["chained", 1]["missed"] == []


def test_turned_from_the_first_value_the_error_stays_that_of_one_edit(rows):
    first, last = (rows["from_first", edits]["against_stored"] for edits in (1, 64))
    assert last == pytest.approx(first, rel=0.1)


def test_chained_edits_add_their_errors_up(rows):
    # Independent errors: 64 of them are eight times one.
    assert rows["chained", 64]["against_stored"] == pytest.approx(8 * rows["chained", 1]["against_stored"], rel=0.2)


def test_one_edit_is_the_same_either_way(rows):
    assert rows["chained", 1]["against_fresh"] == rows["from_first", 1]["against_fresh"]


def test_a_row_says_what_the_first_value_costs(rows):
    # 27 layers of 64 values of 2 bytes, beside rows of 576.
    assert (rows["from_first", 1]["first_value_bytes"], rows["from_first", 1]["row_bytes"]) == (3456, 31_104)
    assert rows["chained", 1]["first_value_bytes"] == 0


def test_a_turn_by_a_quarter_moves_the_pair(rows):
    quarter = torch.full((1, 1), torch.pi / 2, dtype=torch.float64)
    torch.testing.assert_close(turned(torch.tensor([[1.0, 0.0]]), quarter), torch.tensor([[0.0, 1.0]]).double())


def test_the_distance_is_relative_to_what_was_expected():
    assert relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 8.0])) == pytest.approx(5 / 8)


def test_edits_keep_keys_within_the_context():
    at = 100
    for delta in deltas(200, rows=50, start=100, most=4096, seed=1):
        at += delta
        assert delta
        assert at >= 0
        assert at + 50 <= 4096


@pytest.mark.parametrize(
    ("way", "edits", "against_stored", "against_fresh", "number"),
    [
        pytest.param("chained", 1, 1.76e-3, 2.9e-3, 1, id="one edit, against the stored key"),
        pytest.param("chained", 1, 1.75e-3, 2.91e-3, 1, id="one edit, against a fresh key"),
        pytest.param("from_first", 64, 9.0, 2.91e-3, 1, id="many edits from the first value, against a fresh key"),
        pytest.param("chained", 64, 9.0, 9.0, 0, id="chained edits are published, not bounded"),
        pytest.param("chained", 1, float("nan"), float("nan"), 2, id="no number at all"),
    ],
)
def test_what_is_above_a_bound_is_told(way, edits, against_stored, against_fresh, number):
    row = {"way": way, "edits": edits, "against_stored": against_stored, "against_fresh": against_fresh}
    assert len(list(missed(row))) == number


def test_keys_that_are_not_turned_fail_the_run(monkeypatch, capsys):
    monkeypatch.setattr(drift, "rotate_all_", lambda *args, **kwargs: None)
    assert main(["--device", "cpu", "--rows", "16", "--models", "deepseek-v2-lite", "--json"]) == 1
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["missed"][0].startswith("against_stored is ")


def test_a_run_says_its_command(capsys):
    assert main(["--device", "cpu", "--rows", "64", "--models", "moonlight-16b-a3b", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["command"] == "python -m evals.micro.drift --device cpu --rows 64 --models moonlight-16b-a3b --json"
