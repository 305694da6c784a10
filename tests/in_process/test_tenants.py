"""Two tenants send the same text, in every order: nobody is ever served what an edit of the other one acts on.

Each of the two may request, splice, release and forget, 8 operations in all. The texts are few and come again, so that
many of the 8 ** 6 sequences of 6 operations lead through the same states of server and clients. The graph of these
states is walked, until every operation was tried from each state that 5 or fewer operations lead to. That is what all
those sequences try.

What makes a state is in `_state`: all that is cached and what was computed from what, the footprints, the server's
memory of turns, and the clients'. Left out are names (slots, nonces, ids of edits), the order in which rows were used
last (the pool is large, nothing is evicted) and where the radix tree has split its nodes, which no answer depends on.
Whenever an edge is walked once more it must lead to the same state as before, so what was left out would be noticed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from leyline_sglang import turn
from leyline_sglang.footprints import footprints_of
from leyline_sglang.namespaces import own_salt

from leyline_agent.core.plan import apply_directives
from leyline_agent.core.protocol import Directive, hash_token_ids
from tests.in_process.clients import Client
from tests.in_process.harness import World
from tests.in_process.mirror import is_own
from tests.in_process.model import Namespace, Node

pytestmark = pytest.mark.slow

OUTPUTS = [10]
EDITS = (
    Directive(start=2, end=5, replacement_ids=(9,)),
    Directive(start=3, end=4),
)


def _prompts() -> list[list[int]]:
    """Return a conversation's prompt before any edit, after one, and after two."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8]]
    for edit in EDITS:
        prompts.append([*apply_directives(prompts[-1] + OUTPUTS, [edit]), 12])
    return prompts


PROMPTS = _prompts()

OPERATIONS = ("request", "splice", "release", "forget")
Operation = tuple[int, str]
"""Which tenant, and what it does."""
ALL_OPERATIONS: list[Operation] = list(itertools.product((0, 1), OPERATIONS))

TENANTS: dict[str, list[dict[str, Any]]] = {
    "one caller": [{}, {}],
    "two callers": [{"cache_salt": "caller a"}, {"cache_salt": "caller b"}],
}


