"""Keys by rank, the lowest first; of equal ranks the one ranked longest ago. The order behind several policies."""

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
        """Rank, stamp, key; entries that ``_ranks`` no longer has are stale."""
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, key: bytes) -> Rank | None:
        known = self._ranks.get(key)
        return None if known is None else known[0]

    def put(self, key: bytes, rank: Rank) -> None:
        """The key, here or not, has this rank from now on and is the newest of it."""
        self._stamp += 1
        self._ranks[key] = (rank, self._stamp)
        heapq.heappush(self._heap, (rank, self._stamp, key))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [(rank, stamp, here) for here, (rank, stamp) in self._ranks.items()]
            heapq.heapify(self._heap)

    def pop(self, key: bytes) -> Rank | None:
        """The key goes; its rank, or None if it was not here."""
        known = self._ranks.pop(key, None)
        return None if known is None else known[0]

    def first(self, but: bytes | None = None) -> bytes | None:
        """The key of the lowest rank that is not ``but``; None if there is no other."""
        found, spared = None, None
        while self._heap and found is None:
            rank, stamp, key = self._heap[0]
            if self._ranks.get(key) == (rank, stamp):
                if key != but:
                    found = key
                    break
                spared = self._heap[0]
            heapq.heappop(self._heap)
        if spared is not None:
            heapq.heappush(self._heap, spared)
        return found

    def order(self) -> list[bytes]:
        """All keys, the lowest rank first."""
        return sorted(self._ranks, key=lambda key: self._ranks[key])
