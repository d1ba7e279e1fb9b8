"""Cells of sweeps over simulated clusters: one run, its metrics, the capacity of a cluster, swings of its loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.admission.named import admission
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Scheduler
from skymemory.errors import InvalidInput
from skymemory.metrics import percentile
from skymemory.sim.cluster.outcome import ClusterMetrics, ClusterRun, LoadSample, TbtRule, measured
from skymemory.sim.cluster.schedulers import World, scheduler_named
from skymemory.sim.cluster.setup import ClusterSetup
from skymemory.sim.cluster.simulation import run_cluster
from skymemory.sim.workload import OpenSource, RequestSource

Rule = Literal["p90", "p90 of the longest", "attainment"]
"""Capacity criteria. ``p90``: the 90th percentiles of TTFT and of mean TBT meet the objectives. ``p90 of the longest``:
likewise with each request's longest TBT. ``attainment``: 90 % of the requests meet both objectives.
"""
PART = 0.9
GRID_S = 1.0
WINDOW_S = 256.0
MOST_S = 1e7
LONGEST_S, SHORTEST_S = 130.0, 8.0
"""Range of periods: at least two fit a window, and they exceed the 3 s batches of a trace's arrivals."""
CURVE_S = 2.0
"""Interval of the points of a load curve."""
Series = NDArray[np.float64]
Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class ClusterCell:
    """One run of a sweep; can be pickled."""

    source: RequestSource
    setup: ClusterSetup = field(default_factory=ClusterSetup)
    scheduler: str = "kvcache-centric"
    scheduler_options: Options = ()
    admission: str = "all"
    admission_options: Options = ()
    begin_part: float = 0.0
    """Share of the arrivals' time, 0 to 1, before which requests are skipped."""
    from_part: float = 0.0
    """Share of the time from which requests are measured."""
    until_part: float = 1.0
    """Share of the time after which requests are skipped."""
    tbt_rule: TbtRule = "mean"
    curves: bool = False

    @property
    def slo(self) -> Slo:
        return self.setup.slo


@dataclass(frozen=True, slots=True)
class CellAnswer:
    """Results of one run."""

    metrics: ClusterMetrics
    swings: Swings | None
    """None: fewer than two samples."""
    pool: dict[str, float]
    curves: tuple[tuple[float, ...], ...] = ()
    """Rows of seconds, prefill load, decode load."""


def run_of(cell: ClusterCell) -> ClusterRun:
    """Runs the cell."""
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
    """Runs the cell and measures it."""
    run = run_of(cell)
    # Requests before ``from_part`` run, too: they fill caches and queues, but are not measured.
    from_s = _moment(cell, cell.from_part) if cell.from_part else -math.inf
    metrics = measured(run, cell.slo, from_s, tbt_rule=cell.tbt_rule)
    arrivals_s = [one.at_s for one in run.outcomes]
    # Loads after the last arrival are the run's end, with nothing to admit or to place.
    inside = [one for one in run.loads if max(from_s, arrivals_s[0]) <= one.t_s <= arrivals_s[-1]]
    return CellAnswer(
        metrics,
        swings(inside) if len(inside) > 1 else None,
        dict(run.pool),
        _curves(run, arrivals_s[-1]) if cell.curves else (),
    )


def _moment(cell: ClusterCell, part: float) -> float:
    """Seconds of the run at which ``part`` of the arrivals' time has passed."""
    requests = cell.source.requests()
    first_s, last_s = requests[0].at_s, requests[-1].at_s
    return (first_s + part * (last_s - first_s)) / cell.setup.rate


def _curves(run: ClusterRun, until_s: float) -> tuple[tuple[float, ...], ...]:
    points: list[tuple[float, float, float]] = []
    for one in run.loads:
        if one.t_s <= until_s and (not points or one.t_s >= points[-1][0] + CURVE_S):
            points.append((one.t_s, one.prefill, one.decode))
    return tuple(zip(*points, strict=True))


@dataclass(frozen=True, slots=True)
class CapacityCell:
    """A search for the highest rate between ``lowest`` and ``highest`` by ``halvings`` geometric bisections.

    The rate of a Poisson source is requests per second; of a trace the factor on its speed.
    """

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
    """Result of a search."""

    rate: float
    """0: not even the lowest rate holds."""
    saturated: bool
    """Whether the highest rate holds, so that the capacity may be larger."""
    metrics: ClusterMetrics | None
    """At ``rate``."""


def capacity(search: CapacityCell) -> Capacity:
    """The highest rate tried at which the rule holds; assumes that it holds at all lower rates."""
    found = _at(search, search.lowest)
    if not _holds(found, search):
        return Capacity(0.0, False, None)
    best, low, high = found, search.lowest, search.highest
    top = _at(search, high)
    if _holds(top, search):
        return Capacity(high, True, top)
    for _ in range(search.halvings):
        middle = math.sqrt(low * high)  # in ratios: the error is a factor, equal for small and large clusters
        found = _at(search, middle)
        if _holds(found, search):
            low, best = middle, found
        else:
            high = middle
    return Capacity(low, False, best)


