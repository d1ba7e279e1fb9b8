"""Return of free memory to the system.

The C library keeps what was freed between objects that live, which may be hundreds of megabytes. ``malloc_trim``
(glibc) returns it, but looks through the whole heap.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

GROWN_BYTES = 64 << 20
FIRST_S, MOST_S = 5.0, 80.0
LOOK_S = 1.0


class TrimTimes:
    """Times to trim the heap: after growth, ever more rarely while that frees little."""

    def __init__(self) -> None:
        self._last_bytes = 0  # resident memory after the last trim
        self._least_bytes: float = float("inf")  # the smallest of these
        self._next_s = self._wait_s = 0.0

    def is_due(self, resident_bytes: int, now_s: float) -> bool:
        """Return True if the process has grown by a quarter since the last trim, or is above its least size."""
        has_grown = resident_bytes > 1.25 * self._last_bytes + GROWN_BYTES
        return has_grown or (resident_bytes > self._least_bytes + GROWN_BYTES and now_s >= self._next_s)

    def on_trim(self, before_bytes: int, after_bytes: int, now_s: float) -> None:
        self._last_bytes, self._least_bytes = after_bytes, min(self._least_bytes, after_bytes)
        is_useful = before_bytes - after_bytes > GROWN_BYTES // 4
        self._wait_s = FIRST_S if is_useful else min(2.0 * max(self._wait_s, FIRST_S), MOST_S)
        self._next_s = now_s + self._wait_s


@contextmanager
def trimmed_heap() -> Iterator[None]:
    """Return freed memory to the system (``malloc_trim``) from a thread. Do nothing where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not os.path.exists("/proc/self/statm"):
        yield
        return
    stop = threading.Event()

    def run() -> None:
        times = TrimTimes()
        while not stop.wait(LOOK_S):
            before = resident_bytes()
            if times.is_due(before, time.monotonic()):
                trim(0)
                times.on_trim(before, resident_bytes(), time.monotonic())

    thread = threading.Thread(target=run, name="heap", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
