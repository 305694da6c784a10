"""A secret is planted, amortized away, then forgotten: after that it is nowhere, nor what has seen it.

On the Python tree core, whose keys can be walked; the rows are compared with those of another server (the shared one,
on the Rust core), which never sees the secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.serving import serve
from leyline_agent.core.protocol import CONVERSATION_HEADER

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang

SECRET = list(range(1900, 1930))
FIRST, END = 1900, 2000
"""Token ids that stand in no other text of these tests."""


@pytest.fixture(scope="module")
def python_core(
    model_dir: Path, probe_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Live, Path]]:
    log = tmp_path_factory.mktemp("secret") / "server.log"
    env = probe_env | {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    with serve(model_dir, env=env, log_path=log, fork=True) as server, Live(server.url) as live:
        yield live, log


@pytest.fixture
def spy(python_core: tuple[Live, Path]) -> Iterator[Live]:
    live, _ = python_core
    live.flush()
    yield live
    live.assert_conserved()


def _text(live: Live, count: int, seed: int) -> list[int]:
    return [10 + token % (FIRST - 10) for token in live.ids(count, seed)]


def _search(live: Live, rows: dict[int, list[list[float]]]) -> dict[str, int]:
    body = {"first": FIRST, "end": END, "rows": rows}
    return live.http.post("/search", json=body).json()  # type: ignore[no-any-return]


def _leaves(live: Live) -> list[dict[str, Any]]:
    return live.http.post("/search", json={"leaves": True}).json()  # type: ignore[no-any-return]


def _worst_difference(leaves: list[dict[str, Any]], clean: Live) -> float:
    """Largest relative L2 distance of any row on these paths from the row of a server that never saw the secret."""
    worst = 0.0
    for leaf in leaves:
        clean.generate(leaf["ids"], max_new_tokens=0)
        truth = clean.rows(leaf["ids"])["rows"]
        for layer, rows in leaf["rows"].items():
            found, expected = torch.tensor(rows), torch.tensor(truth[int(layer)])
            worst = max(worst, float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()))
    return worst


def _amortize_the_secret(spy: Live) -> tuple[str, list[int], list[str], dict[int, list[list[float]]]]:
    conversation, base = new_conversation(), [*_text(spy, 60, 1), *SECRET, *_text(spy, 150, 2)]
    spy.generate(base, note(conversation, "1"), max_new_tokens=1)
    secret_rows = {layer: rows[60:90] for layer, rows in spy.rows(base)["rows"].items()}
    edited = [*base[:60], 11, 12, 13, *base[90:], *_text(spy, 20, 3)]
    outcome = spy.generate(edited, note(conversation, "2", "1"), max_new_tokens=1).outcome
    assert outcome is not None
    assert outcome["status"] == "spliced"
    # And once more, in place: nothing of the first edit is lost on the way.
    shorter = edited[:100] + edited[120:]
    outcome_2 = spy.generate(shorter, note(conversation, "3", "2"), max_new_tokens=1).outcome
    assert outcome_2 is not None
    assert outcome_2["status"] == "spliced"
    ids = [directive["edit_id"] for directive in (*outcome["directives"], *outcome_2["directives"])]
    return conversation, shorter, ids, secret_rows


@pytest.mark.parametrize("how", ["by_id", "all"])
def test_after_a_forget_the_secret_is_nowhere(spy: Live, python_core: tuple[Live, Path], live: Live, how: str) -> None:
    conversation, prompt, edit_ids, secret_rows = _amortize_the_secret(spy)
    before = _search(spy, secret_rows)
    assert before["radix_keys"] >= len(SECRET)
    assert before["rows"] >= 2 * len(SECRET)
    assert before["remembered"] >= len(SECRET)
    # In the shared namespace stands the secret itself, which the other server must never see.
    assert _worst_difference([leaf for leaf in _leaves(spy) if leaf["own"]], live) > 1e-3

    grown = prompt + _text(spy, 10, 4)
    asked = {"by_id": edit_ids[:1], "all": "all"}[how]
    answer = spy.generate(grown, note(conversation, "4", "3", forget=asked, scrub=True), max_new_tokens=1)
    assert answer.outcome is not None
    assert answer.outcome["status"] == "reprefill"
    purge = answer.outcome["purge"]
    assert purge["dropped_tokens"] >= len(SECRET) + 150
    assert purge["scrubbed_tokens"] > 0
    assert "held_tokens" not in purge
    assert "shared_tokens" not in purge

    assert not any(token in range(FIRST, END) for leaf in _leaves(spy) for token in leaf["ids"])
    assert _worst_difference(_leaves(spy), live) <= 1e-5
    after = _search(spy, secret_rows)
    # What the forgetting request has freed since is no secret, but no zero either.
    assert after.pop("dirty_free_rows") <= 2
    assert after == {"radix_keys": 0, "footprints": 0, "closed": 0, "rows": 0, "remembered": 0}

    state = spy.http.get("/leyline/conversation", headers={CONVERSATION_HEADER: conversation}).json()
    assert [turn["edits"] for turn in state["turns"]] == [[]]
    log = python_core[1].read_text()
    assert conversation not in log
    assert "1900, 1901" not in log
    assert "1900, 1901" not in str(state) + str(answer.outcome)
