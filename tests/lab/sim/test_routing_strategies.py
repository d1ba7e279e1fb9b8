"""The router's strategies in the simulator: each by name, what each learns, and what the default owes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.strategies.registry import DEFAULT, NAMES, named
from skymemory_lab.sim.cluster.pool import PrefixCache
from skymemory_lab.sim.routed_strategies import EngineEvents, strategy_for
from skymemory_lab.sim.routing import RoutingSetup, as_routed, measured, simulate, worst_share
from skymemory_lab.sim.routing_metrics import WINDOW_REQUESTS
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest
from skymemory_lab.sim.workload import AGENTS, CONVERSATIONS, TENANTS, generate

ROOT = Path(__file__).parents[3]


@pytest.mark.brief("hash-trie", "least-load", "round-robin", "block-cost", "random")
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_runs_and_runs_the_same_again(name: str) -> None:
    requests, setup = generate(CONVERSATIONS, 60.0, seed=1), RoutingSetup(cache_blocks=300, seed=3)
    first, again = (simulate(requests, *strategy_for(name, setup, 0.1)[:1], setup) for _ in range(2))
    assert first == again and len(first) == len(requests)


def test_who_hears_events_knows_what_is_resident() -> None:
    """One server, and requests one after the other: in the end the index holds what the cache does."""
    requests = [replace(one, at_s=100.0 * at) for at, one in enumerate(generate(CONVERSATIONS, 40.0, seed=2))]
    setup = RoutingSetup(servers=1, cache_blocks=400)
    scorer, events = strategy_for("precise", setup, 0.0)
    assert isinstance(events, EngineEvents)
    simulate(requests, scorer, setup, events)
    index, cache = events.index, PrefixCache(400)
    assert isinstance(index, PreciseIndex)
    for request in requests:
        cache.use(request.blocks())
    assert index.blocks_of(0) == len(cache) == 400
    for request in requests:
        assert index.match(as_routed(request).prompt.blocks, [0]) == [cache.leading(request.blocks())]


def test_the_default_keeps_its_bound_where_following_prefixes_breaks_it() -> None:
    """All requests share one long prefix, and one server could do them all: without its guard it gets most of them, if
    it knows of prefixes by events alone. Else a prefix of all requests is soon everywhere.
    """
    stem = tuple(range(1, 41))
    requests = [TraceRequest(0.3 * at, 41 * 512, 20, (*stem, 1000 + at)) for at in range(500)]
    setup, shares = RoutingSetup(cache_blocks=2_000, seed=1), []
    for options in ({}, {"guard_limit": 100.0}):
        index = PreciseIndex(BLOCK_TOKENS)
        scorer = named(DEFAULT, index=index, cost=setup.cost, **options)
        outcomes = simulate(requests, scorer, setup, EngineEvents(index))
        shares.append(worst_share([(one.at_s, one.server) for one in outcomes], setup.servers))
    assert 1.0 < shares[0] <= 4.0 < shares[1]
    outcomes = simulate(requests, named(DEFAULT, cost=setup.cost, guard_limit=100.0), setup)
    assert measured(outcomes, setup.servers).servers_used == 1.0


@pytest.mark.brief("workload0")
@pytest.mark.parametrize("workload", [CONVERSATIONS, pytest.param(TENANTS, marks=pytest.mark.slow), AGENTS])
def test_no_rival_is_much_quicker_than_the_default(workload) -> None:  # type: ignore[no-untyped-def]
    requests = generate(workload, 300.0, seed=77)
    prompts = [as_routed(request) for request in requests]
    setup = RoutingSetup(cache_blocks=2_000, seed=5)
    means = {}
    for name in (DEFAULT, "approximate", "radix", "session", "least-load"):
        scorer, events = strategy_for(name, setup, 0.1)
        found = measured(simulate(requests, scorer, setup, events, prompts), setup.servers, 100.0)
        means[name] = found.mean_s
        if name == DEFAULT:
            assert found.requests > WINDOW_REQUESTS and found.worst_share <= 4.0
    assert means[DEFAULT] <= 1.05 * min(means.values()), means


@pytest.mark.brief()
@pytest.mark.parametrize("reports_totals", [True, False])
def test_answers_that_come_whole_teach_the_default_nothing_wrong(reports_totals: bool) -> None:
    """Clients that do not stream see the first byte with the last; it is no prefill's end."""
    requests = generate(CONVERSATIONS, 240.0, seed=5)
    prompts = [as_routed(request) for request in requests]
    means = []
    for whole in (0.0, 1.0):
        setup = RoutingSetup(cache_blocks=2_000, seed=5, whole=whole, reports_totals=reports_totals)
        means.append(measured(simulate(requests, named(DEFAULT), setup, None, prompts), setup.servers, 100.0).mean_s)
    assert max(means) < 1.3 * means[0], means


@pytest.mark.slow
@pytest.mark.parametrize("whole", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("reports_totals", [True, False])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_wrong_speeds_leave_the_default_ahead(factor: float, reports_totals: bool, whole: float) -> None:
    requests = generate(CONVERSATIONS, 240.0, seed=5)
    prompts = [as_routed(request) for request in requests]
    setup = RoutingSetup(cache_blocks=2_000, seed=5, whole=whole, reports_totals=reports_totals)
    wrong = replace(setup.cost, mfu=setup.cost.mfu * factor)
    means = [
        measured(simulate(requests, scorer, setup, None, prompts), setup.servers, 100.0).mean_s
        for scorer in (named(DEFAULT, cost=wrong), named("approximate"), named("lmetric"))
    ]
    assert means[0] < min(means[1:]), means


@pytest.mark.slow
@pytest.mark.seeded
def test_where_all_servers_have_long_queues_the_default_leads() -> None:
    """Past saturation caches are worth the same everywhere: the shortest queue's length times the work saved."""
    requests = [replace(one, at_s=one.at_s / 2.5) for one in generate(CONVERSATIONS, 300.0, seed=6)]
    prompts = [as_routed(request) for request in requests]
    setup = RoutingSetup(cache_blocks=2_000, seed=5)
    means = {}
    for name in (DEFAULT, "lmetric", "least-load"):
        scorer, events = strategy_for(name, setup, 0.1)
        means[name] = measured(simulate(requests, scorer, setup, events, prompts), setup.servers, 40.0).mean_s
    assert means[DEFAULT] < 0.88 * min(means["lmetric"], means["least-load"]), means


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/arena.py"), "--quick", "--jobs", "1", "--seeds", "5,6"]
    command += ["--families", "agents", "--strategies", "radix,hash-trie", "--json", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "out").read_text("utf-8"))
    rows = {row["player"]: row for row in made["rows"]}
    assert set(rows) == {DEFAULT, f"{DEFAULT}, given speeds", "radix", "hash-trie", "hash-trie, min_match_tokens 1024"}
    (verdict,) = made["verdicts"]
    assert verdict["ratio"] < 1 and verdict["ours_s"] == rows[DEFAULT]["mean_s"] and made["seeds"] == [5, 6]
    assert rows[DEFAULT]["worst_share"] <= 4.0 and f"**{DEFAULT}**" in done.stdout
