"""Simulated engines: steps beside a twin that takes them one by one, shares by hand, and what reports say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.lab.sim.test_routing import LINEAR, asks

from skymemory.conductor.picker import ReportedLoad
from skymemory.conductor.strategies.simple import LeastLoad, RandomChoice, RoundRobin
from skymemory.errors import InvalidInput
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.engines import ENGINES, EngineSettings, Job
from skymemory_lab.sim.routing import Fault, RoutedOutcome, RoutingSetup, measured, simulate
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import CONVERSATIONS, SESSIONS, SHARED_PROMPT, generate

STEPS = EngineSettings("chunk", cache_blocks=1_000, step_s=0.01, answer_s=0.001, step_tokens=100)


class Times:
    """What an engine says of each job: the time of its first token and of its end."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self.end: dict[int, float] = {}

    def first_token(self, job: Job, evicted_blocks: list[int], now_s: float) -> None:
        self.first[id(job)] = now_s

    def ended(self, job: Job, now_s: float) -> None:
        assert id(job) not in self.end
        self.end[id(job)] = now_s


def run(kind: str, settings: EngineSettings, jobs: Sequence[tuple[float, Job]]) -> list[tuple[float, float]]:
    clock, times = Clock(), Times()
    engine = ENGINES[kind](settings, LINEAR, clock, times)
    for at_s, job in jobs:
        clock.run(at_s)
        engine.receive(job, at_s)
    clock.run()
    assert not engine.waiting and not engine.running and engine.tokens == 0
    return [(times.first[id(job)], times.end[id(job)]) for _, job in jobs]


def step_by_step(settings: EngineSettings, jobs: Sequence[tuple[float, Job]]) -> list[tuple[float, float]]:
    """The obvious engine: at the end of each step it looks who is there. No caches, as no prompt has a block."""
    now_s, left, answers = 0.0, {}, {}
    firsts, ends = dict[int, float](), dict[int, float]()
    arrivals = sorted(range(len(jobs)), key=lambda at: jobs[at][0])
    while len(ends) < len(jobs):
        while arrivals and jobs[arrivals[0]][0] <= now_s:
            at = arrivals.pop(0)
            left[at] = jobs[at][1].tokens
        if not left and not answers:
            now_s = jobs[arrivals[0]][0]
            continue
        budget, computed = settings.step_tokens - len(answers), 0
        for at in list(left):
            part = min(max(0, budget), left[at])
            left[at] -= part
            budget -= part
            computed += part
        now_s += settings.step_s + settings.answer_s * len(answers) + LINEAR.prefill_s(computed) * (computed > 0)
        for at in list(answers):
            answers[at] -= 1
            if not answers[at]:
                ends[at] = now_s
                del answers[at]
        for at in [at for at, tokens in left.items() if not tokens]:
            del left[at]
            firsts[at] = now_s
            if jobs[at][1].output_tokens > 1:
                answers[at] = jobs[at][1].output_tokens - 1
            else:
                ends[at] = now_s
    return [(firsts[at], ends[at]) for at in range(len(jobs))]


@pytest.mark.parametrize("seed", range(6))
def test_steps_beside_a_twin_that_takes_them_one_by_one(seed: int) -> None:
    dice, at_s, jobs = random.Random(seed), 0.0, []
    for _ in range(60):
        at_s += dice.choice([1e-4, 0.003, dice.expovariate(2.0)])
        jobs.append((at_s, Job(dice.choice([1, 30, 350]), dice.choice([1, 2, 40]), ())))
    expected = step_by_step(STEPS, jobs)
    found = run("chunk", STEPS, [(at_s, replace(job)) for at_s, job in jobs])
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def test_shared_prefills_by_hand() -> None:
    """Two of a second, half a second apart: both run at half speed while both are there."""
    settings = EngineSettings("shared", cache_blocks=100, token_s=0.1)
    found = run("shared", settings, [(0.0, Job(1000, 3, ())), (0.5, Job(1000, 3, ()))])
    assert [first for first, _ in found] == pytest.approx([1.5, 2.0])
    assert [end - first for first, end in found] == pytest.approx([0.2, 0.2])


def test_a_prompt_waits_for_room() -> None:
    settings = replace(STEPS, cache_blocks=1)  # 512 tokens
    (_, end), (first, _) = run("chunk", settings, [(0.0, Job(400, 50, ())), (0.0, Job(200, 1, ()))])
    assert first > end
    (_, end), (first, _) = run("chunk", settings, [(0.0, Job(400, 50, ())), (0.0, Job(100, 1, ()))])
    assert first < end


@pytest.mark.brief()
@pytest.mark.parametrize("kind", list(ENGINES))
@pytest.mark.parametrize("workload", [CONVERSATIONS, SHARED_PROMPT, SESSIONS])
def test_each_request_ends_once_in_time_and_the_same_again(kind: str, workload) -> None:  # type: ignore[no-untyped-def]
    requests = generate(workload, 60.0, seed=4)
    setup = RoutingSetup(engine=EngineSettings(kind, cache_blocks=500), seed=2, usage=True)
    outcomes = simulate(requests, LeastLoad(), setup)
    assert outcomes == simulate(requests, LeastLoad(), setup) and len(outcomes) == len(requests)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert (outcome.at_s, outcome.output_tokens) == (request.at_s, request.output_tokens)
        assert 0 < outcome.ttft_s <= outcome.whole_s and outcome.hit_tokens < outcome.tokens


