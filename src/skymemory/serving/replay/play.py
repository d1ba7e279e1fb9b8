"""The open loop: every request is sent when it is due, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from skymemory.serving.replay.ask import Ask

AHEAD = 64
"""Bodies made before they are due; making one takes some milliseconds."""
_SPARE_S = 0.03
"""Before the next request is due, nothing is made ahead any more."""
_TICK_S = 0.02

Send = Callable[[Ask, bytes, Callable[[], float], float], Awaitable[None]]
"""A request, its body, the clock, and how long it was held up (s)."""


class Player:
    """Plays ``asks``. ``under_way`` and ``begun`` may be looked at meanwhile.

    ``concurrency``: requests under way at most; others wait for them, and are told how long. ``stalls_s`` has by how
    much each look at the clock came late: while this process had no time for its own events, arrivals of pieces
    were seen as much later than they were.
    """

    def __init__(
        self, asks: Sequence[Ask], body_of: Callable[[Ask], bytes], send: Send, concurrency: int | None = None
    ) -> None:
        self._asks = asks
        self._body_of = body_of
        self._send = send
        self._concurrency = concurrency
        self._bodies: deque[bytes] = deque()
        self._made = 0
        self._full: deque[tuple[float, float]] = deque()
        self._free = asyncio.Event()
        self._began_s = time.perf_counter()
        self.under_way = 0
        self.begun = 0
        self.stalls_s: list[float] = []

    def clock(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began_s

    async def play(self) -> None:
        """Until the last answer has ended. Cancelled, it cancels all that is under way and waits for its end."""
        self._make_one()
        self._began_s = time.perf_counter() + _SPARE_S
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for ask in self._asks:
                    await self._until(ask.due_s)
                    body = self._next_body()
                    await self._until_free()
                    self.under_way += 1
                    self.begun += 1
                    group.create_task(self._one(ask, body, self._held_up_s(ask.due_s)))
        finally:
            watch.cancel()

    async def _one(self, ask: Ask, body: bytes, held_up_s: float) -> None:
        try:
            await self._send(ask, body, self.clock, held_up_s)
        finally:
            self.under_way -= 1
            self._free.set()

    async def _until_free(self) -> None:
        if self._concurrency is None or self.under_way < self._concurrency:
            return
        since_s = self.clock()
        while self.under_way >= self._concurrency:
            self._free.clear()
            await self._free.wait()
        self._full.append((since_s, self.clock()))

    def _held_up_s(self, due_s: float) -> float:
        """Since then, how long all places were taken: also while one that was due before waited for its own."""
        while self._full and self._full[0][1] <= due_s:
            self._full.popleft()
        return sum(until_s - max(since_s, due_s) for since_s, until_s in self._full)

    async def _until(self, due_s: float) -> None:
        """Sleep until then, making bodies ahead while there is time."""
        while len(self._bodies) < AHEAD and self._made < len(self._asks) and self.clock() < due_s - _SPARE_S:
            self._make_one()
            await asyncio.sleep(0)
        left_s = due_s - self.clock()
        # Also when it is late: answers in progress are looked at between any two requests.
        await asyncio.sleep(max(0.0, left_s))

    def _next_body(self) -> bytes:
        if not self._bodies:
            self._make_one()
        return self._bodies.popleft()

    def _make_one(self) -> None:
        self._bodies.append(self._body_of(self._asks[self._made]))
        self._made += 1

    async def _watch(self) -> None:
        while True:
            asked_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.stalls_s.append(time.perf_counter() - asked_s - _TICK_S)
