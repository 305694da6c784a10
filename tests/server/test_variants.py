"""The same on the other ways to run the server: both IPC encodings, both tree cores, two ranks; and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang

VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "msgpack_python_core_two_ranks": (
        ("--tp-size", "2"),
        {
            "SGLANG_USE_PICKLE_IPC": "0",
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        },
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, serve_probed: Callable[..., Any]) -> Any:
    args, env = VARIANTS[request.param]
    with serve_probed(*args, **env) as live:
        live.name = request.param
        yield live


def test_splices_refusals_and_isolation(variant: Live) -> None:
    live, conversation, base = variant, new_conversation(), variant.ids(400, 1)
    prompt = base[:50] + live.ids(6, 2) + base[150:] + live.ids(8, 3)
    clean = live.generate(prompt, max_new_tokens=12)
    live.flush()
    live.generate(base, note(conversation, "1"))
    spliced = live.generate(prompt, note(conversation, "2", "1"), max_new_tokens=12)
    assert spliced.outcome is not None
    assert spliced.outcome["status"] == "spliced"
    assert spliced.cached_tokens == len(prompt) - 8
    assert live.generate(prompt, max_new_tokens=12).output_ids == clean.output_ids != spliced.output_ids
    for their_note in ("{", note(conversation, "3", "none")):
        refused = live.generate(prompt, their_note)
        assert refused.outcome is not None
        assert refused.outcome["status"] == "refused"
    live.assert_conserved()


def test_edits_while_other_requests_decode(variant: Live) -> None:
    _check_edits_beside_streams(variant)


def test_edits_while_other_requests_decode_on_the_default_server(live: Live) -> None:
    _check_edits_beside_streams(live)


def _check_edits_beside_streams(live: Live) -> None:
    live.flush()
    prompts = [live.ids(80, 10 + idx) for idx in range(3)]
    alone = [live.generate(prompt, max_new_tokens=250).output_ids for prompt in prompts]
    beside: dict[int, list[int]] = {}

    def decode(idx: int) -> None:
        beside[idx] = live.generate(prompts[idx], max_new_tokens=250).output_ids

    threads = [threading.Thread(target=decode, args=(idx,)) for idx in range(3)]
    for thread in threads:
        thread.start()
    num_edits = edits_beside = 0
    while num_edits < 12 and (num_edits < 3 or any(thread.is_alive() for thread in threads)):
        conversation, base = new_conversation(), live.ids(150, 50 + num_edits)
        live.generate(base, note(conversation, "1"), max_new_tokens=1)
        edited = base[:30] + live.ids(9, num_edits) + base[50:] + [77]
        answer = live.generate(edited, note(conversation, "2", "1"))
        assert answer.outcome is not None
        assert answer.outcome["status"] == "spliced"
        num_edits += 1
        edits_beside += any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert edits_beside >= 3, "the others had ended before the edits; make them longer"
    assert [beside[idx] for idx in range(3)] == alone
    live.assert_conserved()


def test_default_server_runs_the_rust_core_with_pickle(live: Live) -> None:
    """So that the variants above are indeed others."""
    assert "Rust" in live.counts()["tree_core"]


def test_every_reason_why_a_server_cannot_splice_is_told(serve_probed: Callable[..., Any]) -> None:
    with serve_probed("--page-size", "16", "--disable-radix-cache") as live:
        conversation, base = new_conversation(), live.ids(100, 1)
        live.generate(base, note(conversation, "1"))
        answer = live.generate(base[:20] + base[50:], note(conversation, "2", "1"))
        assert answer.status_code == 200
        assert len(answer.output_ids) == 4
        assert answer.outcome is not None
        assert (answer.outcome["status"], answer.outcome["reason"]) == ("refused", "unsupported_server")
        assert all(part in answer.outcome["message"] for part in ("page size 16", "--disable-radix-cache"))
        capabilities = live.http.get("/leyline/capabilities").json()
        assert (capabilities["supported"], capabilities["enabled"]) == (False, True)
