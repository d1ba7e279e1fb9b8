"""Blocks that a tier lacks because it did not answer when they were stored: it gets them when it is back.

Only their keys and places are kept: the values are in another tier.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from skymemory.kv.block import Place


class Owed:
    """The latest ``limit`` of them, in the order of their storing. May be used from any thread; takes no other lock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: dict[bytes, Place] = {}
        self._lock = threading.Lock()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, places: dict[bytes, Place]) -> None:
        with self._lock:
            for key, place in places.items():
                self._places.setdefault(key, place)
            while len(self._places) > self._limit:
                del self._places[next(iter(self._places))]
                self.dropped += 1

    def first(self, count: int) -> dict[bytes, Place]:
        """The oldest; they stay."""
        with self._lock:
            return dict(islice(self._places.items(), count))

    def discard(self, keys: Iterable[bytes]) -> None:
        """These are there, or cannot be."""
        with self._lock:
            for key in keys:
                self._places.pop(key, None)
