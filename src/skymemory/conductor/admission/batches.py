"""How many tokens of context the decoding servers can have at once: learnt from estimates made at different loads."""

from __future__ import annotations

import math

_FORGETTING = 0.005
"""Weight of one estimate in the means."""
_LEAST = 50
"""Estimates before anything is said."""
_SPREAD = 0.05
"""Standard deviation of the tokens, as a part of their mean, below which nothing is learnt from a line through them."""


class Batches:
    """What was let in and has not ended, and a line through (its tokens, the estimated time between tokens)."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of prompts that were let in and have not ended."""
        self._seen = 0
        self._mean_tokens = self._mean_tbt_s = self._var = self._cov = 0.0
        self._line: tuple[float, float] | None = None
        """Seconds between tokens without any context, and per token of it."""
        self._inside = 0
        self._since_s = 0.0
        self._waited_s = self._ended = 0.0
        """Seconds that all have been inside, and how many of them ended; both forget alike."""

    def entered(self, tokens: int, tbt_s: float, now_s: float) -> None:
        """One was let in; ``tbt_s`` is estimated with it."""
        self._count(now_s)
        self._inside += 1
        self.tokens += tokens
        self._seen += 1
        weight = max(_FORGETTING, 1 / self._seen)
        off, off_s = self.tokens - self._mean_tokens, tbt_s - self._mean_tbt_s
        self._mean_tokens += weight * off
        self._mean_tbt_s += weight * off_s
        self._var += weight * ((1 - weight) * off * off - self._var)
        self._cov += weight * ((1 - weight) * off * off_s - self._cov)
        if self._seen >= _LEAST and self._var > (_SPREAD * self._mean_tokens) ** 2 and self._cov > 0:
            slope = self._cov / self._var
            self._line = (self._mean_tbt_s - slope * self._mean_tokens, slope)

    def left(self, tokens: int, now_s: float) -> None:
        """One is over."""
        self._count(now_s)
        self._inside -= 1
        self.tokens -= tokens
        self._waited_s *= 1 - _FORGETTING
        self._ended = self._ended * (1 - _FORGETTING) + 1

    @property
    def stay_s(self) -> float:
        """From being let in to the end, usually; 0 while none has ended.

        Those that are inside count with the time they have had: of the first that end one would think that all are
        short.
        """
        return self._waited_s / self._ended if self._ended else 0.0

    def _count(self, now_s: float) -> None:
        if self._inside:
            self._waited_s += self._inside * (now_s - self._since_s)
        self._since_s = now_s

    def most_tokens(self, limit_s: float) -> float:
        """Tokens with which the time between tokens would be ``limit_s``; infinite while that is not known."""
        if self._line is None:
            return math.inf
        empty_s, slope_s = self._line
        return max(0.0, (limit_s - empty_s) / slope_s)
