"""Buffers that values are received into, used again: the first touch of fresh memory costs more than the bytes."""

from __future__ import annotations

import threading

import numpy as np

_KEPT = 4


class Rooms:
    """At most a few buffers that nobody looks into any more. May be used from any thread."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """At least ``size_bytes`` bytes, contents undefined."""
        with self._lock:
            for at, room in enumerate(self._free):
                if len(room) >= size_bytes:
                    return self._free.pop(at)
        return np.empty(max(size_bytes, 1), dtype=np.uint8)

    def give_back(self, room: np.ndarray) -> None:
        """Whoever had it has copied what it needs."""
        with self._lock:
            self._free.append(room)
            if len(self._free) > _KEPT:
                self._free.sort(key=len)
                del self._free[0]
