from __future__ import annotations

import json

import pytest

from evals.micro.proxy import main

SMALL = ("--rounds=1", "--events=4", "--gap-ms=2", "--messages=8")


@pytest.mark.slow
def test_a_row_has_both_arms_of_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--streams=3", "--bar-ms=1e9", "--git=x"]) == 0

    row = json.loads(capsys.readouterr().out)
    assert (row["op"], row["streams"], row["answers"], row["git"]) == ("proxy", 3, 6, "x")
    names = [f"{kind}_{cut}_ms" for kind in ("first", "event", "whole") for cut in ("p50", "p95")]
    assert sorted(row["direct"]) == sorted(row["proxy"]) == sorted(names)
    assert row["added_p50_ms"].keys() == {"first", "event", "whole"}


@pytest.mark.slow
def test_more_than_the_bar_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--streams=1", "--bar-ms=-1e9"]) == 1
