"""A plain Python model of the radix cache: what must be cached, in which slot, and where each row came from.

One trie a namespace, one node a token. It knows nothing of radix nodes, LRU order or torch. What SGLang evicts under
pressure it does not predict: the harness tells it which slots were freed, and it checks that they could be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.in_process.rows import EMPTY_STATE, Influence, Row, Rows, attended, digest_of

Namespace = tuple[str | None, str | None]
"""(extra_key, cache_salt)."""


@dataclass(eq=False, slots=True)
class Node:
    """One cached token. A root holds no row."""

    namespace: Namespace
    row: Row | None = None
    slot: int = -1
    depth: int = 0
    """Tokens of its path; where rows are parked, not their position."""
    parent: Node | None = field(default=None, repr=False)
    children: dict[int, Node] = field(default_factory=dict, repr=False)
    num_holds: int = 0
    """Running requests that have it locked."""
    state: int = EMPTY_STATE
    """What a row right of it attends to."""
    clean_state: int = EMPTY_STATE
    """The same, had all of its path been prefilled as it reads now."""
    clean_digest: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether the row is a function of its token path alone."""
        return self.row is None or self.row.digest == self.clean_digest

    @property
    def influences(self) -> frozenset[Influence]:
        """Amortized edits that the row has seen."""
        return self.row.influences if self.row is not None else frozenset()

    def below(self) -> Iterator[Node]:
        """Yield all nodes below this one, children after their parents."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path(self) -> list[Node]:
        """Return the nodes from the first token to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.row is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Model:
    """What must be cached."""

    def __init__(self, size: int) -> None:
        self.rows = Rows(size)
        self.roots: dict[Namespace, Node] = {}
        self.by_slot: dict[int, Node] = {}

    def root(self, namespace: Namespace) -> Node:
        """Return where the sequences of a namespace start."""
        if namespace not in self.roots:
            self.roots[namespace] = Node(namespace)
        return self.roots[namespace]

    def match(self, namespace: Namespace, token_ids: Sequence[int]) -> list[Node]:
        """Return the nodes of the longest cached prefix."""
        node, found = self.root(namespace), []
        for token in token_ids:
            child = node.children.get(token)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def nodes(self) -> list[Node]:
        """Return every cached token."""
        return list(self.by_slot.values())

    def size(self, namespace: Namespace) -> int:
        """Return how many tokens are cached in a namespace."""
        return sum(1 for _ in self.root(namespace).below())

    def grow(self, parent: Node, row: Row, slot: int) -> Node:
        """Cache one more token right of `parent`."""
        assert row.token not in parent.children
        assert slot not in self.by_slot, f"slot {slot} is taken by another cached token"
        node = Node(
            namespace=parent.namespace,
            row=row,
            slot=slot,
            depth=parent.depth + 1,
            parent=parent,
            state=attended(parent.state, row.digest),
            clean_digest=(clean := digest_of(parent.clean_state, row.token, row.position)),
            clean_state=attended(parent.clean_state, clean),
        )
        parent.children[row.token] = node
        self.rows.put(slot, row)
        self.by_slot[slot] = node
        return node

    def drop(self, node: Node) -> None:
        """Take a leaf out."""
        assert not node.children
        assert not node.num_holds
        assert node.parent is not None
        assert node.row is not None
        del node.parent.children[node.row.token]
        del self.by_slot[node.slot]

    def drop_slots(self, slots: set[int]) -> list[Node]:
        """Take out all nodes with these slots; nothing that is held or that others go on from may be among them."""
        gone = [self.by_slot[slot] for slot in slots if slot in self.by_slot]
        for node in sorted(gone, key=lambda node: -node.depth):
            assert not node.num_holds, f"a row was freed that a running request holds: {node.row}"
            assert not node.children, f"a row was freed that others go on from: {node.row}"
            self.drop(node)
        return gone

    def clear(self) -> None:
        """Forget everything."""
        self.roots.clear()
        self.by_slot.clear()

    def num_evictable(self, *locked: list[Node]) -> int:
        """Return how many tokens nobody holds, were these paths locked too."""
        extra = {id(node) for path in locked for node in path}
        return sum(1 for node in self.by_slot.values() if not node.num_holds and id(node) not in extra)


def hold(nodes: Sequence[Node], change: int) -> None:
    """Have one request more, or one less, hold these nodes."""
    for node in nodes:
        node.num_holds += change


def row_of(node: Node) -> Row:
    """Return the row of a node that is no root."""
    assert node.row is not None
    return node.row
