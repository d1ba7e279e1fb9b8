"""How long a prompt waits for a store: a share of the time that computing its blocks takes, or twice the store's p99.

Inputs: what computing takes (``ComputeRate``, measured), what the store's calls usually take (``Latencies``, measured).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PATIENCE_SHARE = 0.1
"""Of what computing would take, the part that may be lost by waiting for a store that does not answer."""
TIMES_P99 = 2.0
MIN_PATIENCE_S = 0.02
"""A call is handed to a thread, from there to the tier, and back twice; and each time another thread may hold the
interpreter for a switch interval (5 ms). Less would measure the computer, not the tier.
"""

_KEPT_CALLS = 128
_ALIKE = 4
"""Calls that move up to four times as many bytes, or as few, are alike."""
_ENOUGH_ALIKE = 8
_MIN_PASS_TOKENS = 8
_KEPT_SHARE = 0.75
"""Weight of all earlier passes when one is added."""

# The time that computing would take is a property of the calling thread's context, not an argument: it holds for a
# call whatever stores (wrappers, tiers) pass it on.
_RECOMPUTE_COST_S: ContextVar[float | None] = ContextVar("recompute_cost_s", default=None)


def patience_s(latencies: Latencies | None = None, size_bytes: int = 0) -> float:
    """How long the calling thread waits for a call that moves ``size_bytes``; infinite without a ``recompute_cost``."""
    cost_s = _RECOMPUTE_COST_S.get()
    if cost_s is None:
        return math.inf
    p99_s = latencies.p99_s(size_bytes) if latencies is not None else None
    return max(PATIENCE_SHARE * cost_s, TIMES_P99 * (p99_s or 0.0), MIN_PATIENCE_S)


def patience_while_computing_s(computing_s: float, latencies: Latencies, size_bytes: int) -> float:
    """How long a load may take that runs while its prompt is computed: waiting costs nothing until that is done."""
    p99_s = latencies.p99_s(size_bytes) or 0.0
    return max((1 + PATIENCE_SHARE) * computing_s, TIMES_P99 * p99_s, MIN_PATIENCE_S)


@contextmanager
def recompute_cost(seconds: float | None) -> Iterator[None]:
    """While entered: computing the requested blocks instead would take ``seconds`` (None: unknown)."""
    token = _RECOMPUTE_COST_S.set(seconds)
    try:
        yield
    finally:
        _RECOMPUTE_COST_S.reset(token)


class ComputeRate:
    """Seconds that a prompt's tokens take to compute, from the forward passes seen; later ones count more.

    It ignores that attention grows with the prompt: for a long prompt it errs on the low side.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._assumed_token_s: float | None = None

    def assume(self, token_s: float) -> None:
        """Assume these seconds per token until a pass has been measured."""
        self._assumed_token_s = token_s

    def took(self, tokens: int, seconds: float) -> None:
        """Add a measured pass. One over a few tokens (a decoding step) says nothing about prompts and is ignored."""
        if tokens >= _MIN_PASS_TOKENS:
            self._tokens = self._tokens * _KEPT_SHARE + tokens
            self._seconds = self._seconds * _KEPT_SHARE + seconds

    @property
    def measured(self) -> bool:
        return self._tokens > 0

    def seconds(self, tokens: int) -> float | None:
        """Expected seconds for ``tokens``; None where nothing was measured or assumed."""
        if self._tokens:
            return tokens * self._seconds / self._tokens
        return None if self._assumed_token_s is None else tokens * self._assumed_token_s


class Latencies:
    """Latencies of the last calls of one kind. Adding one while another thread reads a percentile is harmless."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=_KEPT_CALLS)

    def took(self, seconds: float, size_bytes: int = 0) -> None:
        """Add an answered call that moved ``size_bytes``."""
        self._calls.append((size_bytes, seconds))

    def p99_s(self, size_bytes: int = 0) -> float | None:
        """99th percentile for calls that move ``size_bytes``; None before the first call.

        Of fewer than a hundred calls it is the longest, so a single slow call is enough for later ones to be waited
        for. Where few calls moved about as many bytes, all count, smaller ones scaled up at their rate.
        """
        calls = list(self._calls)
        if not calls:
            return None
        taken_s = [seconds for moved, seconds in calls if moved <= _ALIKE * size_bytes and size_bytes <= _ALIKE * moved]
        if len(taken_s) < _ENOUGH_ALIKE:
            taken_s = [seconds * (max(1.0, size_bytes / moved) if moved else 1.0) for moved, seconds in calls]
        return sorted(taken_s)[math.ceil(0.99 * len(taken_s)) - 1]
