"""The simulator of routing: small runs computed by hand, its cache beside an obvious one, and what it lets be known."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA800, Machine
from skymemory.conductor.picker import Ranking, ReportedLoad, Scorer, Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.simple import LeastLoad, RandomChoice, RoundRobin
from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.pool import PrefixCache
from skymemory_lab.sim.routed_strategies import strategy_for
from skymemory_lab.sim.routing import RoutedOutcome, RoutingSetup, as_routed, measured, simulate, worst_share
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import CONVERSATIONS, TENANTS, Workload, generate

LINEAR = CostModel(
    replace(LLAMA_70B_8xA800.shape, layers=1, width=1, attention_flops=0.0, weight_flops=1.0),
    Machine("a token in a millisecond", 2_000.0, 1.0, 1.0),
    mfu=0.5,
)
ONE = RoutingSetup(servers=1, cache_blocks=4, cost=LINEAR, decode_token_s=0.1, scrape_s=0.2)


def asks(at_s: float, ids: Sequence[int], tokens: int, output: int = 10) -> TraceRequest:
    return TraceRequest(at_s, tokens, output, tuple(ids))


def test_a_queue_and_hits_by_hand() -> None:
    requests = [
        asks(0.0, (0, 1), 1024),  # alone: 1.024 s
        asks(0.5, (0, 1, 2), 1300),  # waits 0.524, hits two blocks, computes 276
        asks(5.0, (0, 1), 1024),  # all is there, and still one token is computed
        asks(6.0, (7, 8, 9), 1536),  # three more than fit beside (0, 1): block 1 goes, 0 stays
        asks(9.0, (0, 1), 1024),
    ]
    outcomes = simulate(requests, RandomChoice(), ONE)
    assert [outcome.ttft_s for outcome in outcomes] == pytest.approx([1.024, 0.524 + 0.276, 0.001, 1.536, 0.512])
    assert [outcome.hit_blocks for outcome in outcomes] == [0, 2, 2, 0, 1]
    assert [outcome.hit_tokens for outcome in outcomes] == [0, 1024, 1023, 0, 512]
    assert [outcome.blocks for outcome in outcomes] == [2, 2, 2, 3, 2]


def test_hits_are_those_at_the_beginning_of_service() -> None:
    """Both are asked for at once; when the second is served the first has left its blocks."""
    outcomes = simulate([asks(0.0, (0, 1), 1024), asks(0.0, (0, 1), 1024)], RandomChoice(), ONE)
    assert [outcome.hit_blocks for outcome in outcomes] == [0, 2]


class Watching(Scorer):
    """Least load, and all that it has learned."""

    name = "watching"

    def __init__(self) -> None:
        self.reports: list[tuple[float, ReportedLoad | None, int]] = []
        self.ends_s: list[float] = []

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        self.reports.append((now_s, servers[0].reported, servers[0].in_flight))
        return Ranking([-float(server.in_flight) for server in servers])

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        self.ends_s.append(now_s)
        assert cached_tokens is None, "engines say that at the end of an answer, not with its first byte"


def test_reports_are_as_old_as_the_last_scrape() -> None:
    requests = [asks(at_s, (0,), 600) for at_s in (0.05, 0.1, 0.15, 0.25, 0.7, 2.3, 10.0)]
    watching = Watching()
    simulate(requests, watching, replace(ONE, decode_token_s=0.1))
    seen = [
        (round(now_s, 2), round(r.at_s, 2), r.waiting, r.running, flying) for now_s, r, flying in watching.reports if r
    ]
    assert seen == [
        (0.05, 0.0, 0, 0, 0),
        (0.1, 0.0, 0, 0, 1),
        (0.15, 0.0, 0, 0, 2),
        (0.25, 0.2, 2, 1, 3),
        # 0.65 s: the first is ready, and decodes until 1.65; the second needs its last 88 tokens only: 0.738.
        (0.7, 0.6, 3, 1, 4),
        (2.3, 2.2, 0, 0, 0),
        (10.0, 10.0, 0, 0, 0),
    ]
    assert watching.ends_s == pytest.approx([0.65, 0.738, 0.826, 0.914, 1.002, 2.388, 10.088])
    assert all(r.cache_blocks == 4 and r.block_tokens == 512 for _, r, _ in watching.reports if r)


class Heard:
    def __init__(self) -> None:
        self.resident: set[int] = set()
        self.learned = 0

    def changed(self, server: Server, chain: Sequence[int], cached_blocks: int, evicted_blocks: Sequence[int]) -> None:
        assert self.resident.issuperset(chain[:cached_blocks]) and self.resident.issuperset(evicted_blocks)
        assert not self.resident.intersection(chain[cached_blocks:])
        self.resident.difference_update(evicted_blocks)
        self.resident.update(chain)
        self.learned += 1


def test_events_add_up_to_what_is_resident() -> None:
    requests = [replace(one, at_s=float(at)) for at, one in enumerate(generate(CONVERSATIONS, 60.0, seed=1))]
    heard, cache = Heard(), PrefixCache(300)
    simulate(requests, RandomChoice(), RoutingSetup(servers=1, cache_blocks=300), heard)
    for request in requests:
        cache.use(request.blocks())
    assert heard.resident == set(cache) and heard.learned == len(requests)
    assert len(cache) == 300


class NaiveCache:
    """The obvious twin: every block with the number of its last use, and a search for the oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.now = capacity, 0
        self.used: dict[int, int] = {}

    def use(self, chain: Sequence[int]) -> list[int]:
        for block in chain[: self.capacity][::-1]:
            self.now += 1
            self.used[block] = self.now
        gone = sorted(self.used, key=self.used.__getitem__)[: max(0, len(self.used) - self.capacity)]
        for block in gone:
            del self.used[block]
        return gone


