"""Seconds that a prefill takes at each server: from a cost model that was given, or learned from first bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class PrefillCost(Protocol):
    """Such as ``cost_model.CostModel``."""

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Seconds to prefill ``tokens`` of which the first ``cached`` are cached, alone on the machine."""
        ...


class Speeds(Protocol):
    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        """Seconds for a prompt of ``tokens``, per server with what it has cached of it."""
        ...

    def observe(self, slot: int, computed_tokens: int, seconds: float) -> None:
        """A server took so long for so many tokens that it did not have."""
        ...

    def forget(self, slot: int) -> None: ...


class GivenSpeeds:
    """All servers take what one cost model says."""

    def __init__(self, cost: PrefillCost) -> None:
        self._cost = cost

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        if not tokens:
            return [0.0] * len(slots)
        seconds: dict[int, float] = {}
        for held in cached:
            if held not in seconds:
                seconds[held] = self._cost.prefill_s(tokens, held)
        return [seconds[held] for held in cached]

    def observe(self, slot: int, computed_tokens: int, seconds: float) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass


Line = tuple[float, float]
"""Fixed seconds, and seconds per computed token."""
UNKNOWN: Line = (0.02, 1e-4)
"""Before anything was observed: 10,000 tokens per second. Only proportions matter then, not the speed."""


class LearnedSpeeds:
    """A line through the latest observations of each server, without those that lie far off it.

    A server with fewer than ``ENOUGH`` takes the line of all servers together. Nobody has to configure a speed, and
    a slow server among fast ones is found out by itself.
    """

    KEPT = 32
    ENOUGH = 4

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, float]]] = {}
        self._lines: dict[int, Line] = {}
        self._together: deque[tuple[float, float]] = deque(maxlen=2 * self.KEPT)
        self._common: Line = UNKNOWN
        self._count = 0

    def line(self, slot: int) -> Line:
        return self._lines.get(slot, self._common)

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        lines, common = self._lines, self._common
        seconds = []
        for slot, held in zip(slots, cached, strict=True):
            fixed_s, per_token_s = lines.get(slot, common)
            seconds.append(fixed_s + per_token_s * (tokens - held))
        return seconds

    def observe(self, slot: int, computed_tokens: int, seconds: float) -> None:
        point = (float(max(1, computed_tokens)), seconds)
        seen = self._seen.setdefault(slot, deque(maxlen=self.KEPT))
        seen.append(point)
        self._together.append(point)
        self._count += 1
        # Every observation while they are few, then one in four: a fit takes some 50 µs.
        if len(seen) >= self.ENOUGH and (len(seen) < 2 * self.ENOUGH or self._count % 4 == 0):
            self._lines[slot] = fit(seen)
        if len(self._together) >= self.ENOUGH and (self._count < self.KEPT or self._count % 8 == 0):
            self._common = fit(self._together)

    def forget(self, slot: int) -> None:
        self._seen.pop(slot, None)
        self._lines.pop(slot, None)


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares twice: the second time without points more than three usual errors off the first line.

    Never a negative part: prompts of one length only say what a token takes, not what is fixed.
    """
    tokens, seconds = np.array(points, dtype=np.float64).T
    line = _least_squares(tokens, seconds)
    for _ in range(2):
        errors = np.abs(seconds - line[0] - line[1] * tokens)
        near = errors <= 3.0 * np.median(errors) + 1e-9
        line = _least_squares(tokens[near], seconds[near])
    return line


def _least_squares(
    tokens: np.ndarray[tuple[int], np.dtype[np.float64]], seconds: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Line:
    tokens_mean, seconds_mean = float(tokens.mean()), float(seconds.mean())
    spread = float(((tokens - tokens_mean) ** 2).mean())
    through_zero = (0.0, max(1e-9, seconds_mean / tokens_mean))
    if spread < (0.1 * tokens_mean) ** 2:
        return through_zero
    per_token_s = float(((tokens - tokens_mean) * (seconds - seconds_mean)).mean()) / spread
    fixed_s = seconds_mean - per_token_s * tokens_mean
    return (fixed_s, per_token_s) if fixed_s >= 0.0 and per_token_s > 0.0 else through_zero