def test_times_per_token_and_whole_answers_by_hand() -> None:
    def outcome(ttft_s: float, whole_s: float, tokens: int, server: int) -> RoutedOutcome:
        return RoutedOutcome(0.0, server, ttft_s, whole_s, 100, tokens, 0, 0, 0, 0)

    found = [outcome(1.0, 3.0, 11, 0), outcome(2.0, 2.0, 1, 0), outcome(1.0, 5.0, 21, 1)]
    metrics = measured(found, 4)
    assert metrics.token_s == pytest.approx(0.2) and metrics.whole_s == pytest.approx(10 / 3)
    assert metrics.used == 2 and metrics.failed == 0


# --- what is wrong with servers ---

TWO = RoutingSetup(servers=2, engine=EngineSettings(cache_blocks=50, token_s=0.0), cost=LINEAR, usage=True)


def every_second(count: int, ids: tuple[int, ...] = (1, 2)) -> list[TraceRequest]:
    return [asks(float(at), ids, 1024, output=1) for at in range(count)]


def test_a_hung_server_is_given_up_and_comes_back() -> None:
    setup = replace(TWO, faults=(Fault("hung", 1, 4.0, 8.0),), patience_s=5.0)
    outcomes = simulate(every_second(12), RoundRobin(), setup)
    assert [outcome.failed for outcome in outcomes] == [one.server == 1 and 4 <= one.at_s < 8 for one in outcomes]
    assert all(outcome.ttft_s == 5.0 for outcome in outcomes if outcome.failed)
    assert measured(outcomes, 2).failed == 2 and {outcome.server for outcome in outcomes} == {0, 1}


def test_a_slow_server_takes_longer() -> None:
    setup = replace(TWO, servers=1, faults=(Fault("slow", 0, 0.0, 1.5, factor=3.0),))
    outcomes = simulate([asks(2.0 * at, (at,), 600, 1) for at in range(3)], RandomChoice(), setup)
    assert [outcome.ttft_s for outcome in outcomes] == pytest.approx([1.8, 0.6, 0.6])


def test_an_emptied_cache_holds_nothing_and_one_that_caches_nothing_says_so() -> None:
    setup = replace(TWO, servers=1, faults=(Fault("emptied", 0, 2.5),))
    outcomes = simulate(every_second(5), RandomChoice(), setup)
    assert [outcome.hit_blocks for outcome in outcomes] == [0, 2, 2, 0, 2]
    setup = replace(TWO, servers=1, faults=(Fault("uncached", 0),))
    assert [outcome.hit_blocks for outcome in simulate(every_second(3), RandomChoice(), setup)] == [0, 0, 0]


class Corrected(RandomChoice):
    """What answers and reports say."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: list[int] = []
        self.reports: list[ReportedLoad] = []

    def corrected(self, request, server, now_s: float, cached_tokens: int) -> None:  # type: ignore[no-untyped-def]
        self.cached.append(cached_tokens)
        self.reports.append(server.reported)


def test_usage_is_true_but_of_a_liar() -> None:
    given = {}
    for kind in ("uncached", "lying"):
        scorer = Corrected()
        simulate(every_second(3), scorer, replace(TWO, servers=1, faults=(Fault(kind, 0),)))  # type: ignore[arg-type]
        given[kind] = scorer.cached
        assert all(report.running == report.waiting == 0 for report in scorer.reports) or kind != "lying"
    assert given == {"uncached": [0, 0, 0], "lying": [1023, 1023, 1023]}


def test_requests_come_to_each_router_and_state_is_exchanged_but_in_an_outage() -> None:
    class Exchange:
        def __init__(self) -> None:
            self.pickers, self.times = 0, list[tuple[float, bool]]()

        def begin(self, pickers) -> None:  # type: ignore[no-untyped-def]
            self.pickers = len(pickers)

        def exchange(self, now_s: float, up: bool) -> None:
            self.times.append((now_s, up))

    exchange, routers = Exchange(), [Corrected() for _ in range(3)]
    setup = replace(TWO, exchange_s=0.5, outage=(10.0, 20.0))
    simulate(every_second(60), routers[0], setup, others=[(router, None) for router in routers[1:]], exchange=exchange)
    assert exchange.pickers == 3 and all(len(router.cached) > 9 for router in routers)
    assert sum(len(router.cached) for router in routers) == 60
    assert {up for at_s, up in exchange.times if 10 <= at_s < 20} == {False}
    assert {up for at_s, up in exchange.times if not 10 <= at_s < 20} == {True}


def test_what_is_no_setup_is_refused() -> None:
    for bad in (lambda: EngineSettings("quick"), lambda: EngineSettings(step_tokens=0)):
        with pytest.raises(InvalidInput):
            bad()
    with pytest.raises(InvalidInput, match="from 0 to 1"):
        RoutingSetup(servers=2, faults=(Fault("hung", 2),))
