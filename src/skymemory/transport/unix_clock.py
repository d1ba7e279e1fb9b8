"""Unix time for the state machines: it never runs backwards, and counts the time that the computer sleeps or its
virtual machine is paused.

``CLOCK_MONOTONIC`` stops in a suspend: a process that used it would lag behind those started later. ``CLOCK_BOOTTIME``
counts suspends, but perhaps not the pause of a whole virtual machine; then the wall clock is set forward, and this
clock follows it. It does not follow a wall clock that is set back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_RUNNING: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_STEP_S = 1.0
"""A wall clock further ahead than this was set; less is drift, and its correction."""


def wall_s() -> float:
    return time.time()


def running_s() -> float:
    """Seconds since some time in the past, with those in a suspend."""
    return time.clock_gettime(_RUNNING)


class UnixClock:
    """The clock of one process. ``wall`` and ``running`` are its sources."""

    def __init__(self, wall: Callable[[], float] = wall_s, running: Callable[[], float] = running_s) -> None:
        self._wall = wall
        self._running = running
        self._offset_s = wall() - running()

    def now_s(self) -> float:
        return self._running() + self._offset_s

    def follow_wall(self) -> float:
        """Call it now and then; returns by how many seconds this clock was set forward."""
        offset_s = self._wall() - self._running()  # absolute: two threads that see one step follow it once
        ahead_s = offset_s - self._offset_s
        if ahead_s < _STEP_S:
            return 0.0
        self._offset_s = offset_s
        return ahead_s
