"""Cells of sweeps over simulated clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.admission.registry import admission
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput
from skymemory.metrics import percentile
from skymemory_lab.sim.cluster.outcome import ClusterMetrics, ClusterRun, LoadSample, TbtRule, measured
from skymemory_lab.sim.cluster.schedulers import World, scheduler_named
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.workload import OpenSource, RequestSource

Rule = Literal["p90", "p90 of the longest", "attainment"]
"""Criterion of capacity.

``p90``: the 90th percentiles of TTFT and mean TBT meet the objectives. ``p90 of the longest``: those of TTFT and
longest TBT. ``attainment``: 90 % of the requests meet both.
"""
PART = 0.9
GRID_S = 1.0
WINDOW_S = 256.0
MOST_S = 1e7
LONGEST_S, SHORTEST_S = 130.0, 8.0
"""Range of periods: at least two in a window, all above the 3 s arrival batches."""
CURVE_S = 2.0
Series = NDArray[np.float64]
Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class ClusterCell:
    """Picklable description of a simulated run: requests, cluster, scheduler and admission rule."""

    source: RequestSource
    setup: ClusterSetup = field(default_factory=ClusterSetup)
    scheduler: str = "kvcache-centric"
    scheduler_options: Options = ()
    admission: str = "all"
    admission_options: Options = ()
    # Parts of the arrival time, 0 to 1. Requests from ``begin_part`` to ``until_part`` are simulated, and those from
    # ``from_part`` on are measured: earlier requests fill caches and queues.
    begin_part: float = 0.0
    from_part: float = 0.0
    until_part: float = 1.0
    tbt_rule: TbtRule = "mean"  # whether a request's mean or longest time between tokens must meet the objective
    curves: bool = False  # True: the answer also has the prefill and decode loads over time

    @property
    def slo(self) -> Slo:
        return self.setup.slo


@dataclass(frozen=True, slots=True)
class CellAnswer:
    metrics: ClusterMetrics
    swings: Swings | None
    pool: dict[str, float]
    curves: tuple[tuple[float, ...], ...] = ()
    """Rows of seconds, prefill load and decode load."""


def run_of(cell: ClusterCell) -> ClusterRun:
    """Simulate the cell's part of its requests."""
    requests = cell.source.requests()
    begin_s, until_s = (_moment(cell, part) * cell.setup.rate for part in (cell.begin_part, cell.until_part))
    if cell.begin_part > 0:
        requests = [request for request in requests if request.at_s >= begin_s]
    if cell.until_part < 1:
        requests = [request for request in requests if request.at_s < until_s]

    def scheduler(world: World) -> Scheduler:
        return scheduler_named(cell.scheduler, world, **dict(cell.scheduler_options))

    rule = admission(cell.admission, cell.slo, **dict(cell.admission_options))
    return run_cluster(requests, cell.setup, scheduler, rule)


def run_cell(cell: ClusterCell) -> CellAnswer:
    run = run_of(cell)
    # Requests before ``from_part`` run as well: they fill caches and queues but are not measured.
    from_s = _moment(cell, cell.from_part) if cell.from_part else -math.inf
    metrics = measured(run, cell.slo, from_s, tbt_rule=cell.tbt_rule)
    arrivals_s = [outcome.at_s for outcome in run.outcomes]
    # After the last arrival there is nothing to admit or place, so later loads are left out.
    inside = [sample for sample in run.loads if max(from_s, arrivals_s[0]) <= sample.t_s <= arrivals_s[-1]]
    return CellAnswer(
        metrics,
        swings(inside) if len(inside) > 1 else None,
        dict(run.pool),
        _curves(run, arrivals_s[-1]) if cell.curves else (),
    )


def _moment(cell: ClusterCell, part: float) -> float:
    # Return the simulated time at which this part of the arrivals' time has passed.
    requests = cell.source.requests()
    first_s, last_s = requests[0].at_s, requests[-1].at_s
    return (first_s + part * (last_s - first_s)) / cell.setup.rate


def _curves(run: ClusterRun, until_s: float) -> tuple[tuple[float, ...], ...]:
    points: list[tuple[float, float, float]] = []
    for sample in run.loads:
        if sample.t_s <= until_s and (not points or sample.t_s >= points[-1][0] + CURVE_S):
            points.append((sample.t_s, sample.prefill, sample.decode))
    return tuple(zip(*points, strict=True))


@dataclass(frozen=True, slots=True)
class CapacityCell:
    """Geometric bisection for the highest rate (requests per second, or a trace's speed factor)."""

    cell: ClusterCell
    lowest: float
    highest: float
    halvings: int = 7
    rule: Rule = "p90"

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.highest or self.halvings < 1:
            raise InvalidInput("expected 0 < lowest < highest, and halvings of 1 or more")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Result of a search; ``metrics`` at ``rate``, or None with 0."""

    rate: float
    saturated: bool
    """True if the highest rate tried holds."""
    metrics: ClusterMetrics | None


def capacity(search: CapacityCell) -> Capacity:
    """Return the highest rate tried at which the rule holds, or 0. All lower rates are assumed to hold."""
    metrics = _at(search, search.lowest)
    if not _holds(metrics, search):
        return Capacity(0.0, False, None)
    best, low, high = metrics, search.lowest, search.highest
    top = _at(search, high)
    if _holds(top, search):
        return Capacity(high, True, top)
    for _ in range(search.halvings):
        middle = math.sqrt(low * high)  # the error of a ratio is the same factor for small and large clusters
        metrics = _at(search, middle)
        if _holds(metrics, search):
            low, best = middle, metrics
        else:
            high = middle
    return Capacity(low, False, best)


def at_rate(cell: ClusterCell, rate: float) -> ClusterCell:
    """Return the cell at a rate: requests per second, or a trace's speed factor."""
    if isinstance(cell.source, OpenSource):
        return replace(cell, source=replace(cell.source, rate_per_s=rate))
    return replace(cell, setup=replace(cell.setup, rate=rate))


