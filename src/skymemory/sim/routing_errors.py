"""Errors of estimates, for strategies that estimate: a simulator's would else be its own truth.

Each request's estimates at each server are off by a factor of their own: normal, of mean 1 and a standard deviation of
``error``, never below a tenth. It is drawn anew for every request and every server, from the seed, the request and the
time: servers of which nothing differs come out different, and a long wait is off by as many more seconds. Computing
and waiting are off by it, and so is the work that is believed to wait there from then on. Equal questions get equal
answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.hashing import mix
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.speeds import PrefillCost
from skymemory.errors import InvalidInput

LEAST_FACTOR = 0.1
_ODD = 0x9E3779B97F4A7C15


class ErringLeastTtft(LeastTtft):
    """The default strategy, whose every estimate errs.

    Raises:
        InvalidInput: an error that is no part of an estimate, 0 to 1.
    """

    def __init__(
        self,
        index: PrefixIndex,
        settings: LeastTtftSettings | None = None,
        cost: PrefillCost | None = None,
        *,
        error: float,
        seed: int,
    ) -> None:
        if not 0 <= error <= 1:
            raise InvalidInput(f"error is {error}; expected a part of the estimate, 0 to 1")
        super().__init__(index, settings, cost)
        self._error, self._seed = error, seed * _ODD & (1 << 64) - 1

    def prefills_s(self, request: Request, slots: Sequence[int], cached: Sequence[int], now_s: float) -> list[float]:
        return self._off(super().prefills_s(request, slots, cached, now_s), request, slots, now_s)

    def waits_s(self, request: Request, servers: Sequence[Server], now_s: float) -> list[float]:
        slots = [server.slot for server in servers]
        return self._off(super().waits_s(request, servers, now_s), request, slots, now_s)

    def _off(self, seconds: list[float], request: Request, slots: Sequence[int], now_s: float) -> list[float]:
        factors = self.factors(request, max(slots) + 1, now_s)
        return [one * factors[slot] for one, slot in zip(seconds, slots, strict=True)]

    def factors(self, request: Request, slots: int, now_s: float) -> list[float]:
        """By how much what is estimated for ``request`` is off, at each of the first ``slots`` slots."""
        blocks = request.prompt.blocks
        last = blocks.item(-1) if len(blocks) else request.prompt.tokens
        at = np.array([now_s], dtype=np.float64).view(np.uint64)
        key = mix(mix(np.array([last ^ self._seed], dtype=np.uint64)) ^ at)
        drawn = mix(key + np.arange(1, 2 * slots + 1, dtype=np.uint64) * np.uint64(_ODD))
        share = (drawn.astype(np.float64) + 1.0) / (2.0**64 + 2.0)
        normal = np.sqrt(-2.0 * np.log(share[::2])) * np.cos(2.0 * np.pi * share[1::2])
        factors: list[float] = np.maximum(LEAST_FACTOR, 1.0 + self._error * normal).tolist()
        return factors