@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_the_cache_beside_an_obvious_one_and_closed_under_prefixes(capacity: int) -> None:
    dice = random.Random(capacity)
    cache, naive = PrefixCache(capacity), NaiveCache(capacity)
    for _ in range(1500):
        stem, length = dice.randrange(6), dice.randrange(1, 12)
        branch = dice.randrange(length + 1)
        chain = [100 * stem + at for at in range(branch)]
        chain += [10_000 + 1000 * stem + 50 * branch + at for at in range(branch, length)]
        leading = cache.leading(chain)
        assert leading == sum(block in naive.used for block in chain), "a hit behind a hole"
        assert cache.use(chain) == naive.use(chain)
        assert set(cache) == set(naive.used) and len(cache) <= capacity
    with pytest.raises(InvalidInput):
        PrefixCache(0)


@pytest.mark.brief()
@pytest.mark.parametrize("scorer", [RandomChoice, RoundRobin, LeastLoad])
def test_every_request_ends_once_and_equal_seeds_give_equal_runs(scorer: type) -> None:
    requests = generate(CONVERSATIONS, 120.0, seed=2)
    setup = RoutingSetup(cache_blocks=500, seed=9)
    outcomes = simulate(requests, scorer(), setup)
    assert len(outcomes) == len(requests)
    assert [outcome.at_s for outcome in outcomes] == [request.at_s for request in requests]
    assert outcomes == simulate(requests, scorer(), setup)
    # No server works on two at once, nor rests while one waits: each begins when the one before it ends, or at once.
    for number in range(setup.servers):
        free_s = 0.0
        for outcome in (one for one in outcomes if one.server == number):
            begins_s = max(free_s, outcome.at_s)
            free_s = begins_s + setup.cost.prefill_s(outcome.tokens, outcome.hit_tokens)
            assert outcome.at_s + outcome.ttft_s == pytest.approx(free_s)


