"""What the scheduler's half must make of each message, carried out on the plain model and compared with its answer.

Written from the contract (`io_types.py` and the design), token by token, where the code under test works on radix
nodes. Slots are read back from the tree, and so is what SGLang chose to evict, wherever it had to.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline_sglang.io_types import CacheReply, CacheRequest, unpack
from leyline_sglang.namespaces import parked_salt

from leyline_agent.core.protocol import Reason
from tests.in_process.model import Namespace, Node, row_of
from tests.in_process.moves import Moves, SlotsOf, common_prefix


@dataclass(slots=True)
class Closed:
    """A tag that nobody may be served from any more."""

    keep: tuple[int, ...]
    """What may stay in a shared namespace of what is to be forgotten."""
    forget: bool
    scrub: bool
    successor: str | None
    """The conversation's open tag, if it goes on."""


@dataclass(slots=True)
class Dropped:
    """What became of the rows of closed tags."""

    dropped: int = 0
    held: int = 0
    shared: int = 0

    def __iadd__(self, more: Dropped) -> Dropped:
        return Dropped(self.dropped + more.dropped, self.held + more.held, self.shared + more.shared)


class Mirror(Moves):
    """The model, the tags' footprints in shared namespaces, and the closed tags."""

    def __init__(
        self, size: int, slots_of: SlotsOf, actor_of: Callable[[str], str], caller_of: Callable[[], object]
    ) -> None:
        super().__init__(size, slots_of, actor_of, caller_of)
        self.closed: dict[str, Closed] = {}
        self._due: set[str] = set()
        """Closed tags of which requests hold something."""
        self._shared: dict[str, list[tuple[Namespace, tuple[int, ...]]]] = {}

    def clear(self) -> None:
        """Forget everything, as a flush does; what is closed stays closed."""
        self.model.clear()
        self._due.clear()
        self._shared.clear()

    # --- footprints -------------------------------------------------------------------------------------------------

    def record(self, tag: str, namespace: Namespace, token_ids: Sequence[int]) -> None:
        """Take note of what a tag has put into a shared namespace."""
        closed = self.closed.get(tag)
        if closed is not None and closed.successor is not None and not is_own(namespace):
            # Its own successor it is only where a test has left the nonce out.
            if closed.forget and closed.successor != tag:
                self.record(closed.successor, namespace, token_ids[: common_prefix(token_ids, closed.keep)])
            elif not closed.forget:
                tag = closed.successor
        if tag in self.closed:
            self._due.add(tag)
        if is_own(namespace) or not token_ids:
            return
        ids = tuple(token_ids)
        known = self._shared.setdefault(tag, [])
        if not any(ns == namespace and other[: len(ids)] == ids for ns, other in known):
            known[:] = [(ns, other) for ns, other in known if ns != namespace or ids[: len(other)] != other]
            known.append((namespace, ids))

    def num_sequences(self, tag: str) -> int:
        """Return how many sequences a tag has in shared namespaces."""
        return len(self._shared.get(tag, ()))

    def extra_keys(self) -> set[str | None]:
        """Return the extra keys in use."""
        return {extra_key for extra_key, _ in self.model.roots}

    def _candidates(self, tag: str, keep_own: Sequence[int]) -> list[Node]:
        """Return what a closed tag must lose, were nothing of it held or gone on from; children before parents."""
        closed = self.closed[tag]
        found: dict[int, Node] = {}
        for extra_key in self.extra_keys():
            own = (extra_key, tag)
            kept = {id(node) for node in self.model.match(own, keep_own)}
            nodes = [*self.model.root(own).below(), *self.model.root((extra_key, parked_salt(tag))).below()]
            found |= {id(node): node for node in nodes if id(node) not in kept}
        for namespace, token_ids in self._shared.get(tag, ()) if closed.forget else ():
            keep = common_prefix(token_ids, closed.keep)
            found |= {id(node): node for node in self.model.match(namespace, token_ids)[keep:]}
        return sorted(found.values(), key=lambda node: -node.depth)

    def empty(self, tag: str, freed: set[int], *, keep_own: Sequence[int] = ()) -> Dropped:
        """Drop what a closed tag may lose now; its slots must be among `freed`."""
        candidates = self._candidates(tag, keep_own)
        result = Dropped()
        for node in candidates:
            if node.num_holds:
                result.held += 1
            elif node.children:
                result.shared += 1
            else:
                assert node.slot in freed, f"{node.row} of the closed namespace {node.namespace} is still cached"
                self.model.drop(node)
                result.dropped += 1
        self._settle(tag)
        return result

    def _settle(self, tag: str) -> None:
        """Take note of what is left of a closed tag: only what a request holds is waited for."""
        closed = self.closed[tag]
        if closed.forget:
            left: list[tuple[Namespace, tuple[int, ...]]] = []
            for namespace, token_ids in self._shared.get(tag, ()):
                # What holds a row holds all those left of it. What others go on from is theirs from now on.
                num_held = sum(1 for node in self.model.match(namespace, token_ids) if node.num_holds)
                if num_held > common_prefix(token_ids, closed.keep):
                    left.append((namespace, token_ids[:num_held]))
            self._shared[tag] = left
        is_due = any(node.num_holds for node in self._candidates(tag, ()))
        (self._due.add if is_due else self._due.discard)(tag)

    def retry(self, freed: set[int], *, has_ended: bool) -> tuple[int, bool]:
        """Drop what requests held of closed tags; return how many rows went, and whether a scrub was due.

        Once a request has ended, all that it alone had held must go. What lies under a closed tag and is not held may
        go at any time.
        """
        must: dict[str, set[int]] = {}
        may: set[int] = set()
        for tag in self.closed:
            candidates = self._candidates(tag, ())
            may |= {node.slot for node in candidates}
            if tag in self._due:
                must[tag] = _droppable(candidates)
        for slot in set().union(*must.values()) - freed if has_ended else ():
            raise AssertionError(f"{self.model.by_slot[slot].row} of a closed namespace is cached, and held by nobody")
        assert freed <= may, f"{[self.model.by_slot[slot].row for slot in freed - may]} was dropped, of no closed tag"
        self.model.drop_slots(freed)
        if has_ended:
            for tag in list(self._due):
                self._settle(tag)
        return len(freed), any(self.closed[tag].scrub and slots & freed for tag, slots in must.items())

    # --- one message ------------------------------------------------------------------------------------------------

    def answered(
        self, request: CacheRequest, reply: CacheReply, freed: set[int], available: int, *, fails: bool = False
    ) -> None:
        """Carry out one message and compare with the reply.

        Args:
            request: what was asked.
            reply: what came back.
            freed: slots that went back to the allocator meanwhile.
            available: free slots before.
            fails: whether a kernel was made to fail.
        """
        assert (reply.reason == Reason.INTERNAL_ERROR) == fails, reply.message
        if fails:
            self.move_failed(request, freed)
            return
        base, new = unpack(request.base), unpack(request.new)
        if request.close:
            self._close(request, reply, freed, available)
        if request.drop_parked and request.own_salt:
            self._drop_parked(request, freed)
        if request.move:
            self.moved(request, base, new, reply, freed, available)
        for name, token_ids in (("base", base), ("new", new)):
            shared = len(self.model.match((request.extra_key, request.shared_salt), token_ids))
            own = len(self.model.match((request.extra_key, request.own_salt), token_ids)) if request.own_salt else 0
            said = getattr(reply, f"{name}_shared"), getattr(reply, f"{name}_own")
            assert said == (shared, own), f"{name}: the reply says {said} are cached, the model {(shared, own)}"
        if request.count_own and request.own_salt:
            assert reply.own_tokens == self.model.size((request.extra_key, request.own_salt)) + self.model.size(
                (request.extra_key, parked_salt(request.own_salt))
            )

    def _close(self, request: CacheRequest, reply: CacheReply, freed: set[int], available: int) -> None:
        new = unpack(request.new)
        total, evicted = Dropped(), 0
        for tag in request.close:
            self._close_tag(tag, tuple(new), request)
            if request.keep_tokens and tag == request.close[-1]:
                keep = new[: request.keep_tokens]
                total.dropped += self.empty(tag, freed, keep_own=keep).dropped
                evicted += self._hand_over(request, tag, keep, freed, available + total.dropped)
        for tag in request.close:
            total += self.empty(tag, freed)
        # What earlier namespaces of the same conversation have left is reported too, where the conversation goes on.
        if request.own_salt is not None:
            actors = {self._actor_of(tag) for tag in request.close}
            for tag in sorted(tag for tag in self._due - {*request.close} if self._actor_of(tag) in actors):
                total += self.empty(tag, freed)
        # What was evicted for the copy of the head may be what would have been dropped after it.
        assert total.dropped <= reply.dropped <= total.dropped + evicted, f"{reply.dropped} dropped, expected {total}"
        assert (reply.held, reply.shared) == (total.held, total.shared), f"{reply}, expected {total}"

    def _close_tag(self, tag: str, new: tuple[int, ...], request: CacheRequest) -> None:
        for earlier in self.closed.values():
            # What is forgotten now, the conversation's earlier requests may not keep either.
            if earlier.successor == tag:
                earlier.successor = request.own_salt
                if request.forget:
                    kept = common_prefix(earlier.keep, new) if earlier.forget else len(new)
                    earlier.forget, earlier.keep = True, new[:kept]
                    earlier.scrub |= request.scrub
        self.closed[tag] = Closed(new, request.forget, request.scrub, request.own_salt)
        if request.own_salt is not None:
            # What stays in a shared namespace is the conversation's still, for a later forget.
            for namespace, token_ids in self._shared.get(tag, ()):
                kept = common_prefix(token_ids, new) if request.forget else len(token_ids)
                self.record(request.own_salt, namespace, token_ids[:kept])
            if not request.forget:
                self._shared.pop(tag, None)

    def _hand_over(self, request: CacheRequest, tag: str, keep: array[int], freed: set[int], available: int) -> int:
        """Move the kept head to the new namespace; return how many rows were evicted for that."""
        old, own = (request.extra_key, tag), (request.extra_key, request.own_salt)
        path = self.model.match(old, keep)
        head = keep[: len(path)]
        if not path or self.model.match(own, head):
            return 0
        rows = [row_of(node) for node in path]
        if not any(node.num_holds or len(node.children) > 1 for node in path) and not path[-1].children:
            slots = [node.slot for node in path]
            for node in reversed(path):
                self.model.drop(node)
            assert self._slots_of(own, head) == slots, "the head was to be moved without touching its rows"
            self._grow(own, head, rows, 0)
            return 0
        evicted = 0
        if available < len(path):
            if available + self.model.num_evictable(path) < len(path):
                assert not self._slots_of(own, head)
                return 0
            evicted = len(self.model.drop_slots(freed & set(self.model.by_slot)))
        self._grow(own, head, rows, 0)
        return evicted


def _droppable(candidates: list[Node]) -> set[int]:
    """Return the slots of those that nobody holds or goes on from but others of them; children come first."""
    gone: set[int] = set()
    for node in candidates:
        if not node.num_holds and all(child.slot in gone for child in node.children.values()):
            gone.add(node.slot)
    return gone


def is_own(namespace: Namespace) -> bool:
    """Whether a namespace is a conversation's own, or where it parks."""
    return namespace[1] is not None and namespace[1].startswith("leyline-")
