"""What a splice makes of the cache: which rows, where, and that they are the right ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leyline_kernels.layout import MlaLayout
from leyline_kernels.reference import rotate_rows
from leyline_kernels.rope_tables import delta_table

from leyline_agent.core.protocol import hash_token_ids

from .live import Live, new_conversation, note

pytestmark = pytest.mark.sglang


def _relative_l2(rows: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return (rows - truth).norm(dim=-1) / truth.norm(dim=-1)


def _key_bound(positions: torch.Tensor) -> torch.Tensor:
    """Bound of the relative L2 error of a rotated key in fp32.

    The stored key was turned by fl(position * inv_freq), a product rounded to a relative 2^-24, so its angle is off by
    up to 6e-8 * position * inv_freq; the fresh one likewise. inv_freq falls off geometrically from 1, so over the
    pairs the error has a root mean square of about a third of that of the first pair: 2e-8 * position. Below position
    500 the rounding of the key's own products (a few ulp of 1.2e-7) is all there is: 1e-5 leaves room for both.
    """
    return torch.maximum(torch.tensor(1e-5), 2e-8 * positions)


@pytest.mark.parametrize(
    ("start", "end", "replacement"),
    [(100, 200, 7), (100, 200, 0), (100, 103, 40), (1, 2, 1), (0, 50, 3), (540, 560, 2)],
    ids=["shrink", "drop", "grow", "same_length", "from_the_first_token", "near_the_end"],
)
def test_edited_prompt_is_served_from_the_cache(live: Live, start: int, end: int, replacement: int) -> None:
    conversation, base = new_conversation(), live.ids(600, 1)
    base += live.generate(base, note(conversation, "1")).output_ids
    edited = base[:start] + live.ids(replacement, 2) + base[end:] + live.ids(20, 3)
    answer = live.generate(edited, note(conversation, "2", "1"))
    # The last generated token has no row yet, so the kept run ends one before the base's end.
    kept = len(base) - end - 1
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
    assert answer.outcome.get("moved_tokens", 0) == kept
    assert answer.outcome.get("prefilled_tokens", 0) == replacement
    assert answer.cached_tokens == len(edited) - 20 - 1


def test_rows_of_layer_0_are_exact(live: Live) -> None:
    """Layer 0 depends on token and position alone, so it is checked against a prefill without any splice."""
    conversation, base = new_conversation(), live.ids(3000, 4)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    source = live.rows(base)
    edited = base[:100] + live.ids(9, 5) + base[1000:1500] + live.ids(30, 6) + base[1600:] + live.ids(5, 7)
    answer = live.generate(edited, note(conversation, "2", "1"), max_new_tokens=1)
    assert answer.outcome is not None
    assert [(d["start"], d["end"]) for d in answer.outcome["directives"]] == [(100, 1000), (1500, 1600)]
    num_spliced = len(edited) - 5
    spliced = live.rows(edited, conversation=conversation)
    assert len(spliced["slots"]) >= num_spliced

    live.flush()
    live.generate(edited, max_new_tokens=1)
    fresh = live.rows(edited)
    rank = fresh["rank"]
    ours = torch.tensor(spliced["rows"][0])[:num_spliced]
    theirs = torch.tensor(fresh["rows"][0])[:num_spliced]
    old = torch.tensor(source["rows"][0])

    # Latents: bit-equal to the row they were copied from.
    assert torch.equal(ours[109:609, :rank], old[1000:1500, :rank])
    assert torch.equal(ours[639:, :rank], old[1600:3000, :rank])
    assert torch.equal(ours[:100], old[:100])
    assert _relative_l2(ours[:, :rank], theirs[:, :rank]).max() <= 1e-6
    errors, bound = _relative_l2(ours[:, rank:], theirs[:, rank:]), _key_bound(torch.arange(num_spliced))
    assert (errors <= bound).all(), f"worst {float((errors / bound).max()):.2f} of the bound"

    # The bound means something: the same keys turned by one position more exceed it a hundredfold.
    moved = torch.arange(109, num_spliced)
    cos, sin = delta_table(_inv_freq(live), 1)
    layout = MlaLayout(rank, ours.shape[1] - rank)
    wrong = rotate_rows(ours[moved].unsqueeze(1), layout=layout, cos=cos, sin=sin, is_neox_style=False).squeeze(1)
    assert (_relative_l2(wrong[:, rank:], theirs[moved, rank:]) > 100 * bound[moved]).all()


def _inv_freq(live: Live) -> torch.Tensor:
    return torch.tensor(live.counts()["inv_freq"])


def test_deeper_layers_keep_the_influence_of_the_removed_text(live: Live) -> None:
    """What a splice is, and is not: below layer 0 the kept rows are the old ones, not those of a re-prefill."""
    conversation, base = new_conversation(), live.ids(400, 8)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    source = live.rows(base)
    edited = base[:50] + base[150:] + live.ids(5, 9)
    live.generate(edited, note(conversation, "2", "1"), max_new_tokens=1)
    spliced = live.rows(edited, conversation=conversation)
    live.flush()
    live.generate(edited, max_new_tokens=1)
    fresh, rank, last = live.rows(edited), spliced["rank"], spliced["layers"] - 1
    ours = torch.tensor(spliced["rows"][last])[50:300, :rank]
    assert torch.equal(ours, torch.tensor(source["rows"][last])[150:400, :rank])
    assert _relative_l2(ours, torch.tensor(fresh["rows"][last])[50:300, :rank]).median() > 1e-3


def test_the_base_keeps_its_rows(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(300, 10)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    before = live.rows(base)
    live.generate(base[:20] + base[90:] + live.ids(4, 11), note(conversation, "2", "1"))
    assert live.rows(base) == before


def test_edits_chain_over_many_turns(live: Live) -> None:
    """Twelve edits one after the other, each of the turn before it; layer 0 stays exact to the end."""
    conversation, prompt = new_conversation(), live.ids(900, 12)
    live.generate(prompt, note(conversation, "0"), max_new_tokens=1)
    for turn in range(1, 13):
        prompt = prompt[: 30 * turn] + live.ids(3, 100 + turn) + prompt[30 * turn + 20 :] + live.ids(10, 200 + turn)
        answer = live.generate(prompt, note(conversation, str(turn), str(turn - 1)), max_new_tokens=1)
        assert answer.outcome is not None
        assert answer.outcome["status"] == "spliced", answer.outcome
        assert answer.cached_tokens == len(prompt) - 10
    spliced = live.rows(prompt, conversation=conversation)
    live.flush()
    live.generate(prompt, max_new_tokens=1)
    fresh, rank = live.rows(prompt), spliced["rank"]
    ours, theirs = torch.tensor(spliced["rows"][0]), torch.tensor(fresh["rows"][0])
    assert _relative_l2(ours[:, :rank], theirs[:, :rank]).max() <= 1e-6
    # Each turn of a key rounds once more, so the bound grows by one rounding (1.2e-7 at most) an edit.
    bound = _key_bound(torch.arange(len(prompt))) + 12 * 1.2e-7
    assert (_relative_l2(ours[:, rank:], theirs[:, rank:]) <= bound).all()


def test_a_retry_finds_its_own_rows(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(300, 13)
    live.generate(base, note(conversation, "1"))
    edited = base[:20] + base[90:] + live.ids(4, 14)
    first = live.generate(edited, note(conversation, "2", "1"))
    slots = live.rows(edited[:-4], conversation=conversation)["slots"]
    again = live.generate(edited, note(conversation, "2", "1"))
    assert first.outcome is not None
    assert again.outcome is not None
    assert first.outcome["moved_tokens"] == 210
    assert again.outcome.get("moved_tokens", 0) == 0
    assert again.output_ids == first.output_ids
    assert live.rows(edited[:-4], conversation=conversation)["slots"] == slots


def test_an_edit_of_an_older_turn_finds_it(live: Live) -> None:
    """A branch: turn 3 edits turn 1, though turn 2 came in between."""
    conversation, base = new_conversation(), live.ids(300, 15)
    live.generate(base, note(conversation, "1"))
    live.generate(base + live.ids(50, 16), note(conversation, "2", "1"))
    answer = live.generate(base[:20] + base[90:] + live.ids(4, 17), note(conversation, "3", "1"))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"


def test_the_base_may_still_be_decoding(live: Live) -> None:
    """Only its prompt is usable then, and only copied."""
    conversation, base = new_conversation(), live.ids(300, 18)
    alone = live.generate(base, max_new_tokens=150).output_ids
    live.flush()
    results: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: results.append(live.generate(base, note(conversation, "1"), max_new_tokens=150).output_ids)
    )
    thread.start()
    while live.counts()["running"] == 0 or live.cached(base) < 300:
        pass
    answer = live.generate(base[:20] + base[90:] + live.ids(4, 19), note(conversation, "2", "1"))
    assert thread.is_alive(), "the base ended before the edit; make it longer"
    thread.join()
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
    assert answer.outcome["moved_tokens"] >= 200
    assert results == [alone]


def test_any_choice_of_n_may_be_continued(live: Live) -> None:
    conversation, base = new_conversation(), live.ids(300, 20)
    first = live.http.post(
        "/generate",
        json={
            "input_ids": base,
            "sampling_params": {
                "n": 2,
                "temperature": 1.5,
                "max_new_tokens": 30,
                "ignore_eos": True,
                "custom_params": {"leyline": json.dumps(note(conversation, "1"))},
            },
        },
    ).json()
    assert len(first) == 2
    for turn, choice in enumerate(first):
        edited = base[:20] + base[90:] + choice["output_ids"] + live.ids(4, 21)
        answer = live.generate(edited, note(conversation, f"2.{turn}", "1"))
        assert answer.outcome is not None
        assert answer.outcome["status"] == "spliced"
        # 209 rows of the prompt and all but the last of this choice's 30.
        assert answer.cached_tokens == 20 + 210 + 29


def test_explicit_directives_that_touch_are_carried_out(live: Live) -> None:
    """There is no run between them, so the R of the first stands before the run that the second keeps."""
    conversation, base = new_conversation(), live.ids(300, 30)
    live.generate(base, note(conversation, "1"), max_new_tokens=1)
    directives = [{"start": 20, "end": 30, "replacement_ids": [44]}, {"start": 30, "end": 50}]
    explicit = {"directives": directives, "base_len": 300, "base_hash": hash_token_ids(base)}
    edited = [*base[:20], 44, *base[50:], 45]
    answer = live.generate(edited, note(conversation, "2", "1", **explicit))
    assert answer.outcome is not None
    assert answer.outcome["status"] == "spliced"
    assert (answer.outcome["moved_tokens"], answer.outcome["prefilled_tokens"]) == (250, 1)
    assert answer.cached_tokens == 271


def test_incremental_streams_are_remembered_whole(serve_probed: Callable[..., Any]) -> None:
    """Their chunks carry only the new ids."""
    with serve_probed("--incremental-streaming-output") as live:
        conversation, base = new_conversation(), live.ids(200, 31)
        params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        params["custom_params"] = {"leyline": json.dumps(note(conversation, "1"))}
        body = {"input_ids": base, "stream": True, "sampling_params": params}
        output: list[int] = []
        with live.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    output += json.loads(line[6:])["output_ids"]
        assert len(output) == 40
        edited = base[:20] + base[90:] + output + live.ids(4, 32)
        answer = live.generate(edited, note(conversation, "2", "1"))
        assert answer.outcome is not None
        assert answer.outcome["moved_tokens"] == 110 + 39
