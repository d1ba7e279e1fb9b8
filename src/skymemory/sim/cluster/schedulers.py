"""Schedulers by name, for a simulated cluster: those of production, given what they would know.

They estimate with what the cluster is believed to be, not with what it is (``Estimates``). Where caches are the
conductor's schedulers ask the pool, which says what is true at that moment; the router's strategies learn it from what
they sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skymemory.conductor.admission.base import Admission
from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.cost_model.model import network_of, pipelined_s
from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.scheduling.named import SCHEDULERS, build
from skymemory.conductor.scheduling.prefill import PrefillScheduler
from skymemory.conductor.strategies.estimates import GivenSpeeds, PrefillCost
from skymemory.conductor.strategies.least_ttft import LeastTtft
from skymemory.conductor.strategies.named import STRATEGIES, named
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.config import suggestion
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.pool_base import Pool
from skymemory.sim.cluster.prefill import Pipeline
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.trace import BLOCK_TOKENS, TraceRequest, at_rate, jittered

# A trace's requests as the simulated cluster's scheduler is asked about them.


def timed(requests: Sequence[TraceRequest], setup: ClusterSetup) -> list[TraceRequest]:
    """With the setup's jitter and at its rate."""
    moved = jittered(requests, setup.seed, setup.jitter_s) if setup.jitter_s else list(requests)
    return at_rate(moved, setup.rate) if setup.rate != 1.0 else moved


def asked(request: TraceRequest, setup: ClusterSetup, dice: random.Random) -> Request:
    """The blocks are the trace's own numbers; ``dice`` for what is said of the answer's length, if it errs."""
    blocks = np.array(request.blocks(setup.partial), dtype=np.uint64)
    prompt = Prompt(blocks, blocks, BLOCK_TOKENS, request.input_tokens)
    said: int | None = None
    if setup.tells_output:
        said = request.output_tokens
        if setup.output_error:
            said = max(1, round(said * (1 + setup.output_error * max(-3.0, min(3.0, dice.gauss(0, 1))))))
    return Request(prompt, session=str(request.session), output_tokens=said)


# What a scheduler believes that a prefill takes: apart from what it takes in the simulation.


LEAST_FACTOR = 0.1
_DRAWS = 4096


class Estimates:
    """By the cost model that is believed, for the pipelines that there are."""

    def __init__(self, setup: ClusterSetup) -> None:
        self.cost: CostModel = setup.believed or setup.cost
        self._pipeline = Pipeline(self.cost, setup.pipeline, setup.chunk_tokens)

    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        """Seconds from the beginning of a prefill alone on its machines to its first token."""
        machines = self._pipeline.machines
        seconds = self.cost.prefill_s(tokens, cached)
        if machines > 1:
            chunks_s = self._pipeline.chunks_s(max(0, min(int(cached), int(tokens) - 1)), int(tokens))
            seconds += pipelined_s(chunks_s, machines) - sum(chunks_s) * machines
        return seconds

    def drain_s(self, tokens: float, cached: float) -> float:
        """Of that, the seconds in which the first machine is free already."""
        chunks_s = self._pipeline.chunks_s(max(0, min(int(cached), int(tokens) - 1)), int(tokens))
        return (self._pipeline.machines - 1) * max(chunks_s, default=0.0)


class ErringSpeeds(GivenSpeeds):
    """Each estimate is off by a factor of its own, drawn from the seed for every server and length of prompt.

    Normal, of mean 1 and a standard deviation of ``error``, never below a tenth. Servers of which nothing differs come
    out different; all that is asked of one server for one prompt is off by as much, whatever it has cached of it. The
    work that is then believed to wait there is off by it too. Equal questions get equal answers.
    """

    def __init__(self, cost: PrefillCost, error: float, seed: int) -> None:
        super().__init__(cost)
        dice = random.Random(seed)
        self._errors = [max(LEAST_FACTOR, 1.0 + error * dice.gauss(0.0, 1.0)) for _ in range(_DRAWS)]

    def prefills_s(self, slots: Sequence[int], tokens: int, cached: Sequence[int]) -> list[float]:
        seconds = super().prefills_s(slots, tokens, cached)
        return [one * self.factor(slot, tokens) for slot, one in zip(slots, seconds, strict=True)]

    def factor(self, slot: int, tokens: int) -> float:
        mixed = (tokens * 0x9E3779B97F4A7C15 + (slot + 1) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        return self._errors[(mixed ^ mixed >> 31) * 0x94D049BB133111EB >> 40 & _DRAWS - 1]


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
        raise InvalidInput(f"no scheduler {name!r}; {suggestion(name, NAMES)}")
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
        links=pool,
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
