"""The router's strategies as the simulator runs them: built by name, with what each of them really is told.

``precise`` hears the engines' events, in the form in which engines publish them: numbered batches, blocks by the
engine's own names, their tokens told once. Who estimates gets a cost model that errs. All others learn from what they
sent and what was answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.events import Batch, BlocksRemoved, BlocksStored
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.strategies.base import Scorer
from skymemory.conductor.strategies.least_ttft import LeastTtftSettings
from skymemory.conductor.strategies.named import named
from skymemory.sim.routing import CacheEvents, RoutingSetup, tokens_of
from skymemory.sim.routing_errors import ErringLeastTtft
from skymemory.sim.trace import BLOCK_TOKENS


class EngineEvents:
    """Changes of simulated caches, told to a ``PreciseIndex`` as engines tell theirs."""

    def __init__(self, index: PreciseIndex) -> None:
        self.index = index
        self._batches: dict[int, int] = {}

    def changed(self, server: Server, chain: Sequence[int], had: int, gone: Sequence[int]) -> None:
        number = self._batches.get(server.slot, 0)
        self._batches[server.slot] = number + 1
        if not number:
            self.index.follow(server.slot, "")
        events: list[BlocksRemoved | BlocksStored] = []
        if gone:
            events.append(BlocksRemoved(gone))
        if new := chain[had:]:
            parent = chain[had - 1] if had else None
            events.append(BlocksStored(new, parent, cast("Sequence[int]", tokens_of(new)), BLOCK_TOKENS))
        self.index.apply(server.slot, Batch(number, events))


def strategy_for(
    name: str, setup: RoutingSetup, error: float, *, given: bool = False, **options: Any
) -> tuple[Scorer, CacheEvents | None]:
    """The strategy of that name with such options, and what must hear events for it.

    ``error``: standard deviation of what estimates are off by, as a part of them. ``given``: who estimates is told the
    servers' speeds, and learns them otherwise.

    Raises:
        InvalidInput: no strategy of that name.
    """
    if name in ("precise", "block-cost"):
        index = PreciseIndex(BLOCK_TOKENS)
        return named(name, index=index, **options), EngineEvents(index)
    if name == "least-ttft":
        settings = LeastTtftSettings(**options)
        table = ApproximatePrefixIndex(settings.blocks_per_server)
        cost = setup.cost if given else None
        return ErringLeastTtft(table, settings, cost, error=error, seed=setup.seed), None
    return named(name, **options), None
