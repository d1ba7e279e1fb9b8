"""What a scheduler believes is one thing, what is true another; and what it learns of requests."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduler import ScheduledRequest, Scheduler
from skymemory.conductor.scheduling.kvcache_centric import KvCacheCentric
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.schedulers import (
    NAMES,
    BelievedEstimates,
    ErringSpeeds,
    World,
    get_scheduler_view,
    scheduler_named,
)
from skymemory_lab.sim.cluster.setup import ClusterSetup
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest

LONE = TraceRequest(0.0, 30_000, 2, tuple(range(58)))
SETUP = ClusterSetup(prefill=2, decode=1)


def estimated_s(setup: ClusterSetup) -> float:
    """The scheduler's estimate of a lone request's time to its first token."""
    disclosed: list[float | None] = []

    def factory(world: World) -> Scheduler:
        scheduler = scheduler_named("kvcache-centric", world)
        begin = scheduler.begin

        def noting(placement: ScheduledRequest, now_s: float) -> None:
            disclosed.append(placement.prefill.estimated_ttft_s)
            begin(placement, now_s)

        scheduler.begin = noting  # type: ignore[method-assign]
        return scheduler

    run_cluster([LONE], setup, factory)
    (estimate,) = disclosed
    assert estimate is not None
    return estimate


@pytest.mark.parametrize("pipeline", [1, 2])
def test_who_believes_the_truth_estimates_what_a_lone_request_takes(pipeline: int) -> None:
    setup = replace(SETUP, pipeline=pipeline, chunk_tokens=4_000)
    (one,) = run_cluster([LONE], setup, "kvcache-centric").outcomes
    assert estimated_s(setup) == pytest.approx(one.ttft_s, rel=1e-9)


def test_a_belief_changes_the_estimate_and_not_the_truth() -> None:
    slow = replace(SETUP, believed=LLAMA_70B_8xA800.at(0.25))
    assert estimated_s(slow) == pytest.approx(2 * estimated_s(SETUP))
    assert run_cluster([LONE], slow).outcomes == run_cluster([LONE], SETUP).outcomes


def test_a_slower_network_is_believed_in_where_one_is() -> None:
    rates = []

    def factory(world: World) -> Scheduler:
        scheduler = scheduler_named("kvcache-centric", world)
        assert isinstance(scheduler.prefill.scorer, KvCacheCentric)
        network = scheduler.prefill.scorer._network
        assert network is not None
        rates.append(network.bytes_per_s)
        return scheduler

    for setup in (SETUP, replace(SETUP, believed=replace(LLAMA_70B_8xA800, network_share=0.5))):
        run_cluster([LONE], setup, factory)
    assert rates[1] == rates[0] / 2


def test_estimates_err_as_much_as_is_asked_and_the_same_whenever_asked() -> None:
    truth = BelievedEstimates(SETUP)
    speeds, again = (ErringSpeeds(truth, 0.2, seed=5) for _ in range(2))
    factors = [speeds.factor(slot, tokens) for slot in range(8) for tokens in range(100, 100_000, 97)]
    assert statistics.mean(factors) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(factors) == pytest.approx(0.2, rel=0.1)
    one, other = speeds.prefills_s((0, 1), 5_000, (0, 0))
    assert one != other
    assert [one, other] == again.prefills_s((0, 1), 5_000, (0, 0))
    assert one == pytest.approx(truth.prefill_s(5_000) * speeds.factor(0, 5_000))


def test_errors_are_put_on_every_scheduler_that_estimates() -> None:
    requests = [replace(LONE, at_s=0.1 * at, ids=tuple(range(100 * at, 100 * at + 58))) for at in range(8)]
    for name in ("cache-aware", "kvcache-centric", "least-ttft"):
        exact = [one.prefill for one in run_cluster(requests, SETUP, name).outcomes]
        erring = [one.prefill for one in run_cluster(requests, replace(SETUP, error=0.5, seed=3), name).outcomes]
        assert exact != erring, name


def test_the_length_of_an_answer_is_disclosed_as_the_setup_says() -> None:
    request = TraceRequest(0.0, 1_000, 400, (1, 2))
    assert get_scheduler_view(request, SETUP, random.Random(1)).output_tokens is None
    telling = replace(SETUP, tells_output=True)
    assert get_scheduler_view(request, telling, random.Random(1)).output_tokens == 400
    erring = replace(telling, output_error=0.3)
    lengths = [get_scheduler_view(request, erring, random.Random(seed)).output_tokens or 0 for seed in range(400)]
    assert statistics.mean(lengths) == pytest.approx(400, rel=0.05)
    assert statistics.stdev(lengths) == pytest.approx(120, rel=0.15)


def test_blocks_are_counted_as_the_setup_says() -> None:
    request = TraceRequest(0.0, 1_100, 2, (7, 8, 9))
    assert get_scheduler_view(request, SETUP, random.Random(1)).prompt.blocks.tolist() == [7, 8]
    assert get_scheduler_view(request, replace(SETUP, partial=True), random.Random(1)).prompt.blocks.tolist() == [
        7,
        8,
        9,
    ]
    again = [request, replace(request, at_s=9.0)]
    for partial, held in ((False, 1_024), (True, 1_099)):
        setup = ClusterSetup(prefill=1, decode=1, partial=partial)
        assert run_cluster(again, setup).outcomes[1].held_tokens == held


def test_priorities_come_with_what_is_asked() -> None:
    requests = [replace(LONE, at_s=0.01 * at) for at in range(3)]
    blocks = np.arange(3, dtype=np.uint64)
    urgent = [Request(Prompt(blocks, blocks, 512, 30_000), priority=at) for at in range(3)]
    run = run_cluster(requests, ClusterSetup(prefill=1, decode=1), scheduler_views=urgent)
    first, second, third = (one.ttft_s or 0.0 for one in run.outcomes)
    assert first < third < second
    with pytest.raises(InvalidInput, match="jitter"):
        run_cluster(requests, ClusterSetup(jitter_s=1.0), scheduler_views=urgent)


def test_an_unknown_name_is_reported_with_those_known() -> None:
    with pytest.raises(InvalidInput, match="kvcache-centric"):
        run_cluster([LONE], SETUP, "best")
    assert len(set(NAMES)) == len(NAMES)


def test_spans_and_loads_describe_a_run() -> None:
    run = run_cluster([LONE], replace(SETUP, spans=True, sample_s=0.5), "kvcache-centric")
    spans = {span.what: span for span in run.spans}
    assert set(spans) == {"prefill", "transfer", "decode"}
    assert (spans["prefill"].begin_s, spans["prefill"].end_s) == (0.0, run.outcomes[0].ttft_s)
    assert spans["decode"].end_s == run.outcomes[0].end_s
    assert [load.t_s for load in run.loads[:3]] == [0.0, 0.5, 1.0]
    assert run.loads[1].prefill == pytest.approx((run.outcomes[0].ttft_s or 0.0) / SETUP.slo.ttft_s)
    assert run.loads[1].prefill_mean == pytest.approx(run.loads[1].prefill / 2), "one of two works"
    assert not run_cluster([LONE], SETUP).spans
