"""Several directives of one turn, carried out at once, on SGLang's real radix tree and pool.

Every message to the scheduler is compared with the model by the world itself, row by row; the tests here say what the
messages of a turn must come to.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leyline_kernels import reference
from leyline_sglang import footprints
from leyline_sglang.config import Config
from leyline_sglang.namespaces import parked_salt

from leyline_agent.core.plan import apply_directives, make_plan
from leyline_agent.core.protocol import Directive, Mode, Reason, Status
from leyline_agent.errors import PlanError
from tests.in_process.clients import Client
from tests.in_process.harness import CORES, UNBOUNDED, World
from tests.in_process.model import Node
from tests.in_process.rows import KV_LORA_RANK, NUM_LAYERS, VOCAB_SIZE

pytestmark = pytest.mark.slow

_MIXED = (Mode.AMORTIZE, Mode.AMORTIZE, Mode.AMORTIZE, Mode.FORGET)
_settings = settings(deadline=None, max_examples=25)


@st.composite
def edits(draw: Any, modes: Sequence[Mode] = _MIXED) -> tuple[list[int], list[Directive]]:
    """Draw a base and up to 8 directives on it.

    They may touch each other and both ends, insert, remove and replace, with an R or without one. No token occurs
    twice: where dropping one of two equal tokens leaves a prefix of the base, that prefix is served as it was.
    """
    tokens = iter(range(1, VOCAB_SIZE))
    base = list(itertools.islice(tokens, draw(st.integers(3, 30))))
    num = draw(st.integers(1, 8))
    ends = sorted(draw(st.lists(st.integers(0, len(base)), min_size=2 * num, max_size=2 * num)))
    directives = [
        Directive(
            start=start,
            end=end,
            replacement_ids=tuple(itertools.islice(tokens, draw(st.integers(0, 4)))),
            mode=draw(st.sampled_from(modes)),
        )
        for start, end in zip(ends[::2], ends[1::2], strict=True)
    ]
    return base, directives


@contextmanager
def world_with(base: Sequence[int], *, core: str, in_place: bool = True, in_own: bool = True) -> Iterator[Client]:
    """Yield a client that has `base` cached, in its own namespace or in the shared one."""
    config = Config(secret="a secret of the tests", in_place=in_place)
    with patch.multiple(footprints, **UNBOUNDED), World(core, config=config) as world:
        client = Client(world, "anna")
        if in_own:
            # Moved by one, so that the base's rows are in the own namespace and are not what a prefill makes of them.
            client.chat([0, *base])
            client.splice([0, *base], [Directive(start=0, end=1)])
            assert len(own_path(client, base)) == len(base)
        else:
            client.chat(base)
        yield client


def own_path(client: Client, token_ids: Sequence[int]) -> list[Node]:
    """Return what is cached of ids in the conversation's own namespace."""
    assert client.own_namespace is not None
    return client.world.model.match(client.own_namespace, token_ids)


def rows_of(client: Client, path: list[Node]) -> list[torch.Tensor]:
    """Return the pool's rows, one tensor a layer."""
    slots = [node.slot for node in path]
    return [buffer[slots].clone() for buffer in client.world.buffers]


def parked_tokens(client: Client) -> int:
    """Return how much is parked for the conversation."""
    assert client.own_namespace is not None
    extra_key, salt = client.own_namespace
    assert salt is not None
    return client.world.model.size((extra_key, parked_salt(salt)))


def carry_out(client: Client, base: Sequence[int], directives: Sequence[Directive]) -> None:
    """Splice outside of a request; nothing is refused here."""
    outcome = client.splice(base, directives).outcome
    assert outcome.reason is None, outcome.message


