"""One chunk being fetched, and when the next one may be."""

from __future__ import annotations

import math
from collections.abc import Callable

from skymemory.cache.tier_workers import Call

_LEAD_PART = 0.1
_LEAD_S = 0.02


class Fetch:
    """One of at most two fetches under way: from ``starts_s`` on, given up at ``due_s``. ``work`` is what it does."""

    def __init__(self, index: int, starts_s: float, from_s: float, work: Callable[[Fetch], object]) -> None:
        """``from_s``: when it begins at the latest, or has begun."""
        self.index, self.starts_s, self.from_s = index, starts_s, from_s
        self.due_s = math.inf
        self.call: Call[object] = Call(lambda: work(self))

    def has(self, seconds: float) -> None:
        """So long it may take."""
        self.due_s = self.from_s + seconds


def starts_after(ahead: Fetch, takes_s: float | None, now_s: float) -> float:
    """When the fetch behind ``ahead`` begins, which has begun or begins now and is expected to keep the link busy
    for ``takes_s`` (None: unknown).

    Shortly before the end of the one ahead, or the link would lie idle between them. Not at once: each would have half
    of the link, and the first, which is wanted sooner, would come as late as the second. So the first comes late by a
    twentieth of its time or ten milliseconds at most.
    """
    if takes_s is None:
        return math.inf
    return min(ahead.starts_s, now_s) + takes_s - max(_LEAD_PART * takes_s, _LEAD_S)
