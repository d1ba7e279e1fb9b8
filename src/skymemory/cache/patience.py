"""Limits of a prompt's wait for a store: a share of its measured compute time, or twice the store's p99.

``tiers.tier.Tier.result_by`` gives up a call that takes longer, or than the tier's deadline; its keys miss by DEADLINE.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PATIENCE_SHARE = 0.1
"""Share of the compute time that a silent store may cost."""
TIMES_P99 = 2.0
MIN_PATIENCE_S = 0.02
"""Least wait: threads on the way may each wait 5 ms (switch interval)."""

_KEPT_CALLS = 128
_ALIKE = 4  # largest ratio of the bytes of similar calls
_ENOUGH_ALIKE = 8
_MIN_PASS_TOKENS = 8
_KEPT_SHARE = 0.75  # weight of earlier passes when a pass is added

# The compute time belongs to the calling thread's context and is not an argument: it applies to a call through any
# number of wrappers and tiers.
_RECOMPUTE_COST_S: ContextVar[float | None] = ContextVar("recompute_cost_s", default=None)
_ENDS_S: ContextVar[float] = ContextVar("ends_s", default=math.inf)


def patience_s(latencies: Latencies | None = None, size_bytes: int = 0) -> float:
    """Return how long to wait for a call; infinite without ``recompute_cost`` and ``ending_within``."""
    cost_s = _RECOMPUTE_COST_S.get()
    if cost_s is None:
        return left_s()
    p99_s = latencies.p99_s(size_bytes) if latencies is not None else None
    return min(left_s(), max(PATIENCE_SHARE * cost_s, TIMES_P99 * (p99_s or 0.0), MIN_PATIENCE_S))


@contextmanager
def ending_within(seconds: float) -> Iterator[None]:
    """Give all waits inside ``with`` a common deadline; an earlier deadline stays."""
    token = _ENDS_S.set(min(_ENDS_S.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _ENDS_S.reset(token)


def left_s() -> float:
    """Return the seconds until ``ending_within`` ends."""
    ends_s = _ENDS_S.get()
    return ends_s if ends_s == math.inf else max(0.0, ends_s - time.monotonic())


def patience_while_computing_s(computing_s: float, latencies: Latencies, size_bytes: int) -> float:
    """Return how long a load may take while its prompt is computed."""
    p99_s = latencies.p99_s(size_bytes) or 0.0
    return max((1 + PATIENCE_SHARE) * computing_s, TIMES_P99 * p99_s, MIN_PATIENCE_S)


@contextmanager
def recompute_cost(seconds: float | None) -> Iterator[None]:
    """Set, inside ``with``, the time to compute the blocks instead (None: unknown), which limits waits."""
    token = _RECOMPUTE_COST_S.set(seconds)
    try:
        yield
    finally:
        _RECOMPUTE_COST_S.reset(token)


class ComputeRate:
    """Time to compute tokens, from measured forward passes. Ignores that attention grows: too low for long prompts."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._assumed_token_s: float | None = None

    def assume(self, token_s: float) -> None:
        self._assumed_token_s = token_s

    def record(self, tokens: int, seconds: float) -> None:
        """Add a pass, unless over a few tokens (decoding)."""
        if tokens >= _MIN_PASS_TOKENS:
            self._tokens = self._tokens * _KEPT_SHARE + tokens
            self._seconds = self._seconds * _KEPT_SHARE + seconds

    @property
    def measured(self) -> bool:
        return self._tokens > 0

    def seconds(self, tokens: int) -> float | None:
        if self._tokens:
            return tokens * self._seconds / self._tokens
        return None if self._assumed_token_s is None else tokens * self._assumed_token_s


class Latencies:
    """Latencies of the last calls; ``record`` and ``p99_s`` may run concurrently."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=_KEPT_CALLS)

    def record(self, seconds: float, size_bytes: int = 0) -> None:
        self._calls.append((size_bytes, seconds))

    def p99_s(self, size_bytes: int = 0) -> float | None:
        """Return the 99th percentile of calls of similar size; if too few, of all, smaller calls scaled up."""
        calls = list(self._calls)
        if not calls:
            return None
        taken_s = [seconds for moved, seconds in calls if moved <= _ALIKE * size_bytes and size_bytes <= _ALIKE * moved]
        if len(taken_s) < _ENOUGH_ALIKE:
            taken_s = [seconds * (max(1.0, size_bytes / moved) if moved else 1.0) for moved, seconds in calls]
        return sorted(taken_s)[math.ceil(0.99 * len(taken_s)) - 1]