@contextmanager
def written_slots() -> Iterator[list[Counter[int]]]:
    """Count how often the kernels write each slot, for each layer they are called on."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    copy_rotate_, rotate_ = reference.copy_rotate_, reference.rotate_

    def copy(buffer: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, **tables: Any) -> None:
        counts[buffer.data_ptr()].update(dst.tolist())
        copy_rotate_(buffer, src, dst, **tables)

    def rotate(buffer: torch.Tensor, slots: torch.Tensor, **tables: Any) -> None:
        counts[buffer.data_ptr()].update(slots.tolist())
        rotate_(buffer, slots, **tables)

    layers: list[Counter[int]] = []
    with patch.object(reference, "copy_rotate_", copy), patch.object(reference, "rotate_", rotate):
        yield layers
    layers.extend(counts.values())


def kept_until(base: Sequence[int], directives: Sequence[Directive]) -> int:
    """Return where the last kept run ends that lies left of the first `forget`; 0 where there is none."""
    plan = make_plan(directives, base_tokens=len(base))
    return max((step.kept.dst.end for step in plan.steps[: plan.first_forget] if len(step.kept.dst)), default=0)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("in_own", [True, False], ids=["own base", "shared base"])
@pytest.mark.parametrize("core", CORES)
@_settings
@given(edit=edits())
def test_all_at_once_leaves_the_rows_of_one_edit_after_the_other(
    core: str, in_own: bool, in_place: bool, edit: tuple[list[int], list[Directive]]
) -> None:
    base, directives = edit
    moved_to = kept_until(base, directives)
    if not moved_to and Mode.FORGET not in {directive.mode for directive in directives}:
        return
    new_ids = apply_directives(base, directives)
    with world_with(base, core=core, in_place=in_place, in_own=in_own) as client:
        carry_out(client, base, directives)
        at_once = own_path(client, new_ids)
        rows_at_once = rows_of(client, at_once)

    with world_with(base, core=core, in_place=in_place, in_own=in_own) as client:
        ids, shift = list(base), 0
        for directive in directives:
            moved = directive.model_copy(update={"start": directive.start + shift, "end": directive.end + shift})
            shift += directive.position_delta
            # Refused where it is at the end of what is cached and has nothing to keep.
            with suppress(PlanError):
                client.splice(ids, [moved])
            ids = apply_directives(ids, [moved])
            if directive.mode is Mode.FORGET:
                break
        one_by_one = own_path(client, new_ids)
        rows_one_by_one = rows_of(client, one_by_one)

    # An R with no kept run right of it is left to the request that follows.
    compared = min(len(at_once), len(one_by_one))
    assert compared >= moved_to
    for node, other in zip(at_once, one_by_one, strict=False):
        assert node.row is not None
        assert other.row is not None
        assert node.row.digest == other.row.digest
    for layer in range(NUM_LAYERS):
        found, expected = rows_at_once[layer][:compared], rows_one_by_one[layer][:compared]
        # Latents are copied, never computed: bit for bit. Keys are turned at most twice here and 9 times there; see
        # `rows.expected` for the error of one turn. A key's norm is at most 26.
        assert torch.equal(found[..., :KV_LORA_RANK], expected[..., :KV_LORA_RANK])
        torch.testing.assert_close(found, expected, rtol=0, atol=(2 + 9 + 2) * 4 * 26 * 2.0**-24)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("in_own", [True, False], ids=["own base", "shared base"])
@_settings
@given(edit=edits((Mode.AMORTIZE,)))
def test_each_kept_row_is_written_once_however_many_directives_stand_before_it(
    in_own: bool, in_place: bool, edit: tuple[list[int], list[Directive]]
) -> None:
    base, directives = edit
    moved_to = kept_until(base, directives)
    with world_with(base, core="rust", in_place=in_place, in_own=in_own) as client:
        with written_slots() as layers:
            if moved_to:
                carry_out(client, base, directives)
        path = own_path(client, apply_directives(base, directives)) if moved_to else []
        kept = {node.slot for node in path[:moved_to]}
    # An R that is prefilled and a row that stays where it is are written by no kernel of ours.
    assert all(set(layer) <= kept for layer in layers)
    assert all(set(layer.values()) <= {1} for layer in layers)


@pytest.mark.parametrize("core", CORES)
@_settings
@given(edit=edits((Mode.AMORTIZE,)), more=st.lists(st.integers(0, 30), max_size=2))
def test_rows_moved_in_place_and_copied_ones_are_equal_bit_for_bit(
    core: str, edit: tuple[list[int], list[Directive]], more: list[int]
) -> None:
    base, directives = edit
    if not kept_until(base, directives):
        return
    found: list[list[torch.Tensor]] = []
    for in_place in (True, False):
        with world_with(base, core=core, in_place=in_place) as client:
            carry_out(client, base, directives)
            ids = apply_directives(base, directives)
            # Edits of what was edited: each puts two tokens in one's place, and moves the rows right of it again. They
            # stand nowhere else, so that no earlier version, which copying leaves cached, goes on as the new one does.
            for idx, at in enumerate(more):
                fresh = (32 + 2 * idx, 33 + 2 * idx)
                grown = Directive(start=at % len(ids), end=at % len(ids) + 1, replacement_ids=fresh)
                with suppress(PlanError):
                    client.splice(ids, [grown])
                ids = apply_directives(ids, [grown])
            path = own_path(client, ids)
            found.append(rows_of(client, path))
    in_place_rows, copied_rows = found
    for layer in range(NUM_LAYERS):
        assert torch.equal(in_place_rows[layer], copied_rows[layer])


@pytest.mark.parametrize("core", CORES)
@_settings
@given(edit=edits())
def test_from_the_first_forget_on_nothing_of_the_base_is_cached(
    core: str, edit: tuple[list[int], list[Directive]]
) -> None:
    base, directives = edit
    plan = make_plan(directives, base_tokens=len(base))
    if plan.first_forget is None:
        return
    forget_at = plan.steps[plan.first_forget]
    with world_with(base, core=core) as client:
        carry_out(client, base, directives)
        left = {node.row.token for node in client.world.model.nodes() if node.row is not None}
        assert len(own_path(client, apply_directives(base, directives))) <= forget_at.replacement.start
    # No token occurs twice, so one that is cached still is one that was not forgotten; 0 stands for the first edit.
    assert not left & set(base[forget_at.removed.start :])


@pytest.mark.parametrize("core", CORES)
@_settings
@given(edit=edits(), evicted=st.integers(1, 80), after=st.integers(0, 12))
def test_an_eviction_in_the_middle_leaves_a_prefix_of_the_edits_and_nothing_parked(
    core: str, edit: tuple[list[int], list[Directive]], evicted: int, after: int
) -> None:
    base, directives = edit
    countdown = itertools.count(after, -1)

    def between(_after: str) -> None:
        if next(countdown) == 0:
            client.world.evict(evicted)

    with world_with(base, core=core) as client:
        client.world.between = between
        refusals = []
        try:
            outcome = client.splice(base, directives).outcome
        except PlanError as error:
            refusals.append(error.reason)
        else:
            made = [directive.edit_id is not None for directive in outcome.directives]
            assert made == sorted(made, reverse=True)
            assert (outcome.status is Status.PARTIAL) == (outcome.reason is not None)
            refusals += [outcome.reason] if outcome.reason else []
        assert set(refusals) <= {Reason.EVICTED}
        assert parked_tokens(client) == 0


BASE = list(range(1, 21))
TWO_CUTS = [Directive(start=4, end=6), Directive(start=10, end=12)]
"""Kept runs `[6, 10)` and `[12, 20)`, and no R that would have to be prefilled."""


def test_a_full_pool_in_the_middle_leaves_what_was_done() -> None:
    with world_with(BASE, core="rust", in_own=False) as client:
        world = client.world
        # Held rows leave 12 slots: the 4 of the head and the 4 of the first run fit, the 8 of the second do not.
        free = world.allocator.available_size()
        hog = world.start(list(range(50, 50 + free - 12)), (None, "another tenant"))
        base = world.start([*BASE, 49], (None, None))
        outcome = client.splice(BASE, TWO_CUTS).outcome
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.POOL_FULL)
        assert [directive.edit_id is not None for directive in outcome.directives] == [True, False]
        path = own_path(client, [1, 2, 3, 4, 7, 8, 9, 10, 13])
        assert len(path) == 8
        assert world.model.size(path[0].namespace) == 8
        world.finish(base)
        world.finish(hog)


@pytest.mark.parametrize("in_own", [True, False], ids=["parked", "shared base"])
def test_a_base_evicted_in_the_middle_leaves_what_was_done(in_own: bool) -> None:
    with world_with(BASE, core="rust", in_own=in_own) as client:
        world = client.world

        def between(_after: str) -> None:
            done = own_path(client, [1, 2, 3, 4, 7, 8, 9, 10])
            if len(done) == 8 and done[-1].row is not None and done[-1].row.position == 7:
                # What the first step has put there is held by a request; all else is evicted.
                running = world.start([1, 2, 3, 4, 7, 8, 9, 10, 11], done[0].namespace)
                world.evict(1000)
                world.finish(running)
                world.between = None

        world.between = between
        outcome = client.splice(BASE, TWO_CUTS).outcome
        assert (outcome.status, outcome.reason) == (Status.PARTIAL, Reason.EVICTED)
        assert len(own_path(client, [1, 2, 3, 4, 7, 8, 9, 10, 13])) == 8
        assert parked_tokens(client) == 0
