"""What calls of one kind usually take: the 99th percentile of the last of them, by the bytes that they move. Pure."""

from __future__ import annotations

import math
from collections import deque

_KEPT = 128
_ALIKE = 4
"""Calls that move up to four times as many bytes, or as few, are alike."""
_ENOUGH = 8
"""With so many alike the others are not looked at."""


class Usual:
    """Not thread-safe, but that a call is noted while another is worked out does no harm."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def took(self, seconds: float, size_bytes: int = 0) -> None:
        """A call that moved so many bytes has been answered."""
        self._calls.append((size_bytes, seconds))

    def p99_s(self, size_bytes: int = 0) -> float | None:
        """What such a call takes at most but for one in a hundred; None before the first. Of less than a hundred it is
        the longest, so one call that was slow is enough to be waited for.

        Where few were alike, all count, those with fewer bytes as if they had gone on at their rate.
        """
        calls = list(self._calls)
        if not calls:
            return None
        taken_s = [
            seconds for moved, seconds in calls if moved <= _ALIKE * size_bytes and size_bytes <= _ALIKE * moved
        ]  # fmt: skip
        if len(taken_s) < _ENOUGH:
            taken_s = [seconds * (max(1.0, size_bytes / moved) if moved else 1.0) for moved, seconds in calls]
        return sorted(taken_s)[math.ceil(0.99 * len(taken_s)) - 1]
