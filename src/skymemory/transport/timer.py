"""A clock's alarm as a file descriptor: Linux's timerfd, exact to some tens of microseconds.

Event loops round their own timers: asyncio's come some 0.3 ms late, uvloop's up to 0.9 ms early, which a
signal at the speed of light cannot. ``os.timerfd_create`` exists from Python 3.13; before, the C library is
called.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_NS = 1_000_000_000


class _Interval(ctypes.Structure):
    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class TimerFd:
    """One absolute alarm on the clock of ``time.monotonic``; ``fileno`` is readable once it has gone off.

    Raises:
        OSError: the system has no timerfd, or no descriptor is left.
    """

    def __init__(self) -> None:
        if sys.version_info >= (3, 13):
            self._fd = os.timerfd_create(_CLOCK_MONOTONIC, flags=_FLAGS)
            return
        self._library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "timerfd_create"):
            raise OSError("this system has no timerfd: delays need Linux")
        self._fd = self._checked(self._library.timerfd_create(_CLOCK_MONOTONIC, _FLAGS))

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def fileno(self) -> int:
        return self._fd

    def arm(self, at_ns: int) -> None:
        """Go off at ``at_ns`` (at once if that is past), instead of any time set before; 0 disarms."""
        if sys.version_info >= (3, 13):
            os.timerfd_settime_ns(self._fd, flags=os.TFD_TIMER_ABSTIME, initial=at_ns)
            return
        setting = _Interval(0, 0, at_ns // _NS, at_ns % _NS)
        self._checked(self._library.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(setting), None))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
