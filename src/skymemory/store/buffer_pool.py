"""Buffers for received values, reused: touching fresh memory for the first time costs more than filling it."""

from __future__ import annotations

import threading

import numpy as np

_KEPT = 4
ALIGNED = 64
"""Alignment of values in bytes. ``malloc`` gives 16: reading into such memory crosses a cache line with every other
vector, and takes a quarter longer.
"""


class BufferPool:
    """Keeps a few free buffers. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> np.ndarray:
        """At least ``size_bytes`` bytes, contents undefined, aligned."""
        with self._lock:
            for at, buffer in enumerate(self._free):
                if len(buffer) >= size_bytes:
                    return self._free.pop(at)
        return aligned_buffer(size_bytes)

    def give_back(self, buffer: np.ndarray) -> None:
        """No view of it is in use any more."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > _KEPT:
                self._free.sort(key=len)
                del self._free[0]


def aligned_buffer(size_bytes: int) -> np.ndarray:
    """New memory, at least a byte, that begins at a multiple of ``ALIGNED``."""
    buffer = np.empty(max(size_bytes, 1) + ALIGNED, dtype=np.uint8)
    begin = -buffer.ctypes.data % ALIGNED
    return buffer[begin : begin + max(size_bytes, 1)]


def aligned_bytes(size_bytes: int) -> int:
    """Bytes from the beginning of a value to that of the next."""
    return -(-size_bytes // ALIGNED) * ALIGNED
