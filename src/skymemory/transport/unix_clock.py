"""Unix time of a process: a running clock that is never set, and the wall clock.

``now_s`` never runs backwards and counts suspends, unlike ``CLOCK_MONOTONIC``. No computer knows if a wall clock was
set rightly, so ``now_s`` continues unchanged; a process may follow ``wall_shift_s``, but only forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

_RUNNING: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
STEP_S = 1.0
"""Difference of a wall clock that was set; less is drift."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def wall_s() -> float:
    return time.time()


running_s: Callable[[], float] = partial(time.clock_gettime, _RUNNING)


def boot_id() -> str:
    """Return the name of the run during which ``running_s`` continues, if known."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class UnixClock:
    """Unix time on a clock that is never set; ``follow_wall`` alone may move it, forward."""

    def __init__(self, wall: Callable[[], float] = wall_s, running: Callable[[], float] = running_s) -> None:
        self._wall = wall
        self._running = running
        self._offset_s = wall() - running()

    def count_from(self, unix_at_boot_s: float | None) -> None:
        """Count from this Unix time at second 0 of the running clock."""
        if unix_at_boot_s is not None:
            self._offset_s = unix_at_boot_s

    def now_s(self) -> float:
        return self._running() + self._offset_s

    def wall_shift_s(self) -> float:
        """Return the wall clock's lead (negative if behind); 0 if less than ``STEP_S``."""
        shift_s = self._wall() - self._running() - self._offset_s
        return shift_s if abs(shift_s) >= STEP_S else 0.0

    def follow_wall(self) -> float:
        """Set this clock forward to the wall clock, if behind. Return the seconds."""
        offset_s = self._wall() - self._running()  # absolute: two threads that see the same step follow it once
        ahead_s = offset_s - self._offset_s
        if ahead_s < STEP_S:
            return 0.0
        self._offset_s = offset_s
        return ahead_s
