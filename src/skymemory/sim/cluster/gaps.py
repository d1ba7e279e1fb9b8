"""Times from token to token of all requests of a run: a histogram whose classes are 1 % wide.

Every token counts, with the time since the one before it of the same request; first tokens have none. Counts are exact;
what is lost is where in its class a time lies, and the mean of a class is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.sim.cluster.steps import Steps

LEAST_S = 1e-6
"""Whatever is shorter is in the first class."""
_WIDTH = math.log(1.01)


class Gaps:
    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums_s: dict[int, float] = {}

    def add(self, gap_s: float, tokens: int = 1) -> None:
        """So many tokens came ``gap_s`` after the one before."""
        self._put(_class_of(gap_s), tokens, gap_s * tokens)

    def add_steps(self, steps: Steps, batch: int, kv_tokens: float, begin: int, end: int) -> None:
        """Steps ``begin`` to ``end - 1`` of a batch (``Steps``): each gave every request of it a token."""
        if end <= begin:
            return
        first = _class_of(steps.step_s(batch, kv_tokens + begin * batch))
        if end - begin == 1 or first == _class_of(steps.step_s(batch, kv_tokens + (end - 1) * batch)):
            seconds = steps.run_s(batch, kv_tokens + begin * batch, end - begin)
            self._put(first, batch * (end - begin), batch * seconds)
            return
        middle = (begin + end) // 2
        self.add_steps(steps, batch, kv_tokens, begin, middle)
        self.add_steps(steps, batch, kv_tokens, middle, end)

    def classes(self) -> tuple[Sequence[float], Sequence[int]]:
        """The mean time (s) in each class that has any, rising, and how many tokens are in it."""
        numbers = sorted(self._counts)
        counts = [self._counts[number] for number in numbers]
        return [self._sums_s[number] / self._counts[number] for number in numbers], counts

    def _put(self, number: int, tokens: int, seconds: float) -> None:
        self._counts[number] = self._counts.get(number, 0) + tokens
        self._sums_s[number] = self._sums_s.get(number, 0.0) + seconds


def _class_of(gap_s: float) -> int:
    return int(math.log(gap_s / LEAST_S) / _WIDTH) if gap_s > LEAST_S else 0
