"""Keys whose copy in a tier may be outdated: a put or a delete did not reach it, or was not heard to.

Such a copy is not read, not counted as present and not written over until it has been deleted. A write that was given
up may still land: while one is under way, a deletion would prove nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Doubts:
    """At most ``limit`` keys, else ``full``: whoever writes must then refuse. May be used from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: dict[bytes, int] = {}
        """How many calls about each are still under way."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    @property
    def full(self) -> bool:
        return len(self._keys) >= self._limit

    def add(self, keys: Iterable[bytes], under_way: int = 0) -> None:
        """``under_way`` calls about these have been given up and may still land; each is to be ``landed``."""
        with self._lock:
            for key in keys:
                self._keys[key] = self._keys.get(key, 0) + under_way

    def landed(self, keys: Iterable[bytes]) -> None:
        """A call that had been given up has ended."""
        with self._lock:
            for key in keys:
                if self._keys.get(key):
                    self._keys[key] -= 1

    def to_delete(self, count: int) -> list[bytes]:
        """Up to ``count`` keys whose deletion would settle them."""
        with self._lock:
            chosen: list[bytes] = []
            for key, under_way in self._keys.items():
                if not under_way:
                    chosen.append(key)
                if len(chosen) == count:
                    break
            return chosen

    def settle(self, keys: Iterable[bytes]) -> None:
        """These have been deleted."""
        with self._lock:
            for key in keys:
                if not self._keys.get(key):
                    self._keys.pop(key, None)
