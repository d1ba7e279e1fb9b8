"""Schedulers by name, for a simulated cluster: those of production, given what they would know.

They estimate with what the cluster is believed to be, not with what it is: another cost model, an error on every
estimate. Where caches are is what the pool says at that moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

from skymemory.conductor.admission.base import Admission
from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.strategies.base import Scorer
from skymemory.conductor.strategies.named import named
from skymemory.conductor.strategies.plain import LeastLoad
from skymemory.sim.cluster.pool_base import Pool
from skymemory.sim.cluster.setup import ClusterSetup


@dataclass(frozen=True, slots=True)
class World:
    """What a scheduler is made with."""

    setup: ClusterSetup
    prefill: Fleet
    """Its slots are the pool's nodes."""
    decode: Fleet | None
    """None: the same instances decode."""
    cost: CostModel
    """What it believes."""
    pool: Pool
    admission: Admission


SchedulerFactory = Callable[[World], Scheduler]


@dataclass(frozen=True, slots=True)
class ErringModel(CostModel):
    """A cost model as a scheduler has it: every estimate of a prefill is off by a seeded draw.

    Normal, of mean 0 and a standard deviation of ``error``, cut off at three; equal questions get equal answers.
    """

    factors: tuple[float, ...] = (1.0,)

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        mixed = (int(tokens) * 0x9E3779B97F4A7C15 + int(cached) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        return CostModel.prefill_s(self, tokens, cached) * self.factors[(mixed >> 40) % len(self.factors)]


def believed(setup: ClusterSetup) -> CostModel:
    """What the scheduler estimates with."""
    cost = setup.believed or setup.cost
    if not setup.error:
        return cost
    dice = random.Random(setup.seed)
    factors = tuple(1 + setup.error * max(-3.0, min(3.0, dice.gauss(0, 1))) for _ in range(4096))
    return ErringModel(**{field.name: getattr(cost, field.name) for field in fields(CostModel)}, factors=factors)


def scheduler_named(name: str, world: World) -> Scheduler:
    """A strategy of the router for those that prefill; those that decode by least load.

    Raises:
        InvalidInput: there is none of that name.
    """
    scorer: Scorer = named(name, cost=world.cost) if name == "least-ttft" else named(name)
    prefill = Picker(world.prefill, scorer, seed=world.setup.seed)
    decode = None if world.decode is None else Picker(world.decode, LeastLoad(), seed=world.setup.seed)
    return Scheduler(prefill, decode, world.admission)
