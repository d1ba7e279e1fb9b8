"""Cells of sweeps: what they run, what they measure, the same in processes; and the search for the highest rate."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.cells import CapacityCell, ClusterCell, at_rate, capacity, run_cell, run_of
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.workload import ConversationSource, OpenSource

SMALL = ClusterSetup(prefill=2, decode=2, sample_s=1.0)
POISSON = OpenSource("arxiv", 1.0, 60, seed=1)


@pytest.mark.slow
@pytest.mark.seeded
def test_the_same_numbers_in_processes() -> None:
    cells = [ClusterCell(POISSON, SMALL, scheduler, curves=True) for scheduler in ("random", "kvcache-centric")]
    alone = sweep(run_cell, cells, "sequence")
    assert sweep(run_cell, cells, "processes", jobs=2) == alone
    assert alone[0].metrics != alone[1].metrics
    assert all(one.metrics.completed == 60 for one in alone)
    times_s, prefill, decode = alone[0].curves
    assert len(times_s) == len(prefill) == len(decode) > 10
    assert min(after - before for before, after in pairwise(times_s)) >= 2.0


def test_parts_of_the_time() -> None:
    whole = run_of(ClusterCell(POISSON, SMALL))
    first_s, last_s = whole.outcomes[0].at_s, whole.outcomes[-1].at_s
    edge_s = first_s + 0.7 * (last_s - first_s)
    late = run_cell(ClusterCell(POISSON, SMALL, from_part=0.7)).metrics
    assert late.requests == sum(one.at_s >= edge_s for one in whole.outcomes)
    early = run_cell(ClusterCell(POISSON, SMALL, until_part=0.7)).metrics
    assert early.requests + late.requests == 60
    cold = run_cell(ClusterCell(POISSON, SMALL, begin_part=0.3, from_part=0.7, until_part=0.9))
    assert 0 < cold.metrics.requests < late.requests
    assert run_cell(ClusterCell(POISSON, SMALL, begin_part=0.7)).metrics.requests == late.requests


def test_parts_of_the_time_follow_the_rate() -> None:
    source = ConversationSource(None, seed=3, quick=True)
    slow, fast = (
        run_cell(ClusterCell(source, ClusterSetup(rate=rate), "random", until_part=0.1, from_part=0.05)).metrics
        for rate in (1.0, 2.0)
    )
    assert slow.requests == fast.requests > 20


def test_options_reach_scheduler_and_rule() -> None:
    with pytest.raises(InvalidInput, match="variant"):
        run_cell(ClusterCell(POISSON, SMALL, "kvcache-centric", (("variant", "unknown"),)))
    with pytest.raises(InvalidInput, match="no option"):
        run_cell(ClusterCell(POISSON, SMALL, admission="early", admission_options=(("mercy", 1),)))
    strict = replace(SMALL, slo=Slo(1e-3, 0.1))
    refused = run_cell(ClusterCell(POISSON, strict, admission="early")).metrics
    assert (refused.refused, refused.met) == (60, 0)


@pytest.mark.brief()
def test_finds_the_rate_at_which_a_machine_is_full() -> None:
    """Prefills of one machine take 1.0 s on average: with a generous promise nearly one a second is kept."""
    setup = ClusterSetup(prefill=1, decode=1, slo=Slo(20.0, 0.1))
    search = CapacityCell(ClusterCell(OpenSource("arxiv", 1.0, 150, 2), setup, "load-balance"), 0.05, 20.0, 5)
    found = capacity(search)
    assert 0.5 < found.rate < 2.0
    assert not found.saturated
    assert found.metrics is not None and found.metrics.ttft_s.p90 <= 20.0
    above = run_cell(at_rate(search.cell, found.rate * 1.3)).metrics
    assert above.ttft_s.p90 > 20.0


def test_says_where_nothing_or_everything_is_kept() -> None:
    cell = ClusterCell(POISSON, replace(SMALL, slo=Slo(1e-3, 0.1)))
    nothing = capacity(CapacityCell(cell, 0.1, 1.0))
    assert (nothing.rate, nothing.metrics) == (0.0, None)
    endless = capacity(CapacityCell(ClusterCell(POISSON, replace(SMALL, slo=Slo(1e6, 1e6))), 0.1, 1.0))
    assert (endless.rate, endless.saturated) == (1.0, True)
    with pytest.raises(InvalidInput, match="lowest < highest"):
        CapacityCell(cell, 1.0, 1.0)
    trace = at_rate(ClusterCell(ConversationSource(None), SMALL), 3.0)
    assert trace.setup.rate == 3.0 and math.isclose(SMALL.rate, 1.0)
