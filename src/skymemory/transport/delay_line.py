"""Link delays in user space: packets wait as long as their signal would travel, never less; lateness is recorded."""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

from skymemory.constellation.links import LinkQueue, Links
from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import percentile
from skymemory.protocol.wire import Op, SegmentBatch, header_start

Item = TypeVar("Item")

GRAIN_S = 0.010
"""Seconds within which packets of a run are delivered together, with the last."""
_HANDOVER_BYTES = 32 * 64 * 8192
_ERRORS_KEPT = 8_192
RECENT_S = 60.0


class DelayLine(Generic[Item]):
    """Queue that holds items for a delay; only for ``time.monotonic`` does it have a timer."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._timer = TimerFd() if clock_s is time.monotonic else None
        self._armed_s = math.inf
        self._releasing = False
        self._heap: list[tuple[float, int, Item]] = []
        self._order = count()
        self._errors_s: deque[tuple[float, float]] = deque(maxlen=_ERRORS_KEPT)
        self._worst_s = 0.0
        self._released = 0

    def __len__(self) -> int:
        return len(self._heap)

    def fileno(self) -> int:
        if self._timer is None:
            raise ValueError("a delay line on a simulated clock has no timer")
        return self._timer.fileno()

    def push(self, delay_s: float, item: Item) -> float:
        due_s = self._clock_s() + delay_s
        heapq.heappush(self._heap, (due_s, next(self._order), item))
        if due_s < self._armed_s and not self._releasing:
            self._arm()
        return due_s

    def late_s(self) -> float:
        return self._clock_s() - self._heap[0][0] if self._heap else -math.inf

    def pop_due(self) -> Iterator[Item]:
        self._releasing = True
        try:
            while self._heap:
                now_s = self._clock_s()
                error_s = now_s - self._heap[0][0]
                if error_s < 0:
                    break
                self._errors_s.append((now_s, error_s))
                self._worst_s = max(self._worst_s, error_s)
                self._released += 1
                yield heapq.heappop(self._heap)[2]
        finally:
            self._releasing = False
            self._arm()

    def _arm(self) -> None:
        self._armed_s = self._heap[0][0] if self._heap else math.inf
        if self._timer is not None:
            self._timer.arm(max(1, math.ceil(self._armed_s * 1e9)) if self._heap else 0)

    def report(self) -> dict[str, float]:
        since_s = self._clock_s() - RECENT_S
        errors_s = [error_s for released_s, error_s in self._errors_s if released_s >= since_s]
        return {
            "hold_count": self._released,
            "hold_error_p50_s": percentile(errors_s, 50) if errors_s else 0.0,
            "hold_error_p99_s": percentile(errors_s, 99) if errors_s else 0.0,
            "hold_error_max_s": self._worst_s,
        }

    def close(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.close()


# Linux's timerfd is exact to some tens of microseconds. Event loops round their timers: asyncio's fire some 0.3 ms
# late, uvloop's up to 0.9 ms early, which no signal at the speed of light can. ``os.timerfd_create`` exists from Python
# 3.13; with earlier versions, the C library is called.

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
    """Absolute timer on ``time.monotonic``'s clock, readable once fired.

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
        """Fire at ``at_ns``, instead of any earlier setting; 0 disarms."""
        if sys.version_info >= (3, 13):
            os.timerfd_settime_ns(self._fd, flags=os.TFD_TIMER_ABSTIME, initial=at_ns)
            return
        setting = _Interval(0, 0, at_ns // _NS, at_ns % _NS)
        self._checked(self._library.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(setting), None))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_urgent(batch: SegmentBatch, sender: object, receiver: object) -> bool:
    """Return True for LINKS between satellites: queued, they would make a neighbour look dead."""
    if not (isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId)):
        return False
    op_at = header_start(memoryview(batch.headers)) + 1
    return len(batch.headers) > op_at and batch.headers[op_at] == Op.LINKS


def handover_timeout_s(timeout_s: float, links: Links) -> float:
    return timeout_s + min(links.buffer_bytes, _HANDOVER_BYTES) / links.bytes_per_s("isl")


def groups(
    queue: LinkQueue, datagrams: list[bytes], now_s: float, urgent: bool = False
) -> Iterator[tuple[float, SegmentBatch]]:
    """Yield groups of datagrams as a link's ``queue`` lets them leave, with the seconds until the last bit; lost
    datagrams are left out.
    """
    group: list[bytes] = []
    first_s = last_s = 0.0
    for data in datagrams:
        leaves_s = queue.leaves_s(len(data), now_s, urgent)
        if leaves_s < 0.0:
            continue
        joins = group and len(group[-1]) == len(group[0]) >= len(data) and leaves_s - first_s <= GRAIN_S
        if group and not joins:
            yield last_s - now_s, SegmentBatch(b"".join(group), len(group[0]))
            group = []
        if not group:
            first_s = leaves_s
        group.append(data)
        last_s = leaves_s
    if group:
        yield last_s - now_s, SegmentBatch(b"".join(group), len(group[0]))
