"""Minimum rate of a body."""

from __future__ import annotations

GRACE_S = 20.0


class LeastRate:
    """Deadline against slow senders: every byte extends it by ``1 / rate`` seconds, to at most ``GRACE_S`` from now."""

    __slots__ = ("due_s",)

    def __init__(self, now_s: float) -> None:
        self.due_s = now_s + GRACE_S

    def add(self, amount: int, rate: float, now_s: float) -> float:
        self.due_s = min(now_s + GRACE_S, self.due_s + amount / rate)
        return self.due_s