def test_ties_follow_the_seed() -> None:
    requests = generate(CONVERSATIONS, 60.0, seed=2)
    first, again, other = (
        [outcome.server for outcome in simulate(requests, RandomChoice(), RoutingSetup(seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_refuses_arrivals_out_of_order_and_fleets_of_nothing() -> None:
    with pytest.raises(InvalidInput, match="sort them"):
        simulate([asks(1.0, (0,), 9), asks(0.5, (0,), 9)], RandomChoice(), ONE)
    with pytest.raises(InvalidInput):
        RoutingSetup(servers=0)


def test_prompts_share_blocks_as_ids_do() -> None:
    one, other = as_routed(asks(0.0, (5, 6, 7), 1500)), as_routed(asks(0.0, (5, 6, 8, 9), 2000))
    assert one.prompt.blocks.tolist() == other.prompt.blocks.tolist()[:2] and len(one.prompt.blocks) == 2
    assert not set(one.prompt.blocks.tolist()) & set(one.prompt.pieces.tolist())
    assert one.prompt.head[:16] == other.prompt.head[:16] != other.prompt.head[8:24]
    assert len(as_routed(asks(0.0, (3,), 511)).prompt.blocks) == 0


def test_metrics_by_hand() -> None:
    requests = [asks(float(at), (at,), 512) for at in range(4)]
    outcomes = simulate(requests, RandomChoice(), ONE)
    metrics = measured(outcomes, 1, from_s=1.0)
    assert metrics.requests == 3 and metrics.mean_s == pytest.approx(0.512)
    assert metrics.token_hits == 0 and metrics.worst_share == 0 and metrics.spread == 0
    with pytest.raises(InvalidInput, match="no request arrived"):
        measured(outcomes, 1, from_s=99.0)


def outcome(at_s: float, server: int, ttft_s: float, answer_s: float, output: int, **other: Any) -> RoutedOutcome:
    return RoutedOutcome(at_s, server, ttft_s, 1_000, 0, 1, 0, answer_s, output, **{"believed_tokens": 0, **other})


def test_latencies_by_hand() -> None:
    """Per request tokens take 0.1 s and 0.3 s; over all ten tokens after the first ones, 0.12 s."""
    outcomes = [
        outcome(0.0, 0, 1.0, 1.9, 10, believed_tokens=513),
        outcome(1.0, 0, 3.0, 3.3, 2, believed_tokens=512),
        outcome(2.0, 1, 2.0, 2.0, 1),
        outcome(3.0, 0, 60.0, 60.0, 500, failed=True),
    ]
    metrics = measured(outcomes, 4)
    assert (metrics.requests, metrics.failed, metrics.overbelieved) == (4, 1, 0.25)
    assert metrics.mean_s == pytest.approx(66 / 4) and metrics.answer_s == pytest.approx((1.9 + 3.3 + 2 + 60) / 4)
    assert metrics.token_s == pytest.approx(0.2) and metrics.all_tokens_s == pytest.approx(1.2 / 10)
    assert metrics.answer_p99_s > 58 and 0.29 < metrics.token_p99_s <= 0.3
    assert metrics.servers_used == 0.5, "a quarter of the mean is a quarter of a request"
    assert set(metrics.as_json()) == {field.name for field in fields(metrics)}


@pytest.mark.parametrize(
    ("name", "whole", "workload", "digest", "sum_s", "squares"),
    [
        ("precise", 0.0, CONVERSATIONS, "d2e16cc574b2a882", 2595.1973148814, 53473.649730164),
        ("approximate", 0.0, TENANTS, "38f7e2855b9edb3a", 1444.6556973320, 3836.6921421785),
        ("least-load", 0.0, TENANTS, "199a6bc0528afa10", 9708.0691060329, 133857.38797960),
    ],
)
def test_one_prefill_at_a_time_gives_the_results_of_the_first_edition(
    name: str, whole: float, workload: Workload, digest: str, sum_s: float, squares: float
) -> None:
    """Recorded before there were other engines."""
    setup = RoutingSetup(cache_blocks=1_000, seed=7, whole=whole, scrape_s=0.2)
    requests = generate(workload, 120.0 if workload is CONVERSATIONS else 60.0, seed=11)
    scorer, events = strategy_for(name, setup, 0.1)
    outcomes = simulate(requests, scorer, setup, events)
    placed = [(one.server, one.hit_blocks, one.hit_tokens, one.blocks, one.tokens) for one in outcomes]
    assert hashlib.sha256(repr(placed).encode()).hexdigest()[:16] == digest
    assert sum(one.ttft_s for one in outcomes) == pytest.approx(sum_s)
    assert sum(one.ttft_s**2 for one in outcomes) == pytest.approx(squares)


def test_the_worst_share_is_that_of_the_worst_window() -> None:
    dice = random.Random(3)
    arrivals = sorted((dice.uniform(0, 300), min(3, int(dice.expovariate(1.0)))) for _ in range(600))
    begins = [at_s for at_s, _ in arrivals] + [at_s - 60 + 1e-9 for at_s, _ in arrivals]
    worst = 0.0
    for begin_s in begins:
        inside = [server for at_s, server in arrivals if begin_s <= at_s < begin_s + 60]
        if len(inside) >= 100:
            worst = max(worst, max(Counter(inside).values()) * 4 / len(inside))
    assert worst_share(arrivals, 4, least=100) == pytest.approx(worst) and worst > 1.5
    assert worst_share(arrivals[:99], 4, least=100) == 0
