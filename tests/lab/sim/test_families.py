"""The generator's further families: their settings, and the published statistics."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from skymemory.conductor.strategies.registry import named
from skymemory.errors import InvalidInput
from skymemory_lab.sim.distributions import Bursts, QuantileLengths
from skymemory_lab.sim.families import AZURE_CHAT, AZURE_CODE, BURSTGPT, BURSTS, FAMILIES, SESSIONS, SHARED_PROMPT
from skymemory_lab.sim.routing import RoutingSetup, measured, simulate
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import WORKLOADS, Workload, generate


def inputs(requests: list[TraceRequest]) -> list[int]:
    return [request.input_tokens for request in requests]


def outputs(requests: list[TraceRequest]) -> list[int]:
    return [request.output_tokens for request in requests]


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(WORKLOADS)))
def test_is_seeded_sorted_and_a_true_tree_of_prefixes(name: str) -> None:
    requests = generate(FAMILIES[name], 120.0, seed=3)
    assert requests == generate(FAMILIES[name], 120.0, seed=3) != generate(FAMILIES[name], 120.0, seed=4)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    parents: dict[int, tuple[int, ...]] = {}
    for request in requests:
        assert 0 <= request.at_s < 120.0 and request.input_tokens >= 1 and request.output_tokens >= 1
        assert len(request.ids) == -(-request.input_tokens // 512)
        for depth, one in enumerate(request.ids):
            assert parents.setdefault(one, request.ids[:depth]) == request.ids[:depth]


PUBLISHED: list[tuple[Workload, Callable[[list[TraceRequest]], list[int]], float, float | None]] = [
    (AZURE_CODE, inputs, 2_048, 1_469),
    (AZURE_CODE, outputs, 27.9, 13),
    (AZURE_CHAT, inputs, 1_155, 1_020),
    (AZURE_CHAT, outputs, 211, 129),
    (BURSTGPT, inputs, 763, None),
    (BURSTGPT, outputs, 348, None),
]


@pytest.mark.parametrize(("workload", "lengths", "mean", "median"), PUBLISHED)
def test_lengths_are_those_published(
    workload: Workload, lengths: Callable[[list[TraceRequest]], list[int]], mean: float, median: float | None
) -> None:
    drawn = lengths(generate(workload, 900.0, seed=1))
    assert np.mean(drawn) == pytest.approx(mean, rel=0.15)
    assert median is None or np.median(drawn) == pytest.approx(median, rel=0.05)


@pytest.mark.parametrize(("workload", "dispersion"), [(AZURE_CODE, 13.2), (AZURE_CHAT, 1.39), (BURSTGPT, 2.0)])
def test_arrivals_come_in_clusters(workload: Workload, dispersion: float) -> None:
    """The variance of requests per interval over its mean is one over the shape, in intervals of many gaps."""
    requests = generate(workload, 3_000.0, seed=1)
    assert len(requests) / 3_000.0 == pytest.approx(workload.conversations_per_s, rel=0.1)
    counts = np.bincount([int(request.at_s / 10.0) for request in requests], minlength=300)
    assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.25)


def test_bursts_have_their_share() -> None:
    requests = generate(BURSTS, 1_000.0, seed=1)
    # Two fifths of the chats begin inside, and their further turns come later.
    inside = sum(49.0 <= request.at_s % 100.0 < 51.0 for request in requests)
    assert 0.25 < inside / len(requests) < 0.4
    peak = max(Counter(int(request.at_s) for request in requests).values())
    assert peak == pytest.approx(20 * BURSTS.conversations_per_s, rel=0.2)


def test_a_warp_keeps_order_and_the_mean_rate() -> None:
    bursts = Bursts(times=20.0, lasts_s=2.0, every_s=100.0)
    times = [bursts.warped_s(0.5 * at) for at in range(1_000)]
    assert all(before < after for before, after in pairwise(times))
    assert [bursts.warped_s(100.0 * at) for at in range(4)] == pytest.approx([0.0, 100.0, 200.0, 300.0])
    assert bursts.warped_s(30.0) == pytest.approx(49.0) and bursts.warped_s(70.0) == pytest.approx(51.0)
    with pytest.raises(InvalidInput, match="more requests"):
        Bursts(times=60.0, lasts_s=2.0, every_s=100.0)


def test_quantiles_are_met() -> None:
    dice = random.Random(1)
    drawn = [QuantileLengths(((0.0, 10), (0.5, 20), (1.0, 1_020))).draw(dice) for _ in range(20_000)]
    assert np.percentile(drawn, [0, 25, 75, 100]) == pytest.approx([10, 15, 520, 1_020], rel=0.05)


def test_sessions_grow_behind_one_system_prompt() -> None:
    requests = generate(SESSIONS, 300.0, seed=1)
    turns: dict[int, list[TraceRequest]] = {}
    for request in requests:
        turns.setdefault(request.session, []).append(request)
    assert len(turns) == 40 and len({request.ids[:5] for request in requests}) == 1
    for session in turns.values():
        assert session[0].at_s < 12.0 and len(session) > 8
        for before, after in pairwise(session):
            grown = after.input_tokens - before.input_tokens - before.output_tokens
            assert 500 <= grown <= 1_500 and 50 <= before.output_tokens <= 200
            assert after.ids[: len(before.blocks())] == before.blocks()


def test_one_system_prompt_for_all() -> None:
    requests = generate(SHARED_PROMPT, 100.0, seed=1)
    assert len(requests) == pytest.approx(1_400, rel=0.1) and len({request.ids[:5] for request in requests}) == 1
    assert {3_100 <= request.input_tokens <= 3_400 and 300 <= request.output_tokens <= 900 for request in requests} == {
        True
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(WORKLOADS)))
@pytest.mark.parametrize("engine", ["fifo", "chunk"])
def test_eight_servers_are_enough(name: str, engine: str) -> None:
    """The tails of the second half stay short: queues do not grow."""
    requests = generate(FAMILIES[name], 600.0, seed=1)
    setup = RoutingSetup(engine=engine, cache_blocks=1_200 if name == "sessions" else 5_000)  # type: ignore[arg-type]
    metrics = measured(simulate(requests, named("lmetric"), setup), setup.servers, 300.0)
    assert metrics.p99_s < 10.0 and metrics.token_s < 0.2, metrics
