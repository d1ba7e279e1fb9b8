"""When keys end: a bounded account of times, the next one known at once. Pure; the caller holds a lock."""

from __future__ import annotations

import heapq
import math


class Deadlines:
    """Keys with the time at which each ends. A key has one time: the last that was given."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []
        """Entries that differ from ``_until_s`` are stale."""
        self.next_s = math.inf
        """None ends before."""

    def __len__(self) -> int:
        return len(self._until_s)

    def give(self, key: bytes, until_s: float) -> None:
        """``key`` ends at ``until_s`` (infinite: never)."""
        self._until_s.pop(key, None)
        if until_s < math.inf:
            self._until_s[key] = until_s
            heapq.heappush(self._heap, (until_s, key))
            if len(self._heap) > 2 * len(self._until_s) + 64:  # mostly stale: rebuild
                self._heap = [(end_s, key) for key, end_s in self._until_s.items()]
                heapq.heapify(self._heap)
            self.next_s = self._heap[0][0]

    def forget(self, key: bytes) -> None:
        self._until_s.pop(key, None)

    def forget_oldest(self) -> None:
        """The one that was given first."""
        self.forget(next(iter(self._until_s)))

    def of(self, key: bytes) -> float:
        """When ``key`` ends; infinite: never, as far as is known here."""
        return self._until_s.get(key, math.inf)

    def ended(self, now_s: float) -> list[bytes]:
        """The keys whose time has come, each once; they are forgotten."""
        ended = []
        while self._heap and self._heap[0][0] <= now_s:
            end_s, key = heapq.heappop(self._heap)
            if self._until_s.get(key) == end_s:
                del self._until_s[key]
                ended.append(key)
        self.next_s = self._heap[0][0] if self._heap else math.inf
        return ended
