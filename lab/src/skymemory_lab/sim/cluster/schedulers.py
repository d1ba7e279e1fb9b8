"""The production schedulers for a simulated cluster, with the believed cost model.

The conductor's schedulers see the true caches; the router's strategies learn them from their requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skymemory.conductor.cost_model import CostModel, network_of, pipelined_s
from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduler import Admission, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.scheduling.kvcache_centric import LoadSources
from skymemory.conductor.scheduling.prefill import PrefillScheduler
from skymemory.conductor.scheduling.registry import SCHEDULERS, build
from skymemory.conductor.strategies.estimates import GivenSpeeds, PrefillCost
from skymemory.conductor.strategies.least_ttft import LeastTtft
from skymemory.conductor.strategies.registry import STRATEGIES, named
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.config import suggestion
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.pool import ClusterPool
from skymemory_lab.sim.cluster.prefill import Pipeline
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest, at_rate, jittered


def timed(requests: Sequence[TraceRequest], setup: ClusterSetup) -> list[TraceRequest]:
    moved = jittered(requests, setup.seed, setup.jitter_s) if setup.jitter_s else list(requests)
    return at_rate(moved, setup.rate) if setup.rate != 1.0 else moved


def get_scheduler_view(request: TraceRequest, setup: ClusterSetup, dice: random.Random) -> Request:
    """Return the request as a scheduler sees it, with drawn errors of the stated answer length."""
    blocks = np.array(request.blocks(setup.partial), dtype=np.uint64)
    prompt = Prompt(blocks, blocks, BLOCK_TOKENS, request.input_tokens)
    stated: int | None = None
    if setup.tells_output:
        stated = request.output_tokens
        if setup.output_error:
            stated = max(1, round(stated * (1 + setup.output_error * max(-3.0, min(3.0, dice.gauss(0, 1))))))
    return Request(prompt, session=str(request.session), output_tokens=stated)


LEAST_FACTOR = 0.1
"""Least factor of an erring estimate, also in ``sim.routed_strategies``: 0 would win every choice."""
_DRAWS = 4096


class BelievedEstimates:
    """Prefill times as the scheduler estimates them."""

    def __init__(self, setup: ClusterSetup) -> None:
        self.cost: CostModel = setup.believed or setup.cost
        self._pipeline = Pipeline(self.cost, setup.pipeline, setup.chunk_tokens)

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        machines = self._pipeline.machines
        seconds = self.cost.prefill_s(tokens, cached)
        # The cost model assumes one machine that does everything; passing through the pipeline replaces that part.
        if machines > 1:
            chunks_s = self._pipeline.chunks_s(max(0, min(int(cached), int(tokens) - 1)), int(tokens))
            seconds += pipelined_s(chunks_s, machines) - sum(chunks_s) * machines
        return seconds

    def drain_s(self, tokens: float, cached: float) -> float:
        """Return a prefill's time after its first machine is free."""
        chunks_s = self._pipeline.chunks_s(max(0, min(int(cached), int(tokens) - 1)), int(tokens))
        return (self._pipeline.machines - 1) * max(chunks_s, default=0.0)


class ErringSpeeds(GivenSpeeds):
    """Estimates with a seeded error factor per server and prompt length.

    The factor is normal with mean 1 and standard deviation ``error``, at least 0.1.
    """

    def __init__(self, cost: PrefillCost, error: float, seed: int) -> None:
        super().__init__(cost)
        dice = random.Random(seed)
        self._errors = [max(LEAST_FACTOR, 1.0 + error * dice.gauss(0.0, 1.0)) for _ in range(_DRAWS)]

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        seconds = super().prefills_s(slots, tokens, cached)
        return [estimate_s * self.factor(slot, tokens) for slot, estimate_s in zip(slots, seconds, strict=True)]

    def factor(self, slot: int, tokens: int) -> float:
        # Hashed, not drawn: all estimates of a prompt at a server must err alike, in any order of calls.
        mixed = (tokens * 0x9E3779B97F4A7C15 + (slot + 1) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        return self._errors[(mixed ^ mixed >> 31) * 0x94D049BB133111EB >> 40 & _DRAWS - 1]


@dataclass(frozen=True, slots=True)
class World:
    """Parts of the simulated cluster from which schedulers are built."""

    setup: ClusterSetup
    prefill: Fleet
    decode: Fleet | None
    """Decode fleet; None: coupled instances."""
    cost: CostModel
    estimates: BelievedEstimates
    pool: ClusterPool
    admission: Admission


SchedulerFactory = Callable[[World], Scheduler]
NAMES = (*SCHEDULERS, *(name for name in STRATEGIES if name not in SCHEDULERS))


def scheduler_named(name: str, world: World, **options: Any) -> Scheduler:
    """Build a scheduler of the conductor, or a routing strategy that decodes at the least loaded server."""
    if name in SCHEDULERS:
        made = _of_the_conductor(name, world, options)
    elif name in STRATEGIES:
        made = _of_the_router(name, world, options)
    else:
        raise InvalidInput(f"no scheduler {name!r}; {suggestion(name, NAMES)}")
    setup, scorer = world.setup, made.prefill.scorer
    if setup.error and isinstance(scorer, PrefillScheduler | LeastTtft):
        scorer.speeds = ErringSpeeds(world.estimates, setup.error, setup.seed)
    return made


def _of_the_conductor(name: str, world: World, options: Mapping[str, Any]) -> Scheduler:
    setup, pool = world.setup, world.pool
    # A scheduler with another model of the machine believes the network of that model, not the pool's network.
    believes_own = setup.believed is not None and setup.pool.network is None
    network = network_of(world.cost) if believes_own else pool.network
    return build(
        name,
        prefill=world.prefill,
        decoding=(
            None if world.decode is None else LeastTbt(world.cost, world.decode, setup.kv_tokens, setup.decode_s)
        ),
        cost=world.cost,
        holdings=pool,
        sources=LoadSources(network, far=pool, links=pool),
        admission=world.admission,
        prefill_cost=world.estimates,
        seed=setup.seed,
        **options,
    )


def _of_the_router(name: str, world: World, options: Mapping[str, Any]) -> Scheduler:
    cost, seed = world.estimates if name == "least-ttft" else None, world.setup.seed
    prefill = Picker(world.prefill, named(name, cost=cost, **options), seed)
    decode = None if world.decode is None else Picker(world.decode, LeastLoad(), seed + 1)
    return Scheduler(prefill, decode, world.admission)
