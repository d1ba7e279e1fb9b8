"""Instances of a simulated cluster."""

from __future__ import annotations

from skymemory.conductor.picker import Fleet
from skymemory.conductor.pools import Role
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.decode import CoupledInstance, DecodeInstance
from skymemory_lab.sim.cluster.job import DecodeBatch, DecodeStream, Gaps, Job, Listeners, Steps
from skymemory_lab.sim.cluster.pool import ClusterPool
from skymemory_lab.sim.cluster.prefill import Pipeline, PrefillInstance
from skymemory_lab.sim.cluster.setup import ClusterSetup


class Machines:
    """All instances, by their slots in the fleets from which schedulers choose.

    An elastic instance is in both fleets, closed in that of the other role. Prefill slots are nodes of the KV pool.
    """

    def __init__(self, setup: ClusterSetup, clock: Clock, gaps: Gaps, pool: ClusterPool, listeners: Listeners) -> None:
        prefilling, decoding = setup.prefilling(), setup.decoding()
        self.elastic = setup.pools == "elastic"
        self.role: dict[str, Role] = {**dict.fromkeys(prefilling, "prefill"), **dict.fromkeys(decoding, "decode")}
        self.prefill_names = prefilling + decoding * self.elastic
        self.decode_names = decoding + prefilling * self.elastic
        self.prefill_fleet, self.decode_fleet = Fleet(), Fleet()
        for name in self.prefill_names:
            self.prefill_fleet.add(name)
        for name in self.decode_names:
            self.decode_fleet.add(name)
        self.prefills: list[PrefillInstance] = []
        self.coupled: list[CoupledInstance] = []
        self.down: set[str] = set()
        self._first_decode, self._handover = len(prefilling), setup.handover
        # Shared by all machines, which are equal: the coefficients are looked up for each step.
        steps = Steps(setup.cost)
        for number in range(len(self.prefill_names)):
            if setup.coupled:
                batch = DecodeBatch(steps, gaps)
                self.coupled.append(CoupledInstance(number, clock, setup, pool, batch, listeners))
            else:
                pipeline = Pipeline(setup.cost, setup.pipeline, setup.chunk_tokens)
                self.prefills.append(PrefillInstance(number, clock, pipeline, pool, listeners))
        self.decodes = [DecodeInstance(clock, setup, DecodeBatch(steps, gaps), listeners) for _ in self.decode_names]

    def node_of_decode(self, slot: int) -> int:
        """Return the KV pool's node of a decode slot."""
        return (self._first_decode + slot) % len(self.role)

    def prefilling(self) -> list[PrefillInstance] | list[CoupledInstance]:
        if self.coupled or not self.elastic:
            return self.prefills or self.coupled
        return [self.prefills[server.slot] for server in self.prefill_fleet if self.role[server.name] == "prefill"]

    def decoding(self) -> list[DecodeInstance] | list[CoupledInstance]:
        if self.coupled or not self.elastic:
            return self.decodes or self.coupled
        return [self.decodes[server.slot] for server in self.decode_fleet if self.role[server.name] == "decode"]

    def kill(self, name: str, now_s: float) -> tuple[list[Job], list[DecodeStream]]:
        """Fail an instance. Return its requests before and after the first token."""
        self.down.add(name)
        jobs: list[Job] = []
        streams: list[DecodeStream] = []
        if (server := self.prefill_fleet.servers.get(name)) is not None:
            server.healthy = False
            if self.coupled:
                return self.coupled[server.slot].fail(now_s)
            jobs = self.prefills[server.slot].fail(now_s)
        if (server := self.decode_fleet.servers.get(name)) is not None:
            server.healthy = False
            streams = self.decodes[server.slot].fail(now_s)
        return jobs, streams

    def revive(self, name: str) -> None:
        self.down.discard(name)
        for fleet in (self.prefill_fleet, self.decode_fleet):
            if name in fleet.servers:
                fleet.servers[name].healthy = True

    def could_take(self, job: Job) -> bool:
        """Return True if the job fits into an idle instance."""
        if self.coupled:
            return self.coupled[0].takes(job)
        at_prefill = job.output_tokens == 1 and self._handover is None
        return at_prefill or self.decodes[0].takes(job.prompt_tokens + job.output_tokens)

    def prefill_busy_s(self) -> list[float]:
        return [instance.busy_s for instance in self.prefills] or [instance.busy_s for instance in self.coupled]

    def decode_busy_s(self) -> list[float]:
        return [instance.busy_s for instance in self.decodes] or [instance.decode_busy_s for instance in self.coupled]
