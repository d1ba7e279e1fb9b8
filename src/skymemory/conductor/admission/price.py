"""The most that a request may cost so that those which ask fit into what there is, the cheapest first."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from itertools import accumulate

_MOST = 4096
"""Requests that are remembered: of a busier time than that, only the latest part."""
_REFRESH = 64
"""Times per window that the remembered are sorted anew."""


class Price:
    """Of a knapsack, the cost at which it is full: what asked lately stands for what will ask."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._asked: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._sorted: list[float] = []
        self._sums: list[float] = []
        self._sorted_s = -math.inf

    def asked(self, cost: float, now_s: float) -> None:
        """One asked that costs so much; whether it was let in does not matter."""
        self._asked.append((now_s, cost))
        if now_s - self._sorted_s < self._window_s / _REFRESH:
            return
        while self._asked[0][0] < now_s - self._window_s:
            self._asked.popleft()
        self._sorted = sorted(cost for _, cost in self._asked)
        self._sums = list(accumulate(self._sorted))
        self._sorted_s = now_s

    def dearest(self, per_s: float, room: float, now_s: float) -> float:
        """The cost of the dearest that fits; infinite where all do.

        ``per_s``: of what they cost, what there is a second; ``room``: what there is once beside, below 0 where so much
        must be made good.
        """
        if not self._sums:
            return math.inf
        span_s = min(self._window_s, now_s - self._asked[0][0])
        fit = bisect_right(self._sums, per_s * span_s + room)
        return math.inf if fit == len(self._sums) else self._sorted[fit - 1] if fit else 0.0