def at_rate(cell: ClusterCell, rate: float) -> ClusterCell:
    """The cell with its requests at that rate."""
    if isinstance(cell.source, OpenSource):
        return replace(cell, source=replace(cell.source, rate_per_s=rate))
    return replace(cell, setup=replace(cell.setup, rate=rate))


def _at(search: CapacityCell, rate: float) -> ClusterMetrics:
    return run_cell(at_rate(search.cell, rate)).metrics


def _holds(found: ClusterMetrics, search: CapacityCell) -> bool:
    slo = search.cell.slo
    if search.rule == "attainment":
        return found.attainment >= PART
    tbt_s = found.tbt_max_s.p90 if search.rule == "p90 of the longest" else found.tbt_request_s.p90
    return found.completed == found.requests and found.ttft_s.p90 <= slo.ttft_s and not tbt_s > slo.tbt_s


@dataclass(frozen=True, slots=True)
class Swings:
    """How far the loads of prefill and decode swing, and whether against each other (Mooncake, figures 9 and 10).

    A load is relative to its objective (``LoadSample``). Both are put on a grid of 1 s, each value holding until the
    next. Period and phase are of the frequency where the cross spectrum is strongest, averaged over half overlapping
    windows with a Hann taper and without their mean; a phase of 180 degrees is opposition. Both are None if the run is
    shorter than a window, or a load is constant.
    """

    prefill_mean: float
    prefill_amplitude: float
    """Half of the distance between the 5th and 95th percentiles."""
    decode_mean: float
    decode_amplitude: float
    correlation: float
    """Of both loads at equal times, -1 to 1; 0 if one is constant."""
    period_s: float | None
    phase_degrees: float | None
    """Lag of decode behind prefill at that period, -180 to 180."""
    coherence: float | None
    """Stability of the phase over the windows, 0 to 1; below 0.5 the phase means little."""

    def as_json(self) -> dict[str, float | None]:
        return {name: None if value is None else round(value, 6) for name, value in asdict(self).items()}


def swings(loads: Sequence[LoadSample], from_s: float = -math.inf, until_s: float = math.inf) -> Swings:
    """The swings between two times. ``loads`` in order of time.

    Raises:
        InvalidInput: fewer than two samples, or a span above ``MOST_S``.
    """
    inside = [one for one in loads if from_s <= one.t_s <= until_s]
    if len(inside) < 2:
        raise InvalidInput(f"{len(inside)} load samples; expected at least 2")
    times = np.array([one.t_s for one in inside])
    if times[-1] - times[0] > MOST_S:
        raise InvalidInput(f"a span of {times[-1] - times[0]:.3g} s; expected at most {MOST_S:g} s: choose a part")
    prefill = _on_grid(times, np.array([one.prefill for one in inside]))
    decode = _on_grid(times, np.array([one.decode for one in inside]))
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
    grid = np.arange(times[0], times[-1] + GRID_S / 2, GRID_S)
    return values[np.searchsorted(times, grid, side="right") - 1]


def _amplitude(values: Series) -> float:
    return (percentile(values.tolist(), 95) - percentile(values.tolist(), 5)) / 2


def _in_common(one: Series, other: Series) -> tuple[float | None, float | None, float | None]:
    """Period in s, lag of ``other`` in degrees, and coherence at that period."""
    size = int(WINDOW_S / GRID_S)
    if len(one) < size:
        return None, None, None
    # Welch's method: spectra of half overlapping windows are averaged, which keeps what is in phase in all of them.
    taper = np.hanning(size)
    cross = np.zeros(size // 2 + 1, dtype=complex)
    powers = np.zeros((2, size // 2 + 1))
    for begin in range(0, len(one) - size + 1, size // 2):
        spectra = [np.fft.rfft((part - part.mean()) * taper) for part in (one[begin:][:size], other[begin:][:size])]
        cross += spectra[0] * np.conj(spectra[1])
        powers += np.abs(spectra) ** 2
    frequencies = np.fft.rfftfreq(size, GRID_S)
    # Slower ones are drift, which two periods in a window cannot show; faster ones the batches of a trace's arrivals.
    wanted = np.flatnonzero((frequencies >= 1 / LONGEST_S) & (frequencies <= 1 / SHORTEST_S))
    at = wanted[np.argmax(np.abs(cross[wanted]))]
    if not np.abs(cross[at]):
        return None, None, None
    coherence = float(np.abs(cross[at]) ** 2 / (powers[0, at] * powers[1, at]))
    return 1 / float(frequencies[at]), math.degrees(float(np.angle(cross[at]))), coherence