class Tenant:
    """One conversation, at one of the prompts."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.at = 0
        self.has_sent = False

    def do(self, operation: str) -> None:
        """Carry out an operation; the client checks what it was served with."""
        if operation == "release":
            self.client.release()
        elif operation == "request":
            self._send(self.at)
        elif operation == "forget":
            self._send(self.at, forget="all", **({"base": f"turn {self.at}"} if self.has_sent else {}))
        elif self.at == len(EDITS):
            # Both edits are made; the conversation begins anew.
            self._send(0)
        else:
            base = PROMPTS[self.at] + OUTPUTS
            self._send(
                self.at + 1,
                base=f"turn {self.at}",
                directives=(EDITS[self.at],),
                base_len=len(base),
                base_hash=hash_token_ids(base),
            )

    def _send(self, at: int, **note: Any) -> None:
        self.at = at
        self.has_sent = True
        self.client.turns.clear()
        self.client.chat(PROMPTS[at], outputs=OUTPUTS, turn_id=f"turn {at}", **note)


class Tenants:
    """Two tenants of one server."""

    def __init__(self, core: str, callers: list[dict[str, Any]]) -> None:
        self.world = World(core, size=256)
        self.tenants = [Tenant(Client(self.world, name, **caller)) for name, caller in zip("ab", callers, strict=True)]

    def do(self, operation: Operation) -> None:
        """Carry out an operation of one tenant; all is checked after it."""
        who, what = operation
        self.tenants[who].do(what)

    def state(self) -> Any:
        """Return all that later operations depend on, without the names that are new in every run."""
        world = self.world
        own = [tenant.client.own_namespace for tenant in self.tenants]
        names: dict[Namespace, str] = {namespace: f"own {idx}" for idx, namespace in enumerate(own) if namespace}
        live: list[tuple[str, Any]] = []
        for namespace, root in world.model.roots.items():
            if root.children:
                name = names.get(namespace, "left" if is_own(namespace) else namespace[1])
                live.append((str(name), _tree(root)))
        known = footprints_of(world.tree)
        return (
            tuple(sorted(live)),
            tuple((tenant.at, tenant.has_sent, _memory_of(tenant.client)) for tenant in self.tenants),
            tuple(
                tuple((is_own(sequence.namespace()), tuple(sequence.token_ids)) for sequence in known.sequences(salt))
                for _, salt in filter(None, own)
                if salt is not None
            ),
            known.due,
        )


def _tree(node: Node) -> tuple[Any, ...]:
    """Return what is cached below a node: tokens, what each was computed from, and which edits act on it."""
    numbers: dict[Any, int] = {}

    def below(node: Node) -> tuple[Any, ...]:
        found = []
        for token in sorted(node.children):
            child = node.children[token]
            assert child.row is not None
            acting = sorted(numbers.setdefault(influence, len(numbers)) for influence in sorted(child.influences))
            found.append((token, child.row.digest, tuple(acting), below(child)))
        return tuple(found)

    return below(node)


def _memory_of(client: Client) -> Any:
    scope = (client.extra_key, client.cache_salt or None)
    conversation = client.world.serving.memory.find(scope, client.conversation_id)
    if conversation is None:
        return None
    turns = [
        (
            turn_id,
            kept.in_own,
            tuple(map(tuple, kept.sequences())),
            tuple((edit.position, edit.turn, edit.removed_tokens, edit.replacement_tokens) for edit in kept.edits),
        )
        for turn_id, kept in conversation.turns.items()
    ]
    return conversation.has_namespace, len(conversation.closing), tuple(turns)


class Walk:
    """Walks along every edge that a sequence of `num_operations` can come along, whatever it begins with."""

    def __init__(self, make: Callable[[], Tenants], num_operations: int) -> None:
        self._make = make
        self._num_operations = num_operations
        self._numbers: dict[Any, int] = {}
        """A number for each state: a state is long, and hashing it takes longer than walking there."""
        self.edges: list[dict[Operation, int]] = []
        self._depths: list[int] = []
        self.num_walked = 0

    def run(self) -> None:
        """Go on until every operation was tried from each state that fewer operations lead to."""
        tenants = self._make()
        here = first = self._number(tenants.state())
        self._reach(first, 0)
        try:
            while True:
                route = self._route(here)
                if route is None:
                    route = self._route(first)
                    if route is None:
                        return
                    tenants.world.close()
                    tenants, here = self._make(), first
                for operation in route:
                    tenants.do(operation)
                    self.num_walked += 1
                    there = self._number(tenants.state())
                    known = self.edges[here].setdefault(operation, there)
                    assert known == there, f"{operation} led elsewhere the second time"
                    self._reach(there, self._depths[here] + 1)
                    here = there
        finally:
            tenants.world.close()

    def states(self, depth: int) -> list[int]:
        """Return the states that so many operations or fewer lead to."""
        return [state for state, found in enumerate(self._depths) if found <= depth]

    def _number(self, state: Any) -> int:
        number = self._numbers.setdefault(state, len(self._numbers))
        if number == len(self.edges):
            self.edges.append({})
            self._depths.append(self._num_operations + 1)
        return number

    def _reach(self, state: int, depth: int) -> None:
        """Take note that a state can be reached by so many operations, and what follows from it."""
        queue = deque([(state, depth)])
        while queue:
            state, depth = queue.popleft()
            if depth < self._depths[state]:
                self._depths[state] = depth
                queue.extend((there, depth + 1) for there in self.edges[state].values())

    def _route(self, start: int) -> list[Operation] | None:
        """Return the shortest way from a state along a new edge; None where there is none."""
        came_from: dict[int, tuple[int, Operation] | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            if len(self.edges[state]) < len(ALL_OPERATIONS) and self._depths[state] < self._num_operations:
                route = [next(operation for operation in ALL_OPERATIONS if operation not in self.edges[state])]
                while (step := came_from[state]) is not None:
                    state, operation = step
                    route.append(operation)
                return route[::-1]
            for operation, there in self.edges[state].items():
                if there not in came_from:
                    came_from[there] = (state, operation)
                    queue.append(there)
        return None


def every_order(core: str, callers: list[dict[str, Any]], num_operations: int) -> None:
    """Try every sequence of so many operations."""
    walk = Walk(lambda: Tenants(core, callers), num_operations)
    walk.run()
    assert all(len(walk.edges[state]) == len(ALL_OPERATIONS) for state in walk.states(num_operations - 1))


@pytest.mark.parametrize("callers", TENANTS.values(), ids=TENANTS)
def test_nobody_is_served_what_an_edit_of_another_tenant_acts_on(core: str, callers: list[dict[str, Any]]) -> None:
    every_order(core, callers, 4)


@pytest.mark.slow
@pytest.mark.parametrize("callers", TENANTS.values(), ids=TENANTS)
def test_nor_after_any_six_operations(callers: list[dict[str, Any]]) -> None:
    # On the core that a server has by default.
    every_order("rust", callers, 6)


def test_without_a_namespace_of_its_own_the_check_fails(core: str) -> None:
    def one_for_all(secret: str, *, conversation_hash: str, caller_salt: str | None, nonce: str) -> str:
        # The nonce is a conversation's own too, so leaving out the hash alone would change nothing.
        return own_salt(secret, conversation_hash="", caller_salt=caller_salt, nonce="")

    walk = Walk(lambda: Tenants(core, TENANTS["one caller"]), num_operations=4)
    with patch.object(turn, "own_salt", one_for_all), pytest.raises(AssertionError, match="is served a row that"):
        walk.run()
