"""Keys ordered by rank, then by the time at which they got it: the priority queue of every policy."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Rank = TypeVar("Rank", int, float)


class RankedKeys(Generic[Rank]):
    """A heap with stale entries, rebuilt when they are three in four: every call costs O(log keys) on average."""

    def __init__(self) -> None:
        self._ranks: dict[bytes, tuple[Rank, int]] = {}
        """Rank and stamp."""
        self._heap: list[tuple[Rank, int, bytes]] = []
        """Rank, stamp, key; entries of keys that are held, or that ``_ranks`` no longer has, are stale."""
        self._held: set[bytes] = set()
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, key: bytes) -> Rank | None:
        known = self._ranks.get(key)
        return None if known is None else known[0]

    def put(self, key: bytes, rank: Rank) -> None:
        """Insert the key or change its rank; it is the newest of this rank."""
        self._stamp += 1
        self._ranks[key] = (rank, self._stamp)
        if key not in self._held:
            self._push(key)

    def _push(self, key: bytes) -> None:
        rank, stamp = self._ranks[key]
        heapq.heappush(self._heap, (rank, stamp, key))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [(rank, stamp, here) for here, (rank, stamp) in self._ranks.items() if here not in self._held]
            heapq.heapify(self._heap)

    def hold(self, key: bytes) -> None:
        """Exclude from ``first`` until it is freed, whatever its rank. The key may be inserted later."""
        self._held.add(key)

    def free(self, key: bytes) -> None:
        if key in self._held:
            self._held.discard(key)
            if key in self._ranks:
                self._push(key)

    def holds(self, key: bytes) -> bool:
        return key in self._held

    def pop(self, key: bytes) -> Rank | None:
        """Remove the key, held or not; returns its rank, None if unknown."""
        self._held.discard(key)
        known = self._ranks.pop(key, None)
        return None if known is None else known[0]

    def first(self, but: bytes | None = None) -> bytes | None:
        """The key of the lowest rank that is not held and not ``but``; None if there is none."""
        found, spared = None, None
        while self._heap and found is None:
            rank, stamp, key = self._heap[0]
            if key not in self._held and self._ranks.get(key) == (rank, stamp):
                if key != but:
                    found = key
                    break
                spared = self._heap[0]
            heapq.heappop(self._heap)
        if spared is not None:
            heapq.heappush(self._heap, spared)
        return found

    def order(self) -> list[bytes]:
        """All keys, held ones included, the lowest rank first."""
        return sorted(self._ranks, key=lambda key: self._ranks[key])
