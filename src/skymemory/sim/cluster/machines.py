"""All instances of a simulated cluster, with what schedulers know of them: their fleets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from skymemory.conductor.fleet import Fleet
from skymemory.sim.cluster.clock import Clock
from skymemory.sim.cluster.decode import CoupledInstance, DecodeInstance
from skymemory.sim.cluster.job import Gaps, Job, Steps, Stream
from skymemory.sim.cluster.pool import ClusterPool, PoolSettings
from skymemory.sim.cluster.pool_base import Pool
from skymemory.sim.cluster.prefill import Pipeline, PrefillInstance
from skymemory.sim.cluster.setup import ClusterSetup


@dataclass(frozen=True, slots=True)
class Told:
    """Who hears what of the instances."""

    begun: Callable[[Job, float, float], None]
    """A prefill begins now, and will end then."""
    prefilled: Callable[[Job, float], None]
    coupled_prefilled: Callable[[Job, float], Stream | None]
    joined: Callable[[Stream, float], None]
    answered: Callable[[Stream, float], None]


class Machines:
    """Instances that prefill, or are coupled, have the numbers of their slots; those that decode have their own."""

    def __init__(self, setup: ClusterSetup, clock: Clock, gaps: Gaps, pool: Pool, told: Told) -> None:
        self.prefill_names, self.decode_names = setup.prefilling(), setup.decoding()
        self.prefill_fleet, self.decode_fleet = Fleet(), Fleet()
        for name in self.prefill_names:
            self.prefill_fleet.add(name)
        for name in self.decode_names:
            self.decode_fleet.add(name)
        self.prefills: list[PrefillInstance] = []
        self.coupled: list[CoupledInstance] = []
        self.down: set[str] = set()
        """Names of those that are dead."""
        steps = Steps(setup.cost)
        for number in range(len(self.prefill_names)):
            if setup.coupled:
                sizes = (setup.kv_tokens - setup.coupled_cache_tokens, setup.most_batch, setup.mixed_tokens)
                hear = (told.coupled_prefilled, told.answered)
                self.coupled.append(CoupledInstance(number, clock, setup.cost, pool, steps, gaps, *sizes, *hear))
            else:
                pipeline = Pipeline(setup.cost, setup.pipeline, setup.chunk_tokens)
                self.prefills.append(
                    PrefillInstance(number, clock, setup.cost, pipeline, pool, told.begun, told.prefilled)
                )
        limits = (setup.kv_tokens, setup.most_batch)
        self.decodes = [
            DecodeInstance(clock, steps, gaps, *limits, told.joined, told.answered) for _ in self.decode_names
        ]

    def kill(self, name: str, now_s: float) -> tuple[list[Job], list[Stream]]:
        """It dies: who was there, before the first token and after it."""
        self.down.add(name)
        server = self.fleet_of(name).servers[name]
        server.healthy = False
        if name in self.decode_names:
            return [], self.decodes[server.slot].fail(now_s)
        if self.coupled:
            return self.coupled[server.slot].fail(now_s)
        return self.prefills[server.slot].fail(now_s), []

    def revive(self, name: str) -> None:
        """It is back, empty."""
        self.down.discard(name)
        self.fleet_of(name).servers[name].healthy = True

    def fleet_of(self, name: str) -> Fleet:
        return self.decode_fleet if name in self.decode_names else self.prefill_fleet

    def could_take(self, job: Job) -> bool:
        """Whether a machine has the memory for it, if it were alone there."""
        if self.coupled:
            return self.coupled[0].takes(job)
        return job.output_tokens == 1 or self.decodes[0].takes(job.prompt_tokens + job.output_tokens)

    def prefill_busy_s(self) -> list[float]:
        return [one.busy_s for one in self.prefills] or [one.busy_s for one in self.coupled]

    def decode_busy_s(self) -> list[float]:
        return [one.busy_s for one in self.decodes] or [one.decode_busy_s for one in self.coupled]


def pool_of(setup: ClusterSetup) -> Pool:
    """A coupled instance caches in its own accelerators' memory, and shares nothing."""
    names = [*setup.prefilling(), *setup.decoding()]
    if setup.coupled:
        cache_bytes = setup.cost.kv_bytes(setup.coupled_cache_tokens)
        return ClusterPool(names, setup.cost, PoolSettings(dram_bytes=cache_bytes))
    settings = setup.pool
    return ClusterPool(names, setup.cost, replace(settings, dram_bytes=settings.dram_bytes * setup.pipeline))
