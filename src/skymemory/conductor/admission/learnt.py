"""What outcomes teach: how much later first tokens come than estimated, how near to its promise a batch may go."""

from __future__ import annotations

_STEP = 0.05
"""Weight of one outcome in a mean of the latest."""
_MOST_BIAS = 3.0
_SHORT = 0.05
"""Of the promise: estimates below it say nothing of the error of those that matter."""


class LearntTtft:
    """The factor between what was estimated and what came; of estimates that are no small part of the promise."""

    def __init__(self, promised_s: float) -> None:
        self._promised_s = promised_s
        self.bias = 1.0

    def corrected_s(self, estimated_s: float) -> float:
        return estimated_s * self.bias

    def came(self, estimated_s: float, took_s: float) -> None:
        if estimated_s >= _SHORT * self._promised_s:
            factor = min(_MOST_BIAS, max(1 / _MOST_BIAS, took_s / estimated_s))
            self.bias += _STEP * (factor - self.bias)


class LearntHeadroom:
    """The part of the promised time between tokens up to which requests are let in.

    A tracker of a quantile: one broken promise lowers it by a step, a kept one raises it by so much less that both
    balance where ``broken`` of those near the limit break.
    """

    step = 0.01
    near = 0.8
    """Of the limit: who decodes with less load says nothing about the limit."""

    def __init__(self, least: float, broken: float) -> None:
        self._least, self._broken = least, broken
        self.share = 1.0

    def ended(self, load: float, met: bool) -> None:
        """``load``: the estimated time between tokens of its batch, as a part of the promise."""
        if load < self.near * self.share:
            return
        if met:
            self.share = min(1.0, self.share + self.step * self._broken / (1 - self._broken))
        else:
            self.share = max(self._least, self.share - self.step)
