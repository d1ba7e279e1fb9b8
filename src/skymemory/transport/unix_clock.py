"""Unix time for machines: never runs back, and runs on while the computer sleeps or its virtual machine is paused.

``CLOCK_MONOTONIC`` stands still in a suspend: a process that counted by it would lag behind those started later by as
long as the computer slept. ``CLOCK_BOOTTIME`` counts that time. It may not count the pause of a whole virtual machine;
then the wall clock is set forward, and that is followed. A wall clock that is set back is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_RUNNING: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_STEP_S = 1.0
"""A wall clock further ahead than this was set; what is less is its drift, and its correction."""


def wall_s() -> float:
    return time.time()


def running_s() -> float:
    """Seconds that passed since some time in the past, also those in a suspend."""
    return time.clock_gettime(_RUNNING)


class UnixClock:
    """One process's. ``wall`` and ``running`` are its sources."""

    def __init__(self, wall: Callable[[], float] = wall_s, running: Callable[[], float] = running_s) -> None:
        self._wall = wall
        self._running = running
        self._offset_s = wall() - running()

    def now_s(self) -> float:
        return self._running() + self._offset_s

    def follow_wall(self) -> float:
        """To be called now and then: how many seconds the time has gone forward because the wall clock was set."""
        offset_s = self._wall() - self._running()  # absolute: two threads that see one step follow it once
        ahead_s = offset_s - self._offset_s
        if ahead_s < _STEP_S:
            return 0.0
        self._offset_s = offset_s
        return ahead_s
