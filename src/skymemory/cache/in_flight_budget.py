"""Bytes in flight: how much may be on its way out of slow tiers at once, over all threads."""

from __future__ import annotations

import threading

from skymemory.errors import InvalidInput


class InFlightBudget:
    """At most ``limit_bytes`` taken at once. What is larger than all of it goes alone, not never."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise InvalidInput(f"bytes in flight must be bounded by more than 0, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.most_bytes = 0
        """The most that was ever taken at once."""
        self._changed = threading.Condition()

    def take(self, size_bytes: int, timeout_s: float) -> bool:
        """Wait until there is room, ``timeout_s`` at most; whether there was. What is taken has to be given back."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(size_bytes), max(0.0, timeout_s)):
                return False
            self.taken_bytes += size_bytes
            self.most_bytes = max(self.most_bytes, self.taken_bytes)
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self.taken_bytes -= size_bytes
            self._changed.notify_all()

    def _fits(self, size_bytes: int) -> bool:
        return self.taken_bytes == 0 or self.taken_bytes + size_bytes <= self.limit_bytes
