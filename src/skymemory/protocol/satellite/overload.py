"""A bounded queue for background packets that come while the host is late; answers go first, the oldest is dropped.

Background is what satellites ask of each other for the good of later reads: handovers, checks of copies and of
suspected losses, gossip; also in transit. No read waits for it, and its sender repeats it. Signs of life and
declarations of links are not background: delayed, they would make living satellites look dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from skymemory.native import Run
from skymemory.protocol.forwarding import LinkEnd, header_start, same_journey
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
