"""What a move must make of the cached rows, carried out on the plain model and compared with what is said of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from leyline_sglang.io_types import CacheReply, CacheRequest
from leyline_sglang.namespaces import parked_salt

from leyline_agent.core.protocol import Reason
from tests.in_process.model import Model, Namespace, Node, row_of
from tests.in_process.rows import Influence, Row, digest_of

SlotsOf = Callable[[Namespace, "array[int]"], list[int]]

Room = tuple[int, int, int]
"""Requests, tokens to compute and slots that the batch has room for in which R may be computed."""


class Moves:
    """The model, and the moves that were carried out on it."""

    def __init__(
        self, size: int, slots_of: SlotsOf, actor_of: Callable[[str], str], caller_of: Callable[[], object]
    ) -> None:
        self.model = Model(size)
        self._slots_of = slots_of
        self._actor_of = actor_of
        self._caller_of = caller_of
        self.moves: list[tuple[object, CacheRequest, Influence]] = []
        """The moves carried out so far: for whom, and what each one's rows carry from then on."""

    def record(self, tag: str, namespace: Namespace, token_ids: Sequence[int]) -> None:
        """Take note of what a tag has put into a shared namespace."""
        raise NotImplementedError

    def parked(self, extra_key: str | None, own_salt: str) -> list[Node]:
        """Return what is parked of a conversation, children before their parents."""
        return list(self.model.root((extra_key, parked_salt(own_salt))).below())[::-1]

    def _drop_parked(self, request: CacheRequest, freed: set[int]) -> None:
        assert request.own_salt is not None
        for node in self.parked(request.extra_key, request.own_salt):
            assert node.slot in freed, f"{node.row} is still parked"
            self.model.drop(node)

    def moved(
        self,
        request: CacheRequest,
        base: array[int],
        new: array[int],
        reply: CacheReply,
        freed: set[int],
        available: int,
        *,
        room: Room | None = None,
    ) -> None:
        """Carry out one move and compare with the reply.

        Args:
            request: what was asked.
            base: the edited sequence.
            new: the prompt.
            reply: what came back.
            freed: slots that went back to the allocator meanwhile.
            available: free slots before.
            room: of the batch, where what is missing left of the run is computed in it; else it is missing.
        """
        assert reply.reason != Reason.INTERNAL_ERROR, reply.message
        self._move(request, base, new, reply, freed, available, room)
        if request.parked_from is not None and not request.more_follow and not reply.reason:
            self._drop_parked(request, freed)

    def move_failed(self, request: CacheRequest, freed: set[int]) -> None:
        """Give up what a move has taken that failed in the middle: nobody may meet half of it."""
        if request.parked_from is None:
            self._drop_parked(request, freed)
        self.model.drop_slots(freed & set(self.model.by_slot))

    def _move(
        self,
        request: CacheRequest,
        base: array[int],
        new: array[int],
        reply: CacheReply,
        freed: set[int],
        available: int,
        room: Room | None,
    ) -> None:
        assert request.own_salt is not None
        model = self.model
        own = (request.extra_key, request.own_salt)
        shared = (request.extra_key, request.shared_salt)
        parked = (request.extra_key, parked_salt(request.own_salt))
        offset = request.parked_from or 0
        if request.parked_from is None:
            before = model.size(parked)
            self._drop_parked(request, freed)
            available += before
            source_ns = own if request.from_own else shared
        else:
            source_ns = parked
        target_ids = new[: request.dst_start + request.src_end - request.src_start]
        target = model.match(own, target_ids)
        source = model.match(source_ns, base[offset : request.src_end])
        num_kept = offset + len(source) - request.src_start
        head = target
        if len(target) < request.dst_start and not request.head_from_own:
            head = max(target, model.match(shared, new[: request.dst_start]), key=len)
        num_filled = max(0, request.dst_start - len(head))
        if len(target) == len(target_ids):
            self._nothing_moved(reply, "")
            return
        if num_kept <= 0 or (num_filled and room is None):
            self._nothing_moved(reply, Reason.EVICTED)
            return
        target_ids = target_ids[: request.dst_start + num_kept]
        matched = min(len(target), len(target_ids))
        if room is not None and num_filled and reply.reason == Reason.POOL_FULL:
            # What is read is held meanwhile.
            num_tokens = len(target_ids) + len(source) + len(head)
            assert _is_tight(room, num_filled, num_tokens), f"{num_filled} tokens of R do not fit into {room}"
            self._nothing_moved(reply, Reason.POOL_FULL)
            model.drop_slots(freed & set(model.by_slot))
            return
        if matched >= len(target_ids):
            self._nothing_moved(reply, "")
            return
        influence: Influence = (self._actor_of(request.own_salt), len(self.moves))
        whole = model.match(source_ns, base[offset:])
        if request.parked_from is None:
            cut = max(request.removed_start, common_prefix(base, new[: request.dst_start]))
        else:
            cut = 0
        in_place = (
            request.in_place
            and source_ns != shared
            and matched == len(head) <= request.dst_start
            and offset + cut <= request.src_start
            and _is_free_chain(whole[cut:])
        )
        rows: list[Row | None] = [row_of(node) for node in head[: request.dst_start]]
        rows += [None] * num_filled
        rows += [row_of(node) for node in source[request.src_start - offset :]]
        assert reply.filled == num_filled
        if in_place:
            assert reply.moved_in_place, "the rows could be moved in place, but were not"
            rest = [row_of(node) for node in whole[request.src_start - offset + num_kept :]]
            for node in reversed(whole[cut:]):
                model.drop(node)
            # Where R is longer than what it replaces.
            model.drop_slots(freed & set(model.by_slot))
            self._grow(own, target_ids, rows, matched, influence, request.dst_start)
            self.moves.append((self._caller_of(), request, influence))
            rest = rest if request.more_follow else []
            parked_from = request.src_start + num_kept if rest else None
            assert reply.parked_from == parked_from, f"parked from {reply.parked_from}, expected {parked_from}"
            if rest:
                self._grow(parked, base[parked_from:][: len(rest)], rest, 0)
            assert (reply.reason, reply.moved, reply.copied) == ("", num_kept, 0)
            return
        assert not reply.moved_in_place, "rows were moved in place that are held, gone on from or not ours"
        num_new = len(target_ids) - matched
        evictable = model.num_evictable(source, head, target)
        if available < num_new and available + evictable < num_new:
            self._nothing_moved(reply, Reason.POOL_FULL)
            return
        if available < num_new:
            model.drop_slots(freed & set(model.by_slot))
        self._grow(own, target_ids, rows, matched, influence, request.dst_start)
        self.moves.append((self._caller_of(), request, influence))
        num_head = max(0, len(head) - matched)
        assert (reply.reason, reply.moved, reply.copied) == ("", num_new - num_head - num_filled, num_head)
        if source_ns == shared:
            self.record(request.own_salt, shared, base)

    def _nothing_moved(self, reply: CacheReply, reason: str) -> None:
        assert reply.reason == reason, f"{reply.reason!r} ({reply.message}), expected {reason!r}"
        assert (reply.moved, reply.copied, reply.filled, reply.moved_in_place) == (0, 0, 0, False)

    def _grow(
        self,
        namespace: Namespace,
        token_ids: array[int],
        rows: Sequence[Row | None],
        matched: int,
        influence: Influence | None = None,
        moved_from: int = 0,
    ) -> None:
        """Cache `rows[matched:]` right of what is cached; from `moved_from` on `influence` has put them there.

        Where there is no row it is one that will be computed on this path, before anybody reads it.
        """
        slots = self._slots_of(namespace, token_ids)
        assert len(slots) == len(token_ids), f"{len(slots)} of {len(token_ids)} tokens are cached in {namespace}"
        node = self.model.root(namespace)
        for position, token in enumerate(token_ids):
            if position < matched:
                node = node.children[token]
                assert node.slot == slots[position], "a cached row changed its slot"
                continue
            row = rows[position]
            if row is None:
                row = Row(token, position, digest_of(node.state, token, position), node.influences)
            elif influence is not None and position >= moved_from:
                row = row.moved(position, row.influences | node.influences | {influence})
            node = self.model.grow(node, row, slots[position])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _is_tight(room: Room, num_filled: int, num_tokens: int) -> bool:
    """Whether R may not fit into the batch: it needs a request and slots twice, beside those of all that is moved."""
    requests, budget, slots = room
    return requests < 2 or num_filled >= budget or slots <= 2 * num_filled + num_tokens + 2


def _is_free_chain(nodes: Iterable[Node]) -> bool:
    """Whether nobody holds these nodes, nor goes on from any of them but to the next one."""
    nodes = list(nodes)
    children = [*nodes[1:], None]
    return all(
        not node.num_holds and list(node.children.values()) == ([] if child is None else [child])
        for node, child in zip(nodes, children, strict=True)
    )
