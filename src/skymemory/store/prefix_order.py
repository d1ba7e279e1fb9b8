"""Which keys are prefixes of which, as far as calls have told, and who may go without leaving anything behind it.

Calls name keys in the order of their chain (``store.base``), so each key's neighbour before it is known once both were
named together. A key that is here may go when nothing holds it: no key behind it that is here, no lease, no pin, no
room set aside. What was deleted, but has something behind it, holds on to what is before it all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

REMEMBERED = 16_384
"""Keys that are not here whose neighbour is remembered: those of the prompts being computed. Some 4 MB when full."""


class _Node:
    """A key that is here, or that something here or held is behind."""

    __slots__ = ("before", "depth", "here", "holds")

    def __init__(self, before: bytes | None, depth: int) -> None:
        self.before = before
        self.depth = depth
        self.holds = 0
        """Of whoever wants it kept, and one of each node behind it."""
        self.here = False


class Chains:
    """``may_go(key, yes)`` is called whenever a key that is here becomes one that may go, or ceases to be.

    Every call costs O(1) per key named, but for a key that gets its neighbour after having something behind it: then
    as many steps as it has before it, once.
    """

    def __init__(self, may_go: Callable[[bytes, bool], object], remembered: int = REMEMBERED) -> None:
        self._may_go = may_go
        self._nodes: dict[bytes, _Node] = {}
        self._before: OrderedDict[bytes, bytes] = OrderedDict()
        """Neighbours of keys that have no node; who was named longest ago first."""
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._nodes)

    def learn(self, keys: Sequence[bytes]) -> None:
        """These follow one another. What is known already stays: a key has one prefix."""
        for before, key in pairwise(keys):
            node = self._nodes.get(key)
            if node is None:
                self._remember(key, before)
            elif node.before is None:
                self._adopt(key, node, before)

    def _adopt(self, key: bytes, node: _Node, before: bytes) -> None:
        if before not in self._nodes or before == key:
            return
        if node.holds:  # calls that are no chains might name keys in a circle, and nobody in it could ever go
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
        """The key's neighbour; None at the beginning of a chain, or where nothing is known."""
        node = self._nodes.get(key)
        return self._before.get(key) if node is None else node.before

    def depth(self, key: bytes) -> int:
        """How many keys there are before it, by what was known when it came."""
        node = self._nodes.get(key)
        return 0 if node is None else node.depth

    def came(self, key: bytes) -> None:
        """It is here now; unless this says otherwise, it may go."""
        node = self._nodes.get(key)
        if node is None:
            node = self._new(key, ())
            if node.before is not None:
                self._hold_chain(node.before, {key})
        if not node.here:
            node.here = True
            if node.holds:
                self._may_go(key, False)

    def left(self, key: bytes) -> None:
        """It is here no longer."""
        node = self._nodes.get(key)
        if node is None or not node.here:
            return
        node.here = False
        if not node.holds:
            self._forget(key, node)

    def hold(self, key: bytes) -> None:
        """It is not to go, here or not, and what is before it neither, until it is freed as often."""
        self._hold_chain(key, set())

    def _hold_chain(self, key: bytes, made: set[bytes]) -> None:
        """``made``: keys whose nodes were made on the way here; nothing before them may be one of them."""
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
                    self._may_go(at, False)
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
                self._may_go(at, True)
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
