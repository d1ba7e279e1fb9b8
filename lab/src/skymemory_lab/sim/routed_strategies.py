"""Routing strategies in the simulator: by name, with events and with errors of their estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from skymemory.conductor.picker import Scorer, Server
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, PrefixIndex
from skymemory.conductor.prefix_index.events import BlocksRemoved, BlocksStored, EventBatch
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.estimates import PrefillCost
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.registry import named
from skymemory.conductor.strategies.strategy_base import mix
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.schedulers import LEAST_FACTOR
from skymemory_lab.sim.routing import CacheEvents, tokens_of
from skymemory_lab.sim.routing_setup import RoutingSetup
from skymemory_lab.sim.trace import BLOCK_TOKENS

_ODD = 0x9E3779B97F4A7C15


class ErringLeastTtft(LeastTtft):
    """``least-ttft`` with seeded errors in its estimates, which would otherwise be the truth.

    The factor per request and server is normal with mean 1 and standard deviation ``error``, at least 0.1.
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
            raise InvalidInput(f"error is {error}; expected 0 to 1")
        super().__init__(index, settings, cost)
        self._error, self._seed = error, seed * _ODD & (1 << 64) - 1

    def prefills_s(self, request: Request, slots: Sequence[int], cached: Sequence[int], now_s: float) -> list[float]:
        return self._off(super().prefills_s(request, slots, cached, now_s), request, slots, now_s)

    def waits_s(self, request: Request, servers: Sequence[Server], now_s: float) -> list[float]:
        slots = [server.slot for server in servers]
        return self._off(super().waits_s(request, servers, now_s), request, slots, now_s)

    def _off(self, seconds: list[float], request: Request, slots: Sequence[int], now_s: float) -> list[float]:
        # Multiply the estimates by each server's error factor.
        factors = self.factors(request, max(slots) + 1, now_s)
        return [estimate_s * factors[slot] for estimate_s, slot in zip(seconds, slots, strict=True)]

    def factors(self, request: Request, slots: int, now_s: float) -> list[float]:
        # Keyed by the request and the time, so a retry errs differently, but rank and booking err alike.
        blocks = request.prompt.blocks
        last = blocks.item(-1) if len(blocks) else request.prompt.tokens
        at = np.array([now_s], dtype=np.float64).view(np.uint64)
        key = mix(mix(np.array([last ^ self._seed], dtype=np.uint64)) ^ at)
        drawn = mix(key + np.arange(1, 2 * slots + 1, dtype=np.uint64) * np.uint64(_ODD))
        # Box–Muller: two uniform numbers, never 0 or 1, give a normal number.
        share = (drawn.astype(np.float64) + 1.0) / (2.0**64 + 2.0)
        normal = np.sqrt(-2.0 * np.log(share[::2])) * np.cos(2.0 * np.pi * share[1::2])
        factors: list[float] = np.maximum(LEAST_FACTOR, 1.0 + self._error * normal).tolist()
        return factors


class EngineEvents:
    """Translator of cache changes into engines' KV events, for a precise prefix index."""

    def __init__(self, index: PreciseIndex) -> None:
        self.index = index
        self._batches: dict[int, int] = {}

    def changed(self, server: Server, chain: Sequence[int], cached_blocks: int, evicted_blocks: Sequence[int]) -> None:
        number = self._batches.get(server.slot, 0)
        self._batches[server.slot] = number + 1
        if not number:
            self.index.follow(server.slot, "")
        events: list[BlocksRemoved | BlocksStored] = []
        if evicted_blocks:
            events.append(BlocksRemoved(evicted_blocks))
        if new := chain[cached_blocks:]:
            parent = chain[cached_blocks - 1] if cached_blocks else None
            events.append(BlocksStored(new, parent, cast("Sequence[int]", tokens_of(new)), BLOCK_TOKENS))
        self.index.apply(server.slot, EventBatch(number, events))


def strategy_for(
    name: str, setup: RoutingSetup, error: float, *, cost_known: bool = False, **options: Any
) -> tuple[Scorer, CacheEvents | None]:
    """Return the strategy of that name, and its listener of cache changes.

    ``error`` is the standard deviation of the estimates' relative errors. With ``cost_known``, ``least-ttft`` knows the
    cost model.

    Raises:
        InvalidInput: unknown strategy.
    """
    # The authors of these two strategies feed them with events, and so does the simulator.
    if name in ("precise", "block-cost"):
        index = PreciseIndex(BLOCK_TOKENS)
        return named(name, index=index, **options), EngineEvents(index)
    if name == "least-ttft":
        settings = LeastTtftSettings(**options)
        table = ApproximatePrefixIndex(settings.blocks_per_server)
        cost = setup.cost if cost_known else None
        return ErringLeastTtft(table, settings, cost, error=error, seed=setup.seed), None
    return named(name, **options), None