def _at(search: CapacityCell, rate: float) -> ClusterMetrics:
    return run_cell(at_rate(search.cell, rate)).metrics


def _holds(metrics: ClusterMetrics, search: CapacityCell) -> bool:
    # Return True if the metrics meet the search's rule.
    slo = search.cell.slo
    if search.rule == "attainment":
        return metrics.attainment >= PART
    tbt_s = metrics.tbt_max_s.p90 if search.rule == "p90 of the longest" else metrics.tbt_request_s.p90
    return metrics.completed == metrics.requests and metrics.ttft_s.p90 <= slo.ttft_s and not tbt_s > slo.tbt_s


@dataclass(frozen=True, slots=True)
class Swings:
    """Swings of the prefill and decode loads, and their phases (Mooncake, figures 9 and 10).

    Period and phase are of the strongest cross spectrum over half-overlapping Hann windows; 180 degrees is opposition.
    They are None if the run is shorter than a window or a load is constant.
    """

    prefill_mean: float
    prefill_amplitude: float
    decode_mean: float
    decode_amplitude: float
    correlation: float
    period_s: float | None
    phase_degrees: float | None
    """Lag of decode, -180 to 180."""
    coherence: float | None
    """Stability of the phase, 0 to 1. Below 0.5 the phase means little."""

    def as_json(self) -> dict[str, float | None]:
        return {name: None if value is None else round(value, 6) for name, value in asdict(self).items()}


def swings(loads: Sequence[LoadSample], from_s: float = -math.inf, until_s: float = math.inf) -> Swings:
    """Return the swings between two times. ``loads`` are in order of time."""
    inside = [sample for sample in loads if from_s <= sample.t_s <= until_s]
    if len(inside) < 2:
        raise InvalidInput(f"{len(inside)} load samples; expected at least 2")
    times = np.array([sample.t_s for sample in inside])
    if times[-1] - times[0] > MOST_S:
        raise InvalidInput(f"a span of {times[-1] - times[0]:.3g} s; expected at most {MOST_S:g} s: choose a part")
    prefill = _on_grid(times, np.array([sample.prefill for sample in inside]))
    decode = _on_grid(times, np.array([sample.decode for sample in inside]))
    moves = prefill.std() > 0 and decode.std() > 0
    period_s, phase_degrees, coherence = _in_common(prefill, decode) if moves else (None, None, None)
    return Swings(
        prefill_mean=float(prefill.mean()),
        prefill_amplitude=_amplitude(prefill),
        decode_mean=float(decode.mean()),
        decode_amplitude=_amplitude(decode),
        correlation=float(np.corrcoef(prefill, decode)[0, 1]) if moves else 0.0,
        period_s=period_s,
        phase_degrees=phase_degrees,
        coherence=coherence,
    )


def _on_grid(times: Series, values: Series) -> Series:
    # Return the last value at each multiple of ``GRID_S`` from the first time on.
    grid = np.arange(times[0], times[-1] + GRID_S / 2, GRID_S)
    return values[np.searchsorted(times, grid, side="right") - 1]


def _amplitude(values: Series) -> float:
    return (percentile(values.tolist(), 95) - percentile(values.tolist(), 5)) / 2


def _in_common(prefill: Series, decode: Series) -> tuple[float | None, float | None, float | None]:
    # Return period, phase and coherence of the strongest common oscillation.
    size = int(WINDOW_S / GRID_S)
    if len(prefill) < size:
        return None, None, None
    # Welch's method: averaging the spectra of half-overlapping windows keeps what is in phase in all of them.
    taper = np.hanning(size)
    cross = np.zeros(size // 2 + 1, dtype=complex)
    powers = np.zeros((2, size // 2 + 1))
    for begin in range(0, len(prefill) - size + 1, size // 2):
        spectra = [
            np.fft.rfft((part - part.mean()) * taper) for part in (prefill[begin:][:size], decode[begin:][:size])
        ]
        cross += spectra[0] * np.conj(spectra[1])
        powers += np.abs(spectra) ** 2
    frequencies = np.fft.rfftfreq(size, GRID_S)
    # Slower periods are drift, because two of them do not fit a window; faster periods are the batches of arrivals.
    wanted = np.flatnonzero((frequencies >= 1 / LONGEST_S) & (frequencies <= 1 / SHORTEST_S))
    at = wanted[np.argmax(np.abs(cross[wanted]))]
    if not np.abs(cross[at]):
        return None, None, None
    coherence = float(np.abs(cross[at]) ** 2 / (powers[0, at] * powers[1, at]))
    return 1 / float(frequencies[at]), math.degrees(float(np.angle(cross[at]))), coherence
