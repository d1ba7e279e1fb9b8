"""Cake's split against every split there is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conductor.scheduling.worlds import BLOCK, Busy, KnownHoldings, Quadratic, Tiers, a_request, centric, fleet_of

from skymemory.conductor.cost_model import Medium, loaded_s
from skymemory.conductor.scheduling.kvcache_centric import (
    KvCacheCentric,
    KvCacheCentricSettings,
    LoadSources,
    best_split,
    finish_s,
)

_SECONDS = st.floats(0.0, 100.0, allow_nan=False)


def by_trying(
    cost: Quadratic, tokens: int, wait_s: float, held: int, end: int, token_s: float, latency_s: float, layers: int
) -> float:
    """The soonest end of all, where any blocks from ``held`` on are loaded, and all before and behind is computed."""
    best = wait_s + cost.prefill_s(tokens, held * BLOCK)
    for stop in range(held + 1, end + 1):
        rest_s = cost.prefill_s(tokens, stop * BLOCK)
        for split in range(held, stop):
            ready_s = wait_s + cost.prefill_s(tokens, held * BLOCK) - cost.prefill_s(tokens, split * BLOCK)
            load_s = latency_s + (stop - split) * BLOCK * token_s
            best = min(best, finish_s(ready_s, load_s, rest_s, layers))
    return best


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 24).flatmap(lambda end: st.tuples(st.integers(0, end - 1), st.just(end), st.integers(end, 30))),
    st.integers(0, BLOCK - 1),
    _SECONDS,
    st.floats(0.001, 3.0),
    st.floats(0.0, 20.0),
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.05),
    st.sampled_from([1, 2, 80]),
)
def test_no_split_is_sooner(
    blocks: tuple[int, int, int],
    extra: int,
    wait_s: float,
    load_token_s: float,
    latency_s: float,
    token_s: float,
    pair_s: float,
    layers: int,
) -> None:
    held, end, count = blocks
    cost = Quadratic(token_s, pair_s)
    fleet = fleet_of(1)
    medium = Medium("sky", 1 / load_token_s, latency_s)
    scorer = centric({0: held}, cost, far=[("sky", end, medium)], layers=layers, split_gain=0.0)
    server = fleet.servers["s0"]
    scorer._queues.add(server.slot, wait_s, 0.0)
    request = a_request(count, extra)
    ranking = scorer.rank(request, [server], 0.0)
    assert ranking.estimated_ttft_s is not None and ranking.plan_at is not None
    tokens = request.prompt.tokens
    best = by_trying(cost, tokens, wait_s, held, end, 1 / medium.bytes_per_s, latency_s, layers)
    # Loaded to the last token, one is computed again; a split that leaves the last block is not looked for.
    again_s = cost.prefill_s(tokens, tokens) if end * BLOCK == tokens else 0.0
    assert best * (1 - 1e-9) <= ranking.estimated_ttft_s[0] <= best * (1 + 1e-9) + again_s
    best = ranking.estimated_ttft_s[0]
    plan = ranking.plan_at(0)
    assert plan.held_tokens == held * BLOCK <= plan.split_tokens <= plan.split_tokens + plan.loaded_tokens <= tokens
    assert plan.queue_s == wait_s
    if plan.loaded_tokens:
        assert plan.split_tokens + plan.loaded_tokens == end * BLOCK and plan.source == "sky"
        rest_s = cost.prefill_s(tokens, end * BLOCK)
        ends_s = finish_s(wait_s + plan.compute_s - rest_s, plan.load_s, rest_s, layers)
        assert abs(ends_s - best) <= 1e-9 * best


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 5))
def test_halving_finds_the_least_of_a_convex_row(steps: list[int], held: int) -> None:
    row = [0]
    for step in sorted(step - 25 for step in steps):
        row.append(row[-1] + step)
    at, value = best_split(lambda one: float(row[one - held]), held, held + len(row))
    assert value == min(row) and row[at - held] == value


@given(_SECONDS, _SECONDS, st.integers(1, 100))
def test_an_idle_server_ends_as_the_cost_model_says(load_s: float, compute_s: float, layers: int) -> None:
    expected = loaded_s(load_s, compute_s, layers) if load_s else compute_s
    assert abs(finish_s(0.0, load_s, compute_s, layers) - expected) <= 1e-9


def test_a_slow_load_is_shortened_by_computing_its_front() -> None:
    """100 tokens, 80 of them far away at the pace of computing: half is computed, half comes meanwhile."""
    scorer = centric({}, far=[("sky", 8, Medium("sky", 1.0))])
    ranking = scorer.rank(a_request(10), list(fleet_of(2)), 0.0)
    assert ranking.plan_at is not None
    assert ranking.estimated_ttft_s == [60.0, 60.0]
    plan = ranking.plan_at(0)
    assert (plan.held_tokens, plan.split_tokens, plan.loaded_tokens) == (0, 40, 40)
    assert (plan.load_s, plan.compute_s) == (40.0, 60.0)


def test_splits_are_looked_for_where_they_save_enough() -> None:
    far = [("sky", 8, Medium("sky", 1.0))]
    without = centric({}, far=far, split_gain=0.9).rank(a_request(10), list(fleet_of(1)), 0.0)
    assert without.estimated_ttft_s == [100.0]


_SERVER = st.tuples(st.integers(0, 12), st.floats(0.0, 150.0), st.floats(0.0, 40.0), st.floats(0.0, 40.0))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(_SERVER, min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 11), st.floats(0.1, 20.0), st.floats(0.0, 30.0)), max_size=2),
    st.floats(0.1, 20.0),
    st.floats(0.0, 0.02),
    st.sampled_from([1, 8]),
)
def test_the_server_that_is_chosen_is_the_best_of_all_splits_of_all(
    rows: list[tuple[int, float, float, float]],
    tiers: list[tuple[int, float, float]],
    network_rate: float,
    pair_s: float,
    layers: int,
) -> None:
    """Servers that are not looked at for a split could not have won by one."""
    cost, network = Quadratic(1.0, pair_s), Medium("network", network_rate, 0.5)
    far = [
        (f"tier{number}", blocks, Medium("tier", rate, late_s)) for number, (blocks, rate, late_s) in enumerate(tiers)
    ]
    held = {slot: blocks for slot, (blocks, *_) in enumerate(rows)}
    ways = Busy({slot: row[2] for slot, row in enumerate(rows)}, {slot: row[3] for slot, row in enumerate(rows)})
    chosen = KvCacheCentricSettings(layers=layers, split_gain=0.0, delay_weight=0.0)
    scorer = KvCacheCentric(KnownHoldings(held), cost, 1.0, LoadSources(network, Tiers(far), links=ways), chosen)
    for slot, (_, wait_s, *_) in enumerate(rows):
        scorer._queues.add(slot, wait_s, 0.0)
    request = a_request(12, extra_tokens=3)
    ranking = scorer.rank(request, list(fleet_of(len(rows))), 0.0)
    ends = []
    for slot, (blocks, wait_s, _, in_s) in enumerate(rows):
        end_s = wait_s + cost.prefill_s(123, blocks * BLOCK)
        for other, (there, _, out_s, _) in enumerate(rows):
            if other != slot and there > blocks:
                late_s = max(out_s, in_s) + network.latency_s
                end_s = min(end_s, by_trying(cost, 123, wait_s, blocks, there, 1 / network_rate, late_s, layers))
        for _, there, medium in far:
            if there > blocks:
                late_s = in_s + medium.latency_s
                end_s = min(end_s, by_trying(cost, 123, wait_s, blocks, there, 1 / medium.bytes_per_s, late_s, layers))
        ends.append(end_s)
    assert ranking.estimated_ttft_s is not None
    assert abs(-max(ranking.scores) - min(ends)) <= 1e-9 * min(ends)
    for estimate, end_s in zip(ranking.estimated_ttft_s, ends, strict=True):
        assert estimate >= end_s * (1 - 1e-9)
