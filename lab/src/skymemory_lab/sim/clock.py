"""Virtual time: events in order of their time, then of scheduling."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from skymemory.errors import InvalidInput

Event = Callable[[float], None]


class Clock:
    """Simulated time, and its scheduled events."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Event]] = []
        self._scheduled = 0

    def at(self, at_s: float, event: Event) -> None:
        """Schedule ``event``. A time in the past means now."""
        self._scheduled += 1
        heapq.heappush(self._due, (max(at_s, self.now_s), self._scheduled, event))

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def step(self) -> None:
        """Run the next event, which must exist."""
        self.now_s, _, event = heapq.heappop(self._due)
        event(self.now_s)

    def run(self, until_s: float = math.inf, max_events: int = 500_000_000) -> None:
        """Run all events until ``until_s``."""
        queue, pop = self._due, heapq.heappop
        while queue and queue[0][0] <= until_s:
            self.now_s, _, event = pop(queue)
            event(self.now_s)
            max_events -= 1
            if max_events < 0:
                raise InvalidInput(f"the simulation has not ended at {self.now_s:g} s of its own time")
