"""A cluster at the ends of what its setup allows: links that hardly carry, nodes without memory."""

from __future__ import annotations

import pytest

from skymemory.conductor.cost_model import Medium
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.cells import swings
from skymemory_lab.sim.cluster.setup import ClusterSetup, PoolSettings
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest

REQUESTS = [TraceRequest(float(at), 5_000, 50, (7, *range(100 * at, 100 * at + 9))) for at in range(10)]


@pytest.mark.parametrize("bytes_per_s", [1e4, 1.0])
def test_centuries_of_one_transfer_cost_no_more_than_seconds(bytes_per_s: float) -> None:
    setup = ClusterSetup(pool=PoolSettings(network=Medium("slow", bytes_per_s)))
    run = run_cluster(REQUESTS, setup, "kvcache-centric")
    assert {one.status for one in run.outcomes} == {"completed"}
    assert run.end_s > 4e9 / bytes_per_s and len(run.loads) < 100
    times = [one.t_s for one in run.loads]
    assert times == sorted(times) and all(at_s == int(at_s) for at_s in times)
    if bytes_per_s == 1.0:
        with pytest.raises(InvalidInput, match="choose a part"):
            swings(run.loads)


@pytest.mark.parametrize("ssd_bytes", [0.0, 1e12])
def test_nodes_without_memory_compute_everything_or_read_it_from_their_ssd(ssd_bytes: float) -> None:
    pool = PoolSettings(dram_bytes=0.0, ssd_bytes=ssd_bytes)
    again = [*REQUESTS, *(TraceRequest(100.0 + at, one.input_tokens, 50, one.ids) for at, one in enumerate(REQUESTS))]
    run = run_cluster(again, ClusterSetup(pool=pool), "kvcache-centric")
    assert {one.status for one in run.outcomes} == {"completed"}
    cached = sum(one.cached_tokens for one in run.outcomes)
    assert cached > 0 if ssd_bytes else cached == 0
    assert run.pool["evicted_blocks"] > 0 if ssd_bytes else run.pool["evicted_blocks"] == 0
