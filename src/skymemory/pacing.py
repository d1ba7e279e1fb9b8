"""Token buckets, byte budgets and back-offs. Pure: time and random numbers come in; the owner locks and waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


class TokenBucket:
    """Token bucket, full at first and refilled by ``per_s`` up to ``most``. ``level`` is that of the last refill."""

    def __init__(self, per_s: float, most: float) -> None:
        self.per_s, self.most, self.level = per_s, most, most
        self._at_s = -math.inf

    def refill(self, now_s: float) -> float:
        if now_s > self._at_s:
            self.level = min(self.most, self.level + (now_s - self._at_s) * self.per_s)
            self._at_s = now_s
        return self.level

    def spend(self, amount: float, now_s: float) -> float:
        """Spend in any case, and return the level left: below zero it is a debt."""
        self.level = self.refill(now_s) - amount
        return self.level

    def give_back(self, amount: float) -> None:
        self.level = min(self.most, self.level + amount)

    def wait_s(self, amount: float) -> float:
        """Return the seconds from the last refill until ``amount`` is there."""
        return max(0.0, amount - self.level) / self.per_s

    def resize(self, per_s: float, most: float, now_s: float) -> None:
        """Change the size. What was spent stays spent, but becomes no debt."""
        self.level = max(min(self.refill(now_s), 0.0), self.level + most - self.most)
        self.per_s, self.most = per_s, most


@dataclass(slots=True)
class ByteBudget:
    """Bytes in use, up to a limit. A larger amount is admitted alone."""

    limit_bytes: int
    used_bytes: int = 0
    most_bytes: int = 0

    def has_room(self, size_bytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + size_bytes <= self.limit_bytes

    def change(self, by_bytes: int) -> None:
        self.used_bytes += by_bytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)


def backoff_s(failures: int, first_s: float, most_s: float, random: Callable[[], float] = lambda: 1.0) -> float:
    """Return the wait after ``failures`` in a row (from 1): ``first_s``, doubled up to ``most_s``. ``random``
    leaves out up to half, to separate joint failures.
    """
    return min(most_s, math.ldexp(first_s, min(failures - 1, 60))) * (0.5 + 0.5 * random())


@dataclass(slots=True)
class Backoff:
    """Failures in a row, and the waits after them."""

    first_s: float
    most_s: float
    failures: int = 0
    due_s: float = -math.inf

    def next_s(self) -> float:
        """Count a failure, and return the wait after it."""
        self.failures += 1
        return backoff_s(self.failures, self.first_s, self.most_s)

    def on_result(self, success: bool, now_s: float) -> None:
        """Set ``due_s``, the time of the next try."""
        self.failures *= not success
        self.due_s = now_s + (0.0 if success else self.next_s())
