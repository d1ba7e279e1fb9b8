"""Overload of a host, and the background packets that wait meanwhile.

A late host also reads answers late, so its satellites give neighbours longer timeouts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from skymemory import native
from skymemory.native import Run
from skymemory.protocol.wire import SKY_BYTES, LinkEnd, Op, header_start

LATE_S = 0.05
_PERSISTS_S = 0.25
_FADES_S = 0.5
MOST_BYTES = 1 << 20
MOST_AGE_S = 2.0
_BACKGROUND = (Op.MIGRATE, Op.CHECK, Op.NOTICE)
_BETWEEN_SATELLITES = (Op.HAS, Op.RETAIN)


class Lateness:
    """Delay of a host's events, shared by its machines.

    A host is overloaded if even the *shortest* wait has been long for a while (CoDel, RFC 8289).
    """

    def __init__(self) -> None:
        self._longest_wait_s = 0.0
        self._longest_wait_at_s = -math.inf
        self._on_time_s = math.inf

    def measured(self, late_s: float, now_s: float) -> None:
        """Record an event's delay. Call this for events on time, too."""
        if late_s <= LATE_S:
            self._on_time_s = now_s
        elif self._on_time_s == math.inf:
            self._on_time_s = now_s - late_s
        if late_s > 0.0 and late_s >= self.at(now_s):
            self._longest_wait_s, self._longest_wait_at_s = late_s, now_s

    def at(self, now_s: float) -> float:
        """Return the longest recent wait, decaying; rounded, so that it ends."""
        if not self._longest_wait_s:
            return 0.0
        wait_s = self._longest_wait_s * math.exp(-max(0.0, now_s - self._longest_wait_at_s) / _FADES_S)
        return round(wait_s * 1e6) / 1e6

    def is_late(self, now_s: float) -> bool:
        return now_s - self._on_time_s > _PERSISTS_S


class Postponed:
    """Bounded queue of background packets that arrive while the host is late; the oldest are dropped first.

    Their senders repeat them: handovers, checks, gossip, also in transit.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[float, memoryview, int, LinkEnd]] = deque()
        self._bytes = 0
        self.kept = self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def sift(self, runs: list[Run], source: LinkEnd, now_s: float) -> list[Run]:
        """Return foreground packets; background packets are queued."""
        foreground = []
        for view, size in runs:
            for part, part_size in _split_by_journey(view, size):
                if part_size > 0 and _is_background(part):
                    self._postpone(part, part_size, source, now_s)
                else:
                    foreground.append((part, part_size))
        return foreground

    def _postpone(self, view: memoryview, size: int, source: LinkEnd, now_s: float) -> None:
        self.kept += -(-len(view) // size)
        self._queue.append((now_s, memoryview(bytes(view)), size, source))
        self._bytes += len(view)
        while self._bytes > MOST_BYTES and len(self._queue) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, view, size, _ = self._queue.popleft()
        self._bytes -= len(view)
        self.dropped += -(-len(view) // size)

    def take(self, now_s: float) -> tuple[memoryview, int, LinkEnd, float] | None:
        while self._queue and self._queue[0][0] + MOST_AGE_S < now_s:
            self._drop_oldest()
        if not self._queue:
            return None
        arrived_s, view, size, source = self._queue.popleft()
        self._bytes -= len(view)
        return view, size, source, arrived_s


def _split_by_journey(view: memoryview, size: int) -> Iterator[Run]:
    if size <= 0 or native.same_journey(view, size):
        yield view, size
    else:
        for at in range(0, len(view), size):
            part = view[at : at + size]
            yield part, len(part)


def _is_background(view: memoryview) -> bool:
    start = header_start(view)
    if len(view) < start + SKY_BYTES:
        return False
    op = view[start + 1]
    return op in _BACKGROUND or (op in _BETWEEN_SATELLITES and not any(view[start + 12 : start + 16]))
