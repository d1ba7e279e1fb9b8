"""Schedulers by name, for a simulated cluster: those of production, given what they would know.

They estimate with what the cluster is believed to be, not with what it is (``Estimates``). Where caches are the
conductor's schedulers ask the pool, which says what is true at that moment; the router's strategies learn it from what
they sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skymemory.conductor.admission.base import Admission
from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.transfer import network_of
from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.scheduling.named import SCHEDULERS, build
from skymemory.conductor.scheduling.prefill import PrefillScheduler
from skymemory.conductor.strategies.least_ttft import LeastTtft
from skymemory.conductor.strategies.named import STRATEGIES, named
from skymemory.conductor.strategies.plain import LeastLoad
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.estimates import ErringSpeeds, Estimates
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
    estimates: Estimates
    """What it believes of prefills."""
    pool: Pool
    admission: Admission


SchedulerFactory = Callable[[World], Scheduler]
NAMES = (*SCHEDULERS, *(name for name in STRATEGIES if name not in SCHEDULERS))


def scheduler_named(name: str, world: World, **options: Any) -> Scheduler:
    """One of ``NAMES``: the conductor's schedulers, or a strategy of the router for those that prefill.

    With the router's strategies, requests decode where the fewest are.

    Raises:
        InvalidInput: there is none of that name, or no such option of it.
    """
    if name in SCHEDULERS:
        made = _of_the_conductor(name, world, options)
    elif name in STRATEGIES:
        made = _of_the_router(name, world, options)
    else:
        raise InvalidInput(f"no scheduler {name!r}; there are {', '.join(NAMES)}")
    setup, scorer = world.setup, made.prefill.scorer
    if setup.error and isinstance(scorer, PrefillScheduler | LeastTtft):
        scorer.speeds = ErringSpeeds(world.estimates, setup.error, setup.seed)
    return made


def _of_the_conductor(name: str, world: World, options: Mapping[str, Any]) -> Scheduler:
    setup, pool = world.setup, world.pool
    media = dict(pool.media())
    if setup.believed is not None and setup.pool.network is None:
        media["network"] = network_of(world.cost)
    return build(
        name,
        prefill=world.prefill,
        decode=world.decode,
        cost=world.cost,
        holdings=pool,
        media=media,
        far=pool,
        ways=pool,
        admission=world.admission,
        prefill_cost=world.estimates,
        kv_tokens=setup.kv_tokens,
        seed=setup.seed,
        **options,
    )


def _of_the_router(name: str, world: World, options: Mapping[str, Any]) -> Scheduler:
    cost, seed = world.estimates if name == "least-ttft" else None, world.setup.seed
    prefill = Picker(world.prefill, named(name, cost=cost, **options), seed)
    decode = None if world.decode is None else Picker(world.decode, LeastLoad(), seed + 1)
    return Scheduler(prefill, decode, world.admission)
