"""A bounded queue for background packets that come while the host is late; answers go first, the oldest is dropped.

Background is what satellites ask of each other for the good of later reads: handovers, checks of copies and of
suspected losses, gossip; also in transit. No read waits for it, and its sender repeats it. Signs of life and
declarations of links are not background: delayed, they would make living satellites look dead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from skymemory.native import Run
from skymemory.protocol.routing import LinkEnd, header_start, same_journey
from skymemory.protocol.wire import SKY_BYTES, Op

MOST_BYTES = 1 << 20
MOST_AGE_S = 2.0
"""What has waited longer is dropped: its sender has repeated it, or will."""
_BACKGROUND = (Op.MIGRATE, Op.CHECK, Op.NOTICE)
_BETWEEN_SATELLITES = (Op.HAS, Op.RETAIN)
"""Background only between satellites: a ground host waits for the answer."""


class Postponed:
    """Of one satellite. Packets are copied: what a transport hands over is good only during the call."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, memoryview, int, LinkEnd]] = deque()
        self._bytes = 0
        self.kept = self.dropped = 0
        """Packets, so far."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    def sift(self, runs: list[Run], source: LinkEnd, now_s: float) -> list[Run]:
        """Keep the background work among these; the rest is returned, in its order."""
        rest = []
        for view, size in runs:
            for part, part_size in _journeys(view, size):
                if part_size > 0 and _is_background(part):
                    self._keep(part, part_size, source, now_s)
                else:
                    rest.append((part, part_size))
        return rest

    def _keep(self, view: memoryview, size: int, source: LinkEnd, now_s: float) -> None:
        self.kept += -(-len(view) // size)
        self._queue.append((now_s, memoryview(bytes(view)), size, source))
        self._bytes += len(view)
        while self._bytes > MOST_BYTES and len(self._queue) > 1:
            self._drop()

    def _drop(self) -> None:
        _, view, size, _ = self._queue.popleft()
        self._bytes -= len(view)
        self.dropped += -(-len(view) // size)

    def take(self, now_s: float) -> tuple[memoryview, int, LinkEnd, float] | None:
        """The oldest that is not too old, and when it came."""
        while self._queue and self._queue[0][0] + MOST_AGE_S < now_s:
            self._drop()
        if not self._queue:
            return None
        came_s, view, size, source = self._queue.popleft()
        self._bytes -= len(view)
        return view, size, source, came_s


def _journeys(view: memoryview, size: int) -> Iterator[Run]:
    """A run as packets that have one operation, destination and status each."""
    if size <= 0 or same_journey(view, size):
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


# How late a host is with its own work, as its transport measures it: so that its own delay is not read as the death of
# its neighbours.
#
# A process that was stopped, or that has less processor than it needs, reads everything late, answers included. While
# it
# is late its satellites wait longer for others and put off background work. What is measured is how long events waited
# before they were handled. A host is overloaded when even the *shortest* wait has been long for a while (CoDel, RFC
# 8289): a single long wait is a burst, which queues are there to absorb.


LATE_S = 0.05
"""A wait beyond this is late."""
_PERSISTS_S = 0.25
"""A host that has handled nothing on time for so long is overloaded: its background work yields to answers."""
_FADES_S = 0.5
"""Time constant by which the worst wait decays."""


class Lateness:
    """Of one host; shared by the machines that it runs."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._worst_at_s = -math.inf
        self._on_time_s = math.inf
        """When something was last on time; infinite: nothing has been late yet."""

    def measured(self, late_s: float, now_s: float) -> None:
        """Something was handled ``late_s`` after it was due, ``now_s``. To be called for what is on time, too."""
        if late_s <= LATE_S:
            self._on_time_s = now_s
        elif self._on_time_s == math.inf:
            self._on_time_s = now_s - late_s
        if late_s > 0.0 and late_s >= self.at(now_s):
            self._worst_s, self._worst_at_s = late_s, now_s

    def at(self, now_s: float) -> float:
        """The longest wait of the recent past in seconds, decaying."""
        if not self._worst_s:
            return 0.0
        return self._worst_s * math.exp(-max(0.0, now_s - self._worst_at_s) / _FADES_S)

    def is_late(self, now_s: float) -> bool:
        """Whether it is overloaded."""
        return now_s - self._on_time_s > _PERSISTS_S
