"""Virtual time: what is to happen when, in the order of time and, at one moment, of asking."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from skymemory.errors import InvalidInput

Happens = Callable[[float], None]
"""Is called with the time it was asked for."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Happens]] = []
        self._asked = 0

    def at(self, at_s: float, happens: Happens) -> None:
        """Call it then. What is asked for a moment that has passed happens now."""
        self._asked += 1
        heapq.heappush(self._due, (max(at_s, self.now_s), self._asked, happens))

    @property
    def next_s(self) -> float:
        """When the next of it happens; infinite: nothing will."""
        return self._due[0][0] if self._due else math.inf

    def run(self, most_events: int = 500_000_000) -> None:
        """Everything, to the end.

        Raises:
            InvalidInput: it does not end within ``most_events``.
        """
        due, pop = self._due, heapq.heappop
        while due:
            self.now_s, _, happens = pop(due)
            happens(self.now_s)
            most_events -= 1
            if most_events < 0:
                raise InvalidInput(f"the simulation has not ended at {self.now_s:g} s of its own time")
