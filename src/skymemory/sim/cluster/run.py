"""A trace through a simulated cluster, from the first arrival to the last token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skymemory.conductor.admission.base import Admission
from skymemory.conductor.admission.named import admission as admission_named
from skymemory.conductor.request import Request
from skymemory.errors import InvalidInput
from skymemory.sim.cluster.outcome import ClusterRun
from skymemory.sim.cluster.pool_base import Pool
from skymemory.sim.cluster.requests import timed
from skymemory.sim.cluster.schedulers import SchedulerFactory, scheduler_named
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.cluster.simulation import Simulation
from skymemory.sim.trace import TraceRequest


def run_cluster(
    requests: Sequence[TraceRequest],
    setup: ClusterSetup | None = None,
    scheduler: str | SchedulerFactory = "least-load",
    admission: str | Admission = "all",
    *,
    asked: Sequence[Request] | None = None,
    pool: Pool | None = None,
) -> ClusterRun:
    """What becomes of ``requests`` (in the order of arrival; outcomes are in the order that jitter leaves).

    ``scheduler``: one of ``schedulers``' names, or what makes one. ``asked``: what the scheduler is told of each, where
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
    rule = admission_named(admission, setup.slo) if isinstance(admission, str) else admission
    if isinstance(scheduler, str):
        name = scheduler
        return Simulation(setup, lambda world: scheduler_named(name, world), rule, pool).run(arriving, asked)
    return Simulation(setup, scheduler, rule, pool).run(arriving, asked)
