"""The best split against every way there is to share a small prompt out, and the loader against it."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import PromptChunk
from skymemory_lab.sim.loading import LinkTrace, best_split_s, simulate_load

COSTS = st.lists(st.floats(0.1, 5), min_size=1, max_size=7).map(sorted)
"""Seconds to compute each chunk; none is cheaper than one before it."""


def best_of_all_s(costs: list[float], load_s: float) -> float:
    """Any set of chunks loaded, from the last to the first, and the others computed, each when all before it is there.

    All sets are tried; no way of loading them is better than from the back, for a chunk that waits for one before it
    would have been computed for nothing.
    """
    best_s = float("inf")
    for count in range(len(costs) + 1):
        for loaded in combinations(range(len(costs)), count):
            here_s = {index: (place + 1) * load_s for place, index in enumerate(reversed(loaded))}
            now_s = 0.0
            for index, cost_s in enumerate(costs):
                now_s = max(now_s, here_s[index]) if index in here_s else now_s + cost_s
            best_s = min(best_s, now_s)
    return best_s


@settings(deadline=None, max_examples=100)
@given(costs=COSTS, load_s=st.floats(0.1, 5))
def test_no_way_to_share_chunks_out_beats_the_best_split(costs: list[float], load_s: float) -> None:
    chunks = [PromptChunk(index, 1, 1000, True) for index in range(len(costs))]
    split_s = best_split_s(
        chunks, lambda first, tokens: costs[first], LinkTrace.constant(1000 / load_s), budget_tokens=1
    )
    assert abs(split_s - best_of_all_s(costs, load_s)) < 1e-9


@settings(deadline=None, max_examples=100)
@given(first_s=st.floats(0.2, 3), growth_s=st.floats(0, 0.5), load_s=st.floats(0.1, 5), count=st.integers(1, 7))
def test_a_loader_that_knows_the_speeds_finds_the_best_of_all(
    first_s: float, growth_s: float, load_s: float, count: int
) -> None:
    """To a rounding: where both sides would have a chunk at the same moment, either may take it."""
    costs = [first_s + growth_s * index for index in range(count)]
    chunks = [PromptChunk(index, 1, 1000, True) for index in range(count)]
    pace = SpeedEstimate()
    for index in (0, 6) * 20:
        pace.step_took(index + 0.5, first_s + growth_s * index)
        pace.load_took(1000, load_s)
    run = simulate_load(
        chunks,
        lambda first, tokens: costs[first],
        LinkTrace.constant(1000 / load_s),
        budget_tokens=1,
        max_in_flight_bytes=1,
        pace=pace,
    )
    assert run.ttft_s <= best_of_all_s(costs, load_s) * (1 + 1e-6)


@settings(deadline=None, max_examples=100)
@given(
    count=st.integers(1, 12),
    budget=st.integers(1, 5),
    step_s=st.floats(0.1, 2),
    rate=st.floats(100, 50_000),
    dies_s=st.floats(0, 10),
    warm=st.booleans(),
)
def test_a_link_that_dies_costs_at_most_two_steps_more_than_computing_alone(
    count: int, budget: int, step_s: float, rate: float, dies_s: float, warm: bool
) -> None:
    chunks = [PromptChunk(index, 1, 1000, True) for index in range(count)]
    pace = SpeedEstimate()
    if warm:
        pace.step_took(0.5, step_s)
        pace.load_took(1000, 1000 / rate)
    trace = LinkTrace((0.0, dies_s + 0.01, 1e9), (rate, 0.0, rate))
    alone_s = -(-count // budget) * step_s
    for room in (1, 10**9):
        run = simulate_load(
            chunks, lambda first, tokens: step_s, trace, budget_tokens=budget, max_in_flight_bytes=room, pace=pace
        )
        assert run.ttft_s <= alone_s + 2 * step_s + 1e-6


@settings(deadline=None, max_examples=100)
@given(
    count=st.integers(1, 14),
    budget=st.integers(1, 5),
    step_s=st.floats(0.1, 2),
    rate=st.floats(100, 100_000),
    pieces=st.lists(st.tuples(st.floats(0.05, 3), st.sampled_from((0.0, 0.05, 0.5, 1.0, 2.0))), max_size=8),
    failing=st.sets(st.integers(0, 13)),
    warm=st.booleans(),
    others_fill=st.booleans(),
)
def test_stalls_and_failures_at_random_cost_at_most_four_steps_more_than_computing_alone(
    count: int,
    budget: int,
    step_s: float,
    rate: float,
    pieces: list[tuple[float, float]],
    failing: set[int],
    warm: bool,
    others_fill: bool,
) -> None:
    """The most that 108,000 random runs came to was 3.4: a wait may end as late as two steps, and restart."""
    since_s, rates = [0.0], [rate]
    for lasts_s, factor in pieces:
        since_s.append(since_s[-1] + lasts_s)
        rates.append(rate * factor)
    trace = LinkTrace((*since_s, since_s[-1] + 1), (*rates, rate))
    chunks = [PromptChunk(index, 1, 1000, True) for index in range(count)]
    pace = SpeedEstimate()
    if warm:
        pace.step_took(0.5, step_s)
        pace.load_took(1000, 1000 / rate)
    for room in (1, 3000, 10**9):
        run = simulate_load(
            chunks,
            lambda first, tokens: step_s if others_fill else step_s * tokens / budget,
            trace,
            budget_tokens=budget,
            max_in_flight_bytes=room,
            pace=pace,
            failing={index for index in failing if index < count},
            others_fill=others_fill,
        )
        assert run.ttft_s <= -(-count // budget) * step_s + 4 * step_s
