"""Whole runs: everything ends once, all is accounted for, and equal arguments give equal runs."""

from __future__ import annotations

import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.outcome import ClusterRun
from skymemory_lab.sim.cluster.setup import ClusterSetup, InstanceFailure
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import CONVERSATIONS, generate

REQUESTS = generate(CONVERSATIONS, 120.0, seed=3)
SMALL = ClusterSetup(prefill=2, decode=2, seed=1)


def accounted(run: ClusterRun, requests: int) -> None:
    """Every request ended, and all tokens of prompts and answers are somewhere."""
    assert len(run.outcomes) == requests
    for one in run.outcomes:
        if one.status in ("completed", "refused_after_prefill"):
            assert one.computed_tokens + one.cached_tokens == one.prompt_tokens
            assert one.computed_tokens >= 1
        if one.status == "completed":
            assert one.ttft_s is not None and one.end_s is not None
            assert one.end_s >= one.at_s + one.ttft_s > one.at_s + one.queue_s >= one.at_s
    assert all(load.prefill >= 0 and load.decode >= 0 for load in run.loads)


def test_every_request_completes_and_every_token_has_its_gap() -> None:
    run = run_cluster(REQUESTS, SMALL)
    accounted(run, len(REQUESTS))
    assert all(one.status == "completed" for one in run.outcomes)
    assert sum(run.gap_tokens) == sum(one.output_tokens - 1 for one in run.outcomes)
    total_s = sum(seconds * count for seconds, count in zip(run.gap_seconds, run.gap_tokens, strict=True))
    means_s = sum((one.tbt_mean_s or 0.0) * (one.output_tokens - 1) for one in run.outcomes)
    assert total_s == pytest.approx(means_s, rel=1e-9)


@pytest.mark.brief()
@pytest.mark.parametrize("setup", [SMALL, ClusterSetup(prefill=0, decode=0, coupled=4, mixed_tokens=1024)])
def test_equal_arguments_give_equal_runs(setup: ClusterSetup) -> None:
    assert run_cluster(REQUESTS, setup, "least-ttft") == run_cluster(REQUESTS, setup, "least-ttft")


def test_arrivals_out_of_order_are_refused() -> None:
    late, early = TraceRequest(2.0, 10, 2, (1,)), TraceRequest(1.0, 10, 2, (1,))
    with pytest.raises(InvalidInput, match="sort them"):
        run_cluster([late, early], SMALL)


@pytest.mark.parametrize(
    "wrong",
    [{"prefill": 3, "pipeline": 2}, {"coupled": 2}, {"decode": 0}, {"failures": (InstanceFailure("prefill-8", 1.0),)}],
)
def test_clusters_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        ClusterSetup(**wrong)  # type: ignore[arg-type]
