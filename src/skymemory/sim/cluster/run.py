"""A trace through a simulated cluster, from the first arrival to the last token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from skymemory.conductor.admission.base import Admission
from skymemory.conductor.admission.named import admission as admission_named
from skymemory.conductor.request import Request
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.outcome import ClusterRun
from skymemory.sim.cluster.pool_base import Pool
from skymemory.sim.cluster.requests import timed
from skymemory.sim.cluster.schedulers import SchedulerFactory, World, scheduler_named
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.cluster.simulation import Simulation
from skymemory.sim.trace import TraceRequest


def run_cluster(
    requests: Sequence[TraceRequest],
    setup: ClusterSetup | None = None,
    scheduler: str | SchedulerFactory = "least-load",
    admission: str | Admission = "all",
    *,
    scheduler_options: Mapping[str, object] | None = None,
    admission_options: Mapping[str, object] | None = None,
    asked: Sequence[Request] | None = None,
    pool: Pool | None = None,
) -> ClusterRun:
    """What becomes of ``requests`` (in the order of arrival; outcomes are in the order that jitter leaves).

    ``scheduler``: one of ``schedulers.NAMES``, or what makes one; ``admission`` likewise; options of named ones by
    name. ``asked``: what the scheduler is told of each, where
    requests have tenants or priorities; only without jitter. ``pool``: another than the setup's; for one run only.

    Equal arguments give equal runs.

    Raises:
        InvalidInput: arrivals out of order, or a name that is not known.
    """
    setup = setup or ClusterSetup()
    arriving = timed(requests, setup)
    before_s = -math.inf
    for at, request in enumerate(arriving):
        if request.at_s < before_s:
            raise InvalidInput(f"request {at} arrives at {request.at_s:g} s, after one at {before_s:g} s; sort them")
        before_s = request.at_s
    if asked is not None and (setup.jitter_s or len(asked) != len(arriving)):
        raise InvalidInput("what is asked is given for each request, and none may be moved by jitter")
    rule = admission
    if isinstance(rule, str):
        rule = admission_named(rule, setup.slo, **(admission_options or {}))
    factory = scheduler
    if isinstance(factory, str):
        name, options = factory, scheduler_options or {}

        def factory(world: World) -> Scheduler:
            return scheduler_named(name, world, **options)

    return Simulation(setup, factory, rule, pool).run(arriving, asked)
