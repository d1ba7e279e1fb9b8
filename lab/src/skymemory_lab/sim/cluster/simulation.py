"""The cluster simulator: production schedulers and admission rules over simulated instances in virtual time.

1. A request is placed when it arrives, and the loads of its plan start.
2. Its prefill gives the first token, while its KV streams to the decode instance.
3. When all KV has arrived, it joins the decode batch until its last token.
   With a ``PromptHandover`` its values go through a store, and the decode instance gives the first token.
4. If an instance fails, its requests are placed again, ``retries`` times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from skymemory.conductor.admission.registry import admission as admission_named
from skymemory.conductor.cost_model import CostModel
from skymemory.conductor.picker import NoServer
from skymemory.conductor.request import Request, Slo
from skymemory.conductor.scheduler import Admission, Refusal, ScheduledRequest
from skymemory.errors import InvalidInput
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.job import DecodeStream, Gaps, Job, Listeners
from skymemory_lab.sim.cluster.machines import Machines
from skymemory_lab.sim.cluster.outcome import ClusterRun, LoadSample, RequestOutcome, Span, Status
from skymemory_lab.sim.cluster.pool import ClusterPool
from skymemory_lab.sim.cluster.roles import Roles
from skymemory_lab.sim.cluster.schedulers import (
    BelievedEstimates,
    SchedulerFactory,
    World,
    get_scheduler_view,
    scheduler_named,
    timed,
)
from skymemory_lab.sim.cluster.setup import ClusterSetup, InstanceFailure, PoolSettings, PromptHandover
from skymemory_lab.sim.trace import TraceRequest

UNEVENTFUL = 64
"""Number of samples without events above which they are skipped."""


def run_cluster(
    requests: Sequence[TraceRequest],
    setup: ClusterSetup | None = None,
    scheduler: str | SchedulerFactory = "least-load",
    admission: str | Admission = "all",
    *,
    scheduler_views: Sequence[Request] | None = None,
) -> ClusterRun:
    """Simulate. Equal arguments give equal runs, with outcomes in the order after jitter.

    ``scheduler_views``: the requests as schedulers see them; only without jitter.

    Raises:
        InvalidInput: arrivals out of order, or an unknown name.
    """
    setup = setup or ClusterSetup()
    arriving = timed(requests, setup)
    before_s = -math.inf
    for at, request in enumerate(arriving):
        if request.at_s < before_s:
            raise InvalidInput(f"request {at} arrives at {request.at_s:g} s, after one at {before_s:g} s; sort them")
        before_s = request.at_s
    if scheduler_views is not None and (setup.jitter_s or len(scheduler_views) != len(arriving)):
        raise InvalidInput("scheduler_views: expected one per request, and jitter_s of 0")
    rule = admission_named(admission, setup.slo) if isinstance(admission, str) else admission
    factory: SchedulerFactory = partial(scheduler_named, scheduler) if isinstance(scheduler, str) else scheduler
    return Simulation(setup, factory, rule).run(arriving, scheduler_views)


# States of a request in ``Simulation``, and the event that starts each (``Job.over`` is the end of all paths):
#
#   _arrive   place: refused, no server -> over; else _send: booked, loads begin, it queues at its prefill instance
#   _on_prefill_begin  its prefill starts; its KV streams to the decode instance from now on
#   _prefilled (or _coupled_prefilled)  first token; refused before decoding -> over; answer of one token -> over
#   _there    all KV has arrived: it queues at the decode instance
#             with a ``PromptHandover``: _entering waits for the turns of the decode instance, _first is the first token
#   _joined   in the batch                _answered  last token -> over
#   _die      its instance failed: booked out, and placed again or over
#
# Events that a failure made obsolete stay in the clock; each checks that its attempt, life or plan is still the current
# one. Invariants, asserted at the end: every request ends once, and of every prompt that was prefilled all tokens are
# held, loaded or computed.


class Simulation:
    def __init__(self, setup: ClusterSetup, scheduler: SchedulerFactory, admission: Admission) -> None:
        self._setup, self._clock, self._gaps = setup, Clock(), Gaps()
        self._pool = pool_of(setup)
        listeners = Listeners(
            self._on_prefill_begin, self._prefilled, self._coupled_prefilled, self._joined, self._answered, self._first
        )
        self._machines = machines = Machines(setup, self._clock, self._gaps, self._pool, listeners)
        self._estimates = BelievedEstimates(setup)
        decoders = machines.decode_fleet if machines.decodes else None
        fleets = (machines.prefill_fleet, decoders)
        self._scheduler = scheduler(World(setup, *fleets, self._estimates.cost, self._estimates, self._pool, admission))
        self._accounts = Accounts(setup.spans)
        self._loads = InstanceLoads(setup.slo, machines)
        self._roles = Roles(setup, self._clock, machines) if setup.pools == "elastic" else None
        self._arrivals: Sequence[TraceRequest] = ()
        self._asked: Sequence[Request] | None = None
        self._dice = random.Random(setup.seed)
        self._arrived = 0

    def run(self, requests: Sequence[TraceRequest], scheduler_views: Sequence[Request] | None) -> ClusterRun:
        self._arrivals, self._asked = requests, scheduler_views
        if requests:
            self._clock.at(requests[0].at_s, self._arrive)
            self._clock.at(requests[0].at_s, self._sample)
            for failure in self._setup.failures:
                self._fail_at(failure)
        self._clock.run()
        if self._roles is not None:
            self._roles.end(self._clock.now_s)
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
            roles=self._roles.spans if self._roles is not None else (),
        )

    def _arrive(self, now_s: float) -> None:
        # Place the next request of the trace, or refuse it, and schedule the following arrival.
        number = self._arrived
        self._arrived += 1
        if self._arrived < len(self._arrivals):
            self._clock.at(self._arrivals[self._arrived].at_s, self._arrive)
        request = self._arrivals[number]
        scheduler_view = (
            self._asked[number] if self._asked is not None else get_scheduler_view(request, self._setup, self._dice)
        )
        output = max(1, request.output_tokens)
        ids = request.blocks(self._setup.partial)
        job = Job(number, request.at_s, request.input_tokens, output, ids, scheduler_view)
        self._accounts.open[number] = job
        if not self._machines.could_take(job):
            self._accounts.not_served(job, "failed", now_s)
            return
        # Schedulers query the pool through ``match``, which has no time argument, so the time is set before.
        self._pool.at(now_s)
        try:
            placement = self._scheduler.place(scheduler_view, now_s)
        except NoServer:
            self._accounts.not_served(job, "failed", now_s)
            return
        if isinstance(placement, Refusal):
            self._accounts.not_served(job, "refused", now_s)
        else:
            self._send(job, placement, now_s)

    def _send(self, job: Job, placement: ScheduledRequest, now_s: float) -> None:
        # Book a placement; after ``request_s`` the request is at its prefill instance.
        machines, prefill = self._machines, placement.prefill
        self._scheduler.begin(placement, now_s)
        job.restart(placement, machines.prefill_fleet.servers[prefill.server].slot)
        plan = prefill.plan
        cached = prefill.matched_tokens if plan is None else plan.cached_tokens
        job.work_s = self._estimates.prefill_s(job.prompt_tokens, cached)
        if placement.decode is None:
            job.decode = job.prefill
        else:
            job.decode = machines.decode_fleet.servers[placement.decode.server].slot
        if self._setup.request_s:
            attempt = job.attempts
            self._clock.at(now_s + self._setup.request_s, lambda at_s: self._enter(job, attempt, at_s))
        else:
            self._enter(job, job.attempts, now_s)

    def _enter(self, job: Job, attempt: int, now_s: float) -> None:
        # Begin the loads of the job's plan, and queue it at its prefill or coupled instance.
        if job.over or job.attempts != attempt:
            return
        machines, plan = self._machines, job.required_placement.prefill.plan
        if job.required_placement.decode is None:
            machines.coupled[job.prefill].arrive(job, now_s)
            return
        if plan is not None and plan.loaded_tokens:
            job.loading = self._pool.load(job.prefill, job.ids, plan, now_s)
            if job.loading.loaded_tokens:
                name = machines.prefill_names[job.prefill]
                self._accounts.span(name, "load", now_s, job.loading.done_s, job)
        machines.prefills[job.prefill].arrive(job, now_s)

    def _on_prefill_begin(self, job: Job, now_s: float, done_s: float) -> None:
        # Stream the KV to the decode instance until the prefill's end, ``done_s``, or later.
        if job.output_tokens == 1 or self._setup.handover is not None:
            return
        target = self._machines.node_of_decode(job.decode)
        layers = self._setup.cost.shape.layers if self._setup.layer_wise else 1
        job.there_s = self._pool.stream(job.prefill, target, job.prompt_tokens, now_s, done_s - now_s, layers)

    def _first_token(self, job: Job, now_s: float) -> Refusal | None:
        """Cache the prompt. Return a refusal if it may not decode."""
        self._accounts.span(self._machines.prefill_names[job.prefill], "prefill", job.begun_s, now_s, job)
        job.first_token_s, job.prefilled = now_s, True
        self._pool.stored(job.prefill, job.ids, now_s)
        return self._scheduler.prefilled(job.required_placement, now_s, job.prompt_tokens - job.computed_tokens)

    def _prefilled(self, job: Job, now_s: float) -> None:
        # End the job, or move it to its decode instance once its KV has arrived or passed the store.
        if self._first_token(job, now_s) is not None:
            self._accounts.not_served(job, "refused_after_prefill", now_s)
        elif self._setup.handover is not None:
            self._hand_over(job, self._setup.handover, now_s)
        elif job.output_tokens == 1:
            self._scheduler.decoding(job.required_placement, now_s)
            self._completed(job, now_s, None)
        else:
            self._accounts.span(self._machines.prefill_names[job.prefill], "transfer", job.begun_s, job.there_s, job)
            job.leaving = True
            attempt = job.attempts
            self._clock.at(job.there_s, lambda at_s: self._there(job, attempt, at_s))

    def _hand_over(self, job: Job, handover: PromptHandover, now_s: float) -> None:
        job.leaving, attempt = True, job.attempts
        stored_s = now_s + handover.save_s + handover.save_token_s * job.computed_tokens
        self._clock.at(stored_s, lambda at_s: self._entering(job, handover, attempt, 0, at_s))

    def _entering(self, job: Job, handover: PromptHandover, attempt: int, part: int, now_s: float) -> None:
        # Pass the prompt's blocks through the store to the decode instance, whose cache changes only between steps.
        # Part 0 asks what is missing, part 1 caches what was fetched; half of the fetch time follows each.
        if job.over or job.attempts != attempt:
            return
        machines, node = self._machines, self._machines.node_of_decode(job.decode)
        free_s = now_s
        if machines.decode_names[job.decode] not in machines.down:
            free_s = machines.decodes[job.decode].turn_ends_s(now_s)
        if part == 0:
            missing_tokens = job.prompt_tokens - self._pool.leading(node, job.ids) * self._pool.block_tokens
            done_s = free_s + handover.fetch_s / 2 + handover.fetch_token_s * missing_tokens
            self._clock.at(done_s, lambda at_s: self._entering(job, handover, attempt, 1, at_s))
        else:
            self._pool.stored(node, job.ids, now_s)
            self._clock.at(free_s + handover.fetch_s / 2, lambda at_s: self._there(job, attempt, at_s))

    def _first(self, stream: DecodeStream, now_s: float) -> None:
        # Record a first token that the decode instance computed.
        job = self._accounts.open[stream.number]
        job.first_token_s = now_s
        if job.output_tokens == 1:
            self._scheduler.decoding(job.required_placement, now_s)
            self._completed(job, now_s, None)

    def _stream_of(self, job: Job) -> DecodeStream:
        handover = self._setup.handover
        if handover is None:
            return job.stream()
        return job.stream_after(handover.take_s + handover.take_token_s * job.prompt_tokens)

    def _there(self, job: Job, attempt: int, now_s: float) -> None:
        # Queue a job whose KV has arrived at its decode instance; if that has failed, place it again.
        if job.over or job.attempts != attempt:
            return
        job.leaving = False
        if self._machines.decode_names[job.decode] in self._machines.down:
            self._book_out(job, now_s)
            self._again(job, now_s)
        else:
            self._machines.decodes[job.decode].arrive(self._stream_of(job), now_s)

    def _coupled_prefilled(self, job: Job, now_s: float) -> DecodeStream | None:
        self._first_token(job, now_s)
        if job.output_tokens > 1:
            return job.stream()
        self._completed(job, now_s, None)
        return None

    def _joined(self, stream: DecodeStream, now_s: float) -> None:
        job = self._accounts.open[stream.number]
        job.decoding = True
        self._scheduler.decoding(job.required_placement, now_s)

    def _answered(self, stream: DecodeStream, now_s: float) -> None:
        job = self._accounts.open[stream.number]
        names = self._machines.decode_names or self._machines.prefill_names
        self._accounts.span(names[job.decode], "decode", job.first_token_s, now_s, job)
        self._completed(job, now_s, stream.worst_s)

    def _completed(self, job: Job, now_s: float, worst_s: float | None) -> None:
        slo, after_s = self._setup.slo, now_s - job.first_token_s
        met = job.first_token_s - job.at_s <= slo.ttft_s and after_s <= slo.tbt_s * (job.output_tokens - 1)
        self._scheduler.on_request_end(job.required_placement, now_s, met)
        self._accounts.completed(job, now_s, worst_s)

    def _fail_at(self, failure: InstanceFailure) -> None:
        self._clock.at(failure.at_s, lambda now_s: self._die(failure, now_s))

    def _die(self, failure: InstanceFailure, now_s: float) -> None:
        # Fail an instance until ``down_s`` later, and place its requests again.
        name, machines = failure.instance, self._machines
        if name in machines.down:
            return
        jobs, streams = machines.kill(name, now_s)
        jobs += [self._accounts.open[stream.number] for stream in streams]
        node = machines.prefill_fleet.servers.get(name)
        if node is not None:
            self._pool.lost(node.slot, now_s)
            leaving = [job for job in self._accounts.open.values() if job.leaving and job.prefill == node.slot]
            jobs += leaving
        # Requests are booked out before the scorer forgets the server, and placed again afterwards. Otherwise they
        # would teach the scorer about a cache that is empty, or be placed by a cache that is gone.
        for job in jobs:
            self._book_out(job, now_s)
        for picker in (self._scheduler.prefill, self._scheduler.decode):
            if picker is not None and name in picker.fleet.servers:
                picker.scorer.forget(picker.fleet.servers[name])
        for job in jobs:
            self._again(job, now_s)
        self._clock.at(now_s + failure.down_s, lambda _: machines.revive(name))

    def _book_out(self, job: Job, now_s: float) -> None:
        self._scheduler.failed(job.required_placement, now_s, job.prefilled, job.decoding)

    def _again(self, job: Job, now_s: float) -> None:
        # Place the job again if it has attempts left; else it fails.
        if job.attempts <= self._setup.retries:
            self._pool.at(now_s)
            try:
                placement = self._scheduler.place_again(job.required_placement, now_s)
            except NoServer:
                pass
            else:
                self._send(job, placement, now_s)
                return
        self._accounts.not_served(job, "failed", now_s)

    def _sample(self, now_s: float) -> None:
        """Sample the loads every ``sample_s``, except in long idle stretches."""
        self._loads.sample(now_s)
        if self._roles is not None:
            self._roles.observe(now_s)
        next_s = self._clock.next_s
        if next_s < math.inf and (self._accounts.open or self._arrived < len(self._arrivals)):
            steps = math.ceil((next_s - now_s) / self._setup.sample_s)
            self._clock.at(now_s + (steps if steps > UNEVENTFUL else 1) * self._setup.sample_s, self._sample)


def pool_of(setup: ClusterSetup) -> ClusterPool:
    """Return the pool of a setup. Coupled instances cache in accelerator memory and share nothing."""
    names, settings = [*setup.prefilling(), *setup.decoding()], setup.pool
    if setup.coupled:
        return ClusterPool(names, setup.cost, PoolSettings(setup.cost.kv_bytes(setup.coupled_cache_tokens)))
    return new_pool(names, setup.cost, replace(settings, dram_bytes=settings.dram_bytes * setup.pipeline))


def new_pool(names: Sequence[str], cost: CostModel, settings: PoolSettings) -> ClusterPool:
    if settings.sky is None:
        return ClusterPool(names, cost, settings)
    # Imported late: it imports the constellation's plans and sockets.
    from skymemory_lab.sim.cluster.sky import SkyPool

    return SkyPool(names, cost, settings)


class Accounts:
    """Jobs in progress (``open``), outcomes of the others, and spans."""

    def __init__(self, spans: bool) -> None:
        self.open: dict[int, Job] = {}
        self.spans: list[Span] = []
        self._keeps_spans = spans
        self._ended: dict[int, RequestOutcome] = {}

    def outcomes(self, requests: int) -> list[RequestOutcome]:
        assert not self.open and len(self._ended) == requests, "every request ends, and ends once"
        return [self._ended[number] for number in range(requests)]

    def completed(self, job: Job, now_s: float, worst_s: float | None) -> None:
        """Close a request. ``worst_s`` is None with one token."""
        mean_s = (now_s - job.first_token_s) / (job.output_tokens - 1) if job.output_tokens > 1 else None
        self._close(job, "completed", now_s, job.first_token_s - job.at_s, mean_s, worst_s)

    def not_served(self, job: Job, status: Status, now_s: float) -> None:
        self._close(job, status, now_s, None, None, None)

    def span(self, instance: str, what: str, begin_s: float, end_s: float, job: Job) -> None:
        if self._keeps_spans:
            self.spans.append(Span(instance, what, begin_s, end_s, job.number))

    def _close(
        self, job: Job, status: Status, now_s: float, ttft_s: float | None, mean_s: float | None, worst_s: float | None
    ) -> None:
        assert job.number not in self._ended, "a request ends once"
        job.over = True
        del self.open[job.number]
        started, prefilled = job.begun_s >= 0, job.prefilled
        if prefilled:
            cached = job.held_tokens + sum(job.sources.values())
            assert job.computed_tokens + cached == job.prompt_tokens, "all of a prompt is cached or computed"
        self._ended[job.number] = RequestOutcome(
            at_s=job.at_s,
            status=status,
            prompt_tokens=job.prompt_tokens,
            output_tokens=job.output_tokens,
            prefill=job.prefill if started else None,
            decode=job.decode if status == "completed" else None,
            held_tokens=job.held_tokens if prefilled else 0,
            loaded_tokens=job.sources if prefilled else {},
            computed_tokens=job.computed_tokens if prefilled else 0,
            queue_s=job.begun_s - job.at_s if started else 0.0,
            prefill_s=job.spent_s,
            ttft_s=ttft_s,
            end_s=now_s,
            tbt_mean_s=mean_s,
            tbt_max_s=worst_s,
        )


class InstanceLoads:
    """Sampler of the instances' loads, relative to the objectives."""

    def __init__(self, slo: Slo, machines: Machines) -> None:
        self._slo, self._machines = slo, machines
        self.samples: list[LoadSample] = []

    def sample(self, now_s: float) -> None:
        prefills, decodes = self._machines.prefilling(), self._machines.decoding()
        ttfts_s = [instance.predicted_ttft_s(now_s) for instance in prefills]
        steps_s = [instance.step_s(now_s) for instance in decodes]
        self.samples.append(
            LoadSample(
                t_s=now_s,
                prefill=max(ttfts_s) / self._slo.ttft_s,
                decode=max(steps_s) / self._slo.tbt_s,
                waiting=sum(len(instance.waiting) for instance in prefills),
                decoding=sum(len(instance.batch) for instance in decodes),
                prefill_mean=sum(ttfts_s) / len(ttfts_s) / self._slo.ttft_s,
                decode_mean=sum(steps_s) / len(steps_s) / self._slo.tbt_s,
                prefilling=len(prefills),
            )
        )
