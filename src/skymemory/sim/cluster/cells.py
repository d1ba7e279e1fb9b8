"""One cell of a sweep over clusters: whose requests, which machines, who schedules, who is let in, what is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from skymemory.conductor.admission.base import Slo
from skymemory.conductor.admission.named import admission
from skymemory.conductor.scheduler import Scheduler
from skymemory.sim.cluster.metrics import ClusterMetrics, TbtRule, measured
from skymemory.sim.cluster.outcome import ClusterRun
from skymemory.sim.cluster.run import run_cluster
from skymemory.sim.cluster.schedulers import World, scheduler_named
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.cluster.swings import Swings, swings
from skymemory.sim.sources import RequestSource

Options = tuple[tuple[str, object], ...]
CURVE_S = 2.0
"""From one point of a curve of loads to the next."""


@dataclass(frozen=True, slots=True)
class ClusterCell:
    """What is run. All of it can be pickled."""

    source: RequestSource
    setup: ClusterSetup = field(default_factory=ClusterSetup)
    scheduler: str = "kvcache-centric"
    scheduler_options: Options = ()
    admission: str = "all"
    admission_options: Options = ()
    begin_part: float = 0.0
    """Requests that arrive before so much of the time, 0 to 1, are not run."""
    from_part: float = 0.0
    """Requests are measured that arrive after so much of the time in which they arrive, 0 to 1."""
    until_part: float = 1.0
    """And before so much of it; nothing that arrives later is run at all."""
    tbt_rule: TbtRule = "mean"
    curves: bool = False

    @property
    def slo(self) -> Slo:
        return self.setup.slo


@dataclass(frozen=True, slots=True)
class CellAnswer:
    """What came of it."""

    metrics: ClusterMetrics
    swings: Swings | None
    """None: the run was too short for two samples."""
    pool: dict[str, float]
    curves: tuple[tuple[float, ...], ...] = ()
    """Seconds, load of prefill, load of decode."""


def run_of(cell: ClusterCell) -> ClusterRun:
    """The run itself."""
    requests = cell.source.requests()
    begin_s, until_s = (_moment(cell, part) * cell.setup.rate for part in (cell.begin_part, cell.until_part))
    if cell.begin_part > 0:
        requests = [one for one in requests if one.at_s >= begin_s]
    if cell.until_part < 1:
        requests = [one for one in requests if one.at_s < until_s]

    def scheduler(world: World) -> Scheduler:
        return scheduler_named(cell.scheduler, world, **dict(cell.scheduler_options))

    rule = admission(cell.admission, cell.slo, **dict(cell.admission_options))
    return run_cluster(requests, cell.setup, scheduler, rule)


def run_cell(cell: ClusterCell) -> CellAnswer:
    """What is measured of it."""
    run = run_of(cell)
    from_s = _moment(cell, cell.from_part) if cell.from_part else -math.inf
    metrics = measured(run, cell.slo, from_s, tbt_rule=cell.tbt_rule)
    arrivals_s = [one.at_s for one in run.outcomes]
    inside = [one for one in run.loads if max(from_s, arrivals_s[0]) <= one.t_s <= arrivals_s[-1]]
    return CellAnswer(
        metrics,
        swings(inside) if len(inside) > 1 else None,
        dict(run.pool),
        _curves(run, arrivals_s[-1]) if cell.curves else (),
    )


def _moment(cell: ClusterCell, part: float) -> float:
    """When, s of the run, ``part`` of the time of arrivals has gone."""
    requests = cell.source.requests()
    first_s, last_s = requests[0].at_s, requests[-1].at_s
    return (first_s + part * (last_s - first_s)) / cell.setup.rate


def _curves(run: ClusterRun, until_s: float) -> tuple[tuple[float, ...], ...]:
    points: list[tuple[float, float, float]] = []
    for one in run.loads:
        if one.t_s <= until_s and (not points or one.t_s >= points[-1][0] + CURVE_S):
            points.append((one.t_s, one.prefill, one.decode))
    return tuple(zip(*points, strict=True))
