"""Buffers that values are received into, used again: the first touch of fresh memory costs more than the bytes."""

from __future__ import annotations

import threading

import numpy as np

_KEPT = 4
ALIGNED = 64
"""Where values should begin, in bytes. ``malloc`` promises 16 and usually gives just that: what is read or summed into
such memory crosses a cache line with every other vector, and takes a quarter longer.
"""


class Rooms:
    """At most a few buffers that nobody looks into any more. May be used from any thread."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """At least ``size_bytes`` bytes, contents undefined, aligned."""
        with self._lock:
            for at, room in enumerate(self._free):
                if len(room) >= size_bytes:
                    return self._free.pop(at)
        return aligned_room(size_bytes)

    def give_back(self, room: np.ndarray) -> None:
        """Whoever had it has copied what it needs."""
        with self._lock:
            self._free.append(room)
            if len(self._free) > _KEPT:
                self._free.sort(key=len)
                del self._free[0]


def aligned_room(size_bytes: int) -> np.ndarray:
    """New memory of at least a byte that begins at a multiple of ``ALIGNED``."""
    room = np.empty(max(size_bytes, 1) + ALIGNED, dtype=np.uint8)
    begin = -room.ctypes.data % ALIGNED
    return room[begin : begin + max(size_bytes, 1)]


def aligned_bytes(size_bytes: int) -> int:
    """How far behind a value the next one begins."""
    return -(-size_bytes // ALIGNED) * ALIGNED
