"""The simulated cluster: the scheduler of production, instances in virtual time, and each request's way between them.

A request is placed when it arrives. Loads that its plan wants begin then. Its prefill gives the first token; its KV
streams to the decoding instance meanwhile, and when the last of it is there it joins the batch. When an instance dies,
all that is there ends with it; what was let in is placed again, ``retries`` times. A request whose decoding instance is
dead when its KV comes has failed too: its prefix is cached by then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from skymemory.conductor.admission.base import Admission, Refusal
from skymemory.conductor.picker import NoServer
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Placement
from skymemory.sim.cluster.accounts import Accounts
from skymemory.sim.cluster.batch import Stream
from skymemory.sim.cluster.clock import Clock
from skymemory.sim.cluster.estimates import Estimates
from skymemory.sim.cluster.gaps import Gaps
from skymemory.sim.cluster.job import Job
from skymemory.sim.cluster.loads import Loads
from skymemory.sim.cluster.machines import Machines, Told, pool_of
from skymemory.sim.cluster.outcome import ClusterRun
from skymemory.sim.cluster.pool_base import Pool
from skymemory.sim.cluster.requests import asked as asked_of
from skymemory.sim.cluster.schedulers import SchedulerFactory, World
from skymemory.sim.cluster.setup import ClusterSetup, Failure
from skymemory.sim.trace import TraceRequest

UNEVENTFUL = 64
"""Samples without an event between them, from which on they are left out."""


class Simulation:
    """For one run."""

    def __init__(
        self, setup: ClusterSetup, scheduler: SchedulerFactory, admission: Admission, pool: Pool | None = None
    ) -> None:
        self._setup, self._clock, self._gaps = setup, Clock(), Gaps()
        self._pool = pool or pool_of(setup)
        told = Told(self._begun, self._prefilled, self._coupled_prefilled, self._joined, self._answered)
        self._machines = machines = Machines(setup, self._clock, self._gaps, self._pool, told)
        self._estimates = Estimates(setup)
        decoders = machines.decode_fleet if machines.decodes else None
        fleets = (machines.prefill_fleet, decoders)
        self._scheduler = scheduler(World(setup, *fleets, self._estimates.cost, self._estimates, self._pool, admission))
        self._accounts = Accounts(setup.spans)
        self._loads = Loads(setup.slo, machines)
        self._arrivals: Sequence[TraceRequest] = ()
        self._asked: Sequence[Request] | None = None
        self._dice = random.Random(setup.seed)
        self._arrived = 0

    def run(self, requests: Sequence[TraceRequest], asked: Sequence[Request] | None) -> ClusterRun:
        """``requests`` in the order of arrival."""
        self._arrivals, self._asked = requests, asked
        if requests:
            self._clock.at(requests[0].at_s, self._arrive)
            self._clock.at(requests[0].at_s, self._sample)
            for failure in self._setup.failures:
                self._fail_at(failure)
        self._clock.run()
        seconds, counts = self._gaps.classes()
        return ClusterRun(
            outcomes=self._accounts.outcomes(len(requests)),
            loads=self._loads.samples,
            prefill_busy_s=self._machines.prefill_busy_s(),
            decode_busy_s=self._machines.decode_busy_s(),
            spans=self._accounts.spans,
            gap_seconds=seconds,
            gap_tokens=counts,
            pool=dict(self._pool.figures()),
        )

    # --- a request's way ---

    def _arrive(self, now_s: float) -> None:
        """The next of them."""
        number = self._arrived
        self._arrived += 1
        if self._arrived < len(self._arrivals):
            self._clock.at(self._arrivals[self._arrived].at_s, self._arrive)
        request = self._arrivals[number]
        asked = self._asked[number] if self._asked is not None else asked_of(request, self._setup, self._dice)
        output = max(1, request.output_tokens)
        ids = request.blocks(self._setup.partial)
        job = Job(number, request.at_s, request.input_tokens, output, ids, asked)
        self._accounts.open[number] = job
        if not self._machines.could_take(job):
            self._accounts.not_served(job, "failed", now_s)
            return
        self._pool.at(now_s)
        try:
            placed = self._scheduler.place(asked, now_s)
        except NoServer:
            self._accounts.not_served(job, "failed", now_s)
            return
        if isinstance(placed, Refusal):
            self._accounts.not_served(job, "refused", now_s)
        else:
            self._send(job, placed, now_s)

    def _send(self, job: Job, placement: Placement, now_s: float) -> None:
        machines, prefill = self._machines, placement.prefill
        self._scheduler.begin(placement, now_s)
        job.restart(placement, machines.prefill_fleet.servers[prefill.server].slot)
        plan = prefill.plan
        cached = prefill.matched_tokens if plan is None else plan.cached_tokens
        job.work_s = self._estimates.prefill_s(job.prompt_tokens, cached)
        if placement.decode is None:
            job.decode = job.prefill
            machines.coupled[job.prefill].arrive(job, now_s)
            return
        job.decode = machines.decode_fleet.servers[placement.decode.server].slot
        if plan is not None and plan.loaded_tokens:
            job.loading = self._pool.load(job.prefill, job.ids, plan, now_s)
            if job.loading.loaded_tokens:
                name = machines.prefill_names[job.prefill]
                self._accounts.span(name, "load", now_s, job.loading.done_s, job)
        machines.prefills[job.prefill].arrive(job, now_s)

    def _begun(self, job: Job, now_s: float, done_s: float) -> None:
        """Its prefill begins: its KV streams to where it will decode, as it is computed, or waits for the end."""
        if job.output_tokens == 1:
            return
        target = len(self._machines.prefills) + job.decode
        layers = self._setup.cost.shape.layers if self._setup.layer_wise else 1
        job.there_s = self._pool.stream(job.prefill, target, job.prompt_tokens, now_s, done_s - now_s, layers)

    def _first_token(self, job: Job, now_s: float) -> Refusal | None:
        """What was computed is cached. A refusal: its decoding instance may not take it."""
        self._accounts.span(self._machines.prefill_names[job.prefill], "prefill", job.begun_s, now_s, job)
        job.first_token_s, job.prefilled = now_s, True
        self._pool.stored(job.prefill, job.ids, now_s)
        return self._scheduler.prefilled(job.placed, now_s, job.prompt_tokens - job.computed_tokens)

    def _prefilled(self, job: Job, now_s: float) -> None:
        if self._first_token(job, now_s) is not None:
            self._accounts.not_served(job, "refused_after_prefill", now_s)
        elif job.output_tokens == 1:
            self._scheduler.decoding(job.placed, now_s)
            self._completed(job, now_s, None)
        else:
            self._accounts.span(self._machines.prefill_names[job.prefill], "transfer", job.begun_s, job.there_s, job)
            job.leaving = True
            attempt = job.attempts
            self._clock.at(job.there_s, lambda at_s: self._there(job, attempt, at_s))

    def _there(self, job: Job, attempt: int, now_s: float) -> None:
        """All of its KV is at the decoding instance."""
        if job.over or job.attempts != attempt:
            return
        job.leaving = False
        if self._machines.decode_names[job.decode] in self._machines.down:
            self._book_out(job, now_s)
            self._again(job, now_s)
        else:
            self._machines.decodes[job.decode].arrive(job.stream(), now_s)

    def _coupled_prefilled(self, job: Job, now_s: float) -> Stream | None:
        self._first_token(job, now_s)
        if job.output_tokens > 1:
            return job.stream()
        self._completed(job, now_s, None)
        return None

    def _joined(self, stream: Stream, now_s: float) -> None:
        job = self._accounts.open[stream.number]
        job.decoding = True
        self._scheduler.decoding(job.placed, now_s)

    def _answered(self, stream: Stream, now_s: float) -> None:
        job = self._accounts.open[stream.number]
        names = self._machines.decode_names or self._machines.prefill_names
        self._accounts.span(names[job.decode], "decode", job.first_token_s, now_s, job)
        self._completed(job, now_s, stream.worst_s)

    def _completed(self, job: Job, now_s: float, worst_s: float | None) -> None:
        slo, after_s = self._setup.slo, now_s - job.first_token_s
        met = job.first_token_s - job.at_s <= slo.ttft_s and after_s <= slo.tbt_s * (job.output_tokens - 1)
        self._scheduler.ended(job.placed, now_s, met)
        self._accounts.completed(job, now_s, worst_s)

    # --- deaths ---

    def _fail_at(self, failure: Failure) -> None:
        self._clock.at(failure.at_s, lambda now_s: self._die(failure, now_s))

    def _die(self, failure: Failure, now_s: float) -> None:
        name, machines = failure.instance, self._machines
        if name in machines.down:
            return
        jobs, streams = machines.kill(name, now_s)
        jobs += [self._accounts.open[stream.number] for stream in streams]
        server = machines.fleet_of(name).servers[name]
        if name in machines.prefill_names:
            self._pool.lost(server.slot, now_s)
            jobs += [job for job in self._accounts.open.values() if job.leaving and job.prefill == server.slot]
        for job in jobs:
            self._book_out(job, now_s)
        picker = self._scheduler.decode if name in machines.decode_names else self._scheduler.prefill
        if picker is not None:
            picker.scorer.forget(server)
        for job in jobs:
            self._again(job, now_s)
        self._clock.at(now_s + failure.down_s, lambda _: machines.revive(name))

    def _book_out(self, job: Job, now_s: float) -> None:
        self._scheduler.failed(job.placed, now_s, job.prefilled, job.decoding)

    def _again(self, job: Job, now_s: float) -> None:
        """It was let in: another try, if one is left and any server takes it."""
        if job.attempts <= self._setup.retries:
            self._pool.at(now_s)
            try:
                placement = self._scheduler.place_again(job.placed, now_s)
            except NoServer:
                pass
            else:
                self._send(job, placement, now_s)
                return
        self._accounts.not_served(job, "failed", now_s)

    def _sample(self, now_s: float) -> None:
        """A grid of ``sample_s``, without long stretches in which nothing happens: a value holds until the next."""
        self._loads.sample(now_s)
        next_s = self._clock.next_s
        if next_s < math.inf and (self._accounts.open or self._arrived < len(self._arrivals)):
            steps = math.ceil((next_s - now_s) / self._setup.sample_s)
            self._clock.at(now_s + (steps if steps > UNEVENTFUL else 1) * self._setup.sample_s, self._sample)
