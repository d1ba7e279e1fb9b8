"""The order of blocks in their chains, and which of them may be evicted without leaving others behind a hole.

Calls name keys in the order of their chain (``store.base``), so a key's predecessor is known once both were named
together. A key that is here is evictable when nothing holds it: no key behind it that is here, no lease, pin or
reservation. A deleted key that has others behind it still holds those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

REMEMBERED = 16_384
"""Absent keys whose predecessor is remembered: those of the prompts being computed. Some 4 MB when full."""


class _Node:
    """A key that is here, or that precedes one that is here or held."""

    __slots__ = ("before", "depth", "here", "holds")

    def __init__(self, before: bytes | None, depth: int) -> None:
        self.before = before
        self.depth = depth
        self.holds = 0
        """Calls of ``hold`` for it, and one for each node behind it."""
        self.here = False


class PrefixOrder:
    """``set_evictable(key, evictable)`` is called whenever that changes for a key that is here.

    Every call costs O(1) per key named, except for a key that gets its predecessor after others came behind it: that
    takes a step for each key before it, once.
    """

    def __init__(self, set_evictable: Callable[[bytes, bool], object], remembered: int = REMEMBERED) -> None:
        self._set_evictable = set_evictable
        self._nodes: dict[bytes, _Node] = {}
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        """Predecessors of keys without a node, in the order in which they were last named."""
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._nodes)

    def learn(self, keys: Sequence[bytes]) -> None:
        """These follow one another. What is known stays: a key has one prefix."""
        for before, key in pairwise(keys):
            node = self._nodes.get(key)
            if node is None:
                self._remember(key, before)
            elif node.before is None:
                self._adopt(key, node, before)

    def _adopt(self, key: bytes, node: _Node, before: bytes) -> None:
        if before not in self._nodes or before == key:
            return
        if node.holds:  # calls that are no chains might name keys in a circle, which could never be evicted
            above: bytes | None = before
            while above is not None:
                if above == key:
                    return
                above = self._nodes[above].before
        node.before, node.depth = before, self._nodes[before].depth + 1
        self.hold(before)

    def _remember(self, key: bytes, before: bytes) -> None:
        self._before.setdefault(key, before)
        self._before.move_to_end(key)
        if len(self._before) > self._remembered:
            self._before.popitem(last=False)

    def before(self, key: bytes) -> bytes | None:
        """The key's predecessor; None at the start of a chain, or if unknown."""
        node = self._nodes.get(key)
        return self._before.get(key) if node is None else node.before

    def depth(self, key: bytes) -> int:
        """Number of keys before it, as known when it was added."""
        node = self._nodes.get(key)
        return 0 if node is None else node.depth

    def added(self, key: bytes) -> None:
        """It is here now; evictable, unless ``set_evictable`` says otherwise."""
        node = self._nodes.get(key)
        if node is None:
            node = self._new(key, ())
            if node.before is not None:
                self._hold_chain(node.before, {key})
        if not node.here:
            node.here = True
            if node.holds:
                self._set_evictable(key, False)

    def removed(self, key: bytes) -> None:
        """It is no longer here."""
        node = self._nodes.get(key)
        if node is None or not node.here:
            return
        node.here = False
        if not node.holds:  # else it stays as a node: blocks behind it hold those before it
            self._forget(key, node)

    def hold(self, key: bytes) -> None:
        """Keep it, here or not, and the keys before it from eviction, until ``free`` was called as often."""
        self._hold_chain(key, set())

    def _hold_chain(self, key: bytes, made: set[bytes]) -> None:
        """``made``: keys whose nodes this call has created; none of them may precede another."""
        at: bytes | None = key
        while at is not None:
            node = self._nodes.get(at)
            is_new = node is None
            if node is None:
                node = self._new(at, made)
                made.add(at)
            node.holds += 1
            if not is_new:
                if node.holds == 1:
                    self._set_evictable(at, False)
                return
            at = node.before

    def free(self, key: bytes) -> None:
        at: bytes | None = key
        while at is not None:
            node = self._nodes[at]
            node.holds -= 1
            if node.holds:
                return
            if node.here:
                self._set_evictable(at, True)
                return
            del self._nodes[at]
            if node.before is not None:
                self._remember(at, node.before)
            at = node.before

    def _new(self, key: bytes, made: set[bytes] | tuple[()]) -> _Node:
        before = self._before.pop(key, None)
        if before is not None and (before == key or before in made):
            before = None
        above = self._nodes.get(before) if before is not None else None
        self._nodes[key] = node = _Node(before, 0 if before is None else 1 + (above.depth if above else 0))
        return node

    def _forget(self, key: bytes, node: _Node) -> None:
        del self._nodes[key]
        if node.before is not None:
            self._remember(key, node.before)
            self.free(node.before)
