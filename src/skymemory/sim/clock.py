"""Virtual time: events in the order of their time, and of their scheduling at equal times."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from skymemory.errors import InvalidInput

Event = Callable[[float], None]
"""Called with its time."""


class Clock:
    """An event queue. Simulators schedule callbacks and run them in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Event]] = []
        self._scheduled = 0

    def at(self, at_s: float, event: Event) -> None:
        """Schedules ``event``; one in the past is due now."""
        self._scheduled += 1
        heapq.heappush(self._due, (max(at_s, self.now_s), self._scheduled, event))

    @property
    def next_s(self) -> float:
        """Time of the next event; infinite without one."""
        return self._due[0][0] if self._due else math.inf

    def step(self) -> None:
        """Runs the next event. There must be one."""
        self.now_s, _, event = heapq.heappop(self._due)
        event(self.now_s)

    def run(self, until_s: float = math.inf, max_events: int = 500_000_000) -> None:
        """Runs all events due by ``until_s``, also those that they schedule.

        Raises:
            InvalidInput: there are more than ``max_events``.
        """
        due, pop = self._due, heapq.heappop
        while due and due[0][0] <= until_s:
            self.now_s, _, event = pop(due)
            event(self.now_s)
            max_events -= 1
            if max_events < 0:
                raise InvalidInput(f"the simulation has not ended at {self.now_s:g} s of its own time")
