"""The highest rate at which a cluster keeps its promises."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from skymemory.errors import InvalidInput
from skymemory.sim.cluster.cells import ClusterCell, run_cell
from skymemory.sim.cluster.metrics import ClusterMetrics
from skymemory.sim.sources import OpenSource

Rule = Literal["p90", "p90 of the longest", "attainment"]
"""``p90``: nine tenths of the requests have their first token as promised, and nine tenths their mean TBT.
``p90 of the longest``: the same of each request's longest time between tokens. ``attainment``: nine tenths have both.
"""
PART = 0.9


@dataclass(frozen=True, slots=True)
class CapacityCell:
    """The rate is searched between ``lowest`` and ``highest``, by halving their ratio ``halvings`` times.

    Of a Poisson source it is requests per second; of a trace how many times as fast it arrives.
    """

    cell: ClusterCell
    lowest: float
    highest: float
    halvings: int = 7
    rule: Rule = "p90"

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.highest or self.halvings < 1:
            raise InvalidInput("a search goes from a rate above 0 to a higher one, in one halving or more")


@dataclass(frozen=True, slots=True)
class Capacity:
    rate: float
    """0: not even the lowest is kept."""
    saturated: bool
    """The highest is kept too: there is more than was searched for."""
    metrics: ClusterMetrics | None
    """At that rate."""


def capacity(search: CapacityCell) -> Capacity:
    """The highest rate of those tried at which the rule holds. A rate below one that holds is taken to hold."""
    found = _at(search, search.lowest)
    if not _holds(found, search):
        return Capacity(0.0, False, None)
    best, low, high = found, search.lowest, search.highest
    top = _at(search, high)
    if _holds(top, search):
        return Capacity(high, True, top)
    for _ in range(search.halvings):
        middle = math.sqrt(low * high)
        found = _at(search, middle)
        if _holds(found, search):
            low, best = middle, found
        else:
            high = middle
    return Capacity(low, False, best)


def at_rate(cell: ClusterCell, rate: float) -> ClusterCell:
    """The same cell, its requests at that rate."""
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
