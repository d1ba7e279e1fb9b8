"""What calls of one kind usually take: the 99th percentile of the last of them, by the bytes that they move. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
        taken_s = [seconds for moved, seconds in calls if moved <= _ALIKE * size_bytes and size_bytes <= _ALIKE * moved]
        if len(taken_s) < _ENOUGH:
            taken_s = [seconds * (max(1.0, size_bytes / moved) if moved else 1.0) for moved, seconds in calls]
        return sorted(taken_s)[math.ceil(0.99 * len(taken_s)) - 1]


# How long a caller needs for what it asks a store for if the store does not come: what it asks for is worth no more.
#
# Whoever can make a prompt's blocks itself says so around its calls; a store that waits for others
# (``cache.tiers.tier``) asks
# here. It is a context of the calling thread, for it is true of a call whatever stores it passes on its way.


_WORTH_S: ContextVar[float | None] = ContextVar("worth_s", default=None)


def worth_s() -> float | None:
    """Seconds that the present caller needs without the store; None if unknown."""
    return _WORTH_S.get()


@contextmanager
def worth(seconds: float | None) -> Iterator[None]:
    """Within this, what is asked of a store could be had without it in ``seconds`` (None: not known)."""
    token = _WORTH_S.set(seconds)
    try:
        yield
    finally:
        _WORTH_S.reset(token)
