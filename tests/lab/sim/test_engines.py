"""The simulated engines: steps beside an obvious twin, shares by hand, room, and each fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA100, LLAMA_70B_8xA800, Machine
from skymemory.conductor.picker import Ranking, ReportedLoad, Scorer, Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.simple import LeastLoad, RandomChoice
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.held_cache import HeldCache, HeldRoom
from skymemory_lab.sim.engines import MOST_RUNNING, STEP_TOKENS, SharedEngine, SimulatedEngine, SimulatedJob
from skymemory_lab.sim.routing import RoutingSetup, ServerFault, measured, simulate
from skymemory_lab.sim.step_engine import StepEngine
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import AGENTS, CONVERSATIONS, TENANTS, generate

LINEAR = CostModel(
    replace(LLAMA_70B_8xA800.shape, layers=1, width=1, attention_flops=0.0, weight_flops=1.0),
    Machine("a token in a millisecond", 2_000.0, 1.0, 1.0),
    mfu=0.5,
)


class Log:
    """Events of an engine."""

    def __init__(self) -> None:
        self.first_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.resident: set[int] = set()

    def on_first_token(self, engine: SimulatedEngine, job: SimulatedJob, now_s: float) -> None:
        assert job.request.session not in self.first_s
        self.first_s[job.request.session] = now_s

    def on_answer_end(self, engine: SimulatedEngine, job: SimulatedJob, now_s: float) -> None:
        assert job.request.session not in self.end_s
        self.end_s[job.request.session] = now_s

    def on_cache_change(
        self, engine: SimulatedEngine, chain: Sequence[int], cached_blocks: int, evicted: Sequence[int], now_s: float
    ) -> None:
        assert self.resident.issuperset(chain[:cached_blocks]) and self.resident.issuperset(evicted)
        assert not self.resident.intersection(chain[cached_blocks:])
        self.resident.difference_update(evicted)
        self.resident.update(chain)


def play(kind: type[Any], requests: Sequence[TraceRequest], setup: RoutingSetup) -> Log:
    log, clock = Log(), Clock()
    engine = kind(0, setup, clock.at, log)
    for request in requests:
        clock.run(request.at_s)
        engine.arrive(SimulatedJob(request, request.blocks()), request.at_s)
    clock.run()
    assert engine.waiting == engine.running == 0 and engine.kv_usage == 0
    assert engine.prefills.requests == len(requests) == len(log.end_s) == len(log.first_s)
    assert engine.prefills.tokens == sum(request.input_tokens for request in requests)
    return log


@dataclass(slots=True, eq=False)
class Running:
    request: TraceRequest
    room: HeldRoom
    hit: int
    at: int
    made: int = 0


def naive_steps(requests: Sequence[TraceRequest], setup: RoutingSetup) -> tuple[dict[int, float], dict[int, float]]:
    """The obvious twin: one step after the other, each with all that has arrived before it began."""
    waiting, running = list(requests), list[Running]()
    cache, now_s = HeldCache(setup.cache_blocks), 0.0
    first_s, end_s = dict[int, float](), dict[int, float]()
    slow = setup.faults_of(0)
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0].at_s)
        answers = [one for one in running if one.made]
        budget, seconds = STEP_TOKENS - len(answers), 0.0
        if answers:
            seconds = setup.decode_token_s + (len(answers) - 1) * setup.decode_more_s
        prompts = [one for one in running if not one.made]
        while budget:
            if prompts:
                one = prompts.pop(0)
            elif waiting and waiting[0].at_s <= now_s and len(running) < MOST_RUNNING:
                request = waiting[0]
                room = cache.hold(request.blocks(), -(-(request.input_tokens + request.output_tokens) // 512))
                if room is None:
                    break
                waiting.pop(0)
                hit = min(room.hit_blocks * 512, request.input_tokens - 1)
                one = Running(request, room, hit, hit)
                running.append(one)
            else:
                break
            chunk = min(budget, one.request.input_tokens - one.at)
            before_s = setup.cost.prefill_s(one.at, one.hit) if one.at > one.hit else 0.0
            seconds += setup.cost.prefill_s(one.at + chunk, one.hit) - before_s
            one.at += chunk
            cache.store(one.room, one.at // 512)
            budget -= chunk
        for fault in slow:
            seconds *= fault.factor if fault.holds(now_s) else 1.0
        now_s += seconds
        for one in [*answers, *(one for one in running if not one.made and one.at == one.request.input_tokens)]:
            one.made += 1
            if one.made == 1:
                first_s[one.request.session] = now_s
            if one.made >= one.request.output_tokens:
                end_s[one.request.session] = now_s
                cache.release(one.room)
                running.remove(one)
    return first_s, end_s


def drawn(seed: int, rate_per_s: float) -> list[TraceRequest]:
    dice, at_s, requests = random.Random(seed), 0.0, []
    for number in range(150):
        at_s += dice.expovariate(rate_per_s)
        tokens = round(min(30_000, dice.lognormvariate(7.5, 1.3))) + 1
        stem, shared = dice.randrange(5), dice.randrange(20)
        ids = [100 * stem + at if at < shared else 1_000 * (number + 1) + at for at in range(-(-tokens // 512))]
        output = dice.choice((0, 1, 2, 30, round(dice.expovariate(1 / 200))))
        requests.append(TraceRequest(at_s, tokens, output, tuple(ids), number))
    return requests


SLOW_TWICE = (ServerFault("slow", 0, 20.0, 45.0, 3.0), ServerFault("slow", 0, 40.0, 60.0, 0.5))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate_per_s", [0.3, 3.0])
@pytest.mark.parametrize("blocks", [100, 5_000])
@pytest.mark.parametrize(
    "faults", [(), (ServerFault("slow", 0, 20.0, 45.0, 3.0), ServerFault("slow", 0, 40.0, 60.0, 0.5))]
)
def test_steps_taken_together_are_those_taken_one_by_one(
    seed: int, rate_per_s: float, blocks: int, faults: tuple[ServerFault, ...]
) -> None:
    cost = LLAMA_70B_8xA800 if seed % 2 else replace(LLAMA_70B_8xA100, cached_token_s=1e-6)
    setup = RoutingSetup(engine="chunk", cache_blocks=blocks, cost=cost, decode_more_s=1e-3, faults=faults)
    requests = drawn(seed, rate_per_s)
    log = play(StepEngine, requests, setup)
    first_s, end_s = naive_steps(requests, setup)
    assert log.first_s == pytest.approx(first_s, abs=1e-7) and log.end_s == pytest.approx(end_s, abs=1e-7)


def test_a_step_by_hand() -> None:
    """Prompts of 3,000 and 100 tokens at a millisecond each: the second gets the rest of the second step."""
    requests = [TraceRequest(0.0, 3_000, 3, (1, 2, 3, 4, 5, 6), 0), TraceRequest(0.1, 100, 1, (9,), 1)]
    setup = RoutingSetup(engine="chunk", cost=LINEAR, decode_token_s=0.5, decode_more_s=0.25)
    log = play(StepEngine, requests, setup)
    assert log.first_s == pytest.approx({0: 3.1, 1: 3.1}) and log.end_s == pytest.approx({0: 4.1, 1: 3.1})


def test_an_answer_slows_and_is_slowed() -> None:
    """An answer takes its token of the budget in each step with the other's prompt."""
    requests = [TraceRequest(0.0, 500, 100, (1,), 0), TraceRequest(0.6, 2_500, 2, (2, 3, 4, 5, 6), 1)]
    setup = RoutingSetup(engine="chunk", cost=LINEAR, decode_token_s=0.5, decode_more_s=0.25)
    log = play(StepEngine, requests, setup)
    # The first step of the answer ends at 1.0; then steps with 2,047 and 453 tokens of the prompt.
    assert log.first_s == pytest.approx({0: 0.5, 1: 1.0 + 2.5 + 2 * 0.5})
    assert log.end_s == pytest.approx({0: 0.5 + 99 * 0.5 + 2.5 + 0.25, 1: 4.5 + 0.75})


def test_shares_by_hand() -> None:
    """Two prompts of 1,000 tokens, half a second apart: each at half speed while both are there."""
    requests = [TraceRequest(0.0, 1_000, 10, (1, 2), 0), TraceRequest(0.5, 1_000, 10, (3, 4), 1)]
    log = play(SharedEngine, requests, RoutingSetup(engine="shared", cost=LINEAR, decode_token_s=0.1))
    assert log.first_s == pytest.approx({0: 1.5, 1: 2.0}) and log.end_s == pytest.approx({0: 2.5, 1: 3.0})
    slow = RoutingSetup(
        engine="shared", cost=LINEAR, decode_token_s=0.1, faults=(ServerFault("slow", 0, 1.0, 2.0, 2.0),)
    )
    # By 1.0 s the first has had 0.75 s of its second, by 2.0 s all; the second has its half by then, too.
    assert play(SharedEngine, requests, slow).first_s == pytest.approx({0: 2.0, 1: 2.5})


@pytest.mark.parametrize("kind", [StepEngine, SharedEngine])
def test_requests_wait_for_room(kind: type[Any]) -> None:
    """A cache of eight blocks holds one request of five, not two; a request larger than it gets all of it."""
    requests = [
        TraceRequest(0.0, 2_048, 100, (1, 2, 3, 4), 0),
        TraceRequest(0.1, 2_048, 100, (5, 6, 7, 8), 1),
        TraceRequest(0.2, 51_200, 100, tuple(range(10, 110)), 2),
    ]
    setup = RoutingSetup(engine="chunk", cost=LINEAR, cache_blocks=8, decode_token_s=0.1)
    log = play(kind, requests, setup)
    assert log.end_s[0] < log.first_s[1] < log.end_s[1] < log.first_s[2]
    assert log.first_s[1] == pytest.approx(log.end_s[0] + 2.048) and len(log.resident) <= 8


def test_what_running_requests_hold_stays() -> None:
    cache = HeldCache(4)
    first = cache.hold((1, 2), 3)
    assert first is not None and (first.hit_blocks, cache.held_blocks) == (0, 3)
    assert cache.hold((5,), 2) is None and cache.leading((1, 2)) == 0
    cache.store(first, 1)
    assert cache.leading((1, 2, 3)) == 1 and cache.held_blocks == 3
    cache.store(first, 2)
    assert cache.leading((1, 2, 3)) == 2
    second = cache.hold((1, 2), 2)
    assert second is not None and second.hit_blocks == 2
    assert cache.held_blocks == 3  # both hold the same two
    cache.release(first)
    assert cache.held_blocks == 2
    cache.clear()
    assert cache.leading((1, 2)) == 2
    cache.release(second)
    third = cache.hold((8,), 3)
    assert third is not None and third.evicted == [2], "the root is evicted last"
    cache.clear()
    assert cache.leading((1,)) == 0


@pytest.mark.parametrize("engine", ["fifo", "chunk", "shared"])
@pytest.mark.parametrize("workload", [CONVERSATIONS, TENANTS, AGENTS])
def test_every_request_ends_once_and_equal_seeds_give_equal_runs(engine: Any, workload: Any) -> None:
    requests = generate(workload, 40.0, seed=4)
    setup = RoutingSetup(engine=engine, cache_blocks=600, seed=3, usage=True, whole=0.3)
    outcomes = simulate(requests, LeastLoad(), setup)
    assert outcomes == simulate(requests, LeastLoad(), setup)
    assert [(one.at_s, one.tokens, one.output_tokens) for one in outcomes] == [
        (one.at_s, one.input_tokens, one.output_tokens) for one in requests
    ]
    least_s = setup.decode_token_s
    for one in outcomes:
        assert not one.failed and 0 < one.ttft_s <= one.answer_s
        assert one.token_s is None or one.token_s >= least_s * (1 - 1e-9)


class Learning(Scorer):
    """Least load, which keeps reports, usage and failures."""

    name = "learning"

    def __init__(self) -> None:
        self.reports: list[tuple[float, list[ReportedLoad | None]]] = []
        self.first: list[int | None] = []
        self.corrections: list[int] = []
        self.failures: list[tuple[float, int]] = []
        self.ends: list[float] = []

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        self.reports.append((now_s, [server.reported for server in servers]))
        return Ranking([-float(server.in_flight) for server in servers])

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        self.first.append(cached_tokens)

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        self.corrections.append(cached_tokens)

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        self.ends.append(now_s)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self.failures.append((now_s, server.slot))


def in_turn(count: int, every_s: float, ids: tuple[int, ...] = (1, 2), output: int = 10) -> list[TraceRequest]:
    return [TraceRequest(every_s * at, 512 * len(ids), output, ids, at) for at in range(count)]


ALONE = RoutingSetup(servers=1, cost=LINEAR, cache_blocks=50, decode_token_s=0.1, usage=True)


@pytest.mark.parametrize("engine", ["fifo", "chunk", "shared"])
@pytest.mark.parametrize("whole", [0.0, 1.0])
def test_usage_is_reported_at_the_end_of_an_answer(engine: Any, whole: float) -> None:
    learning = Learning()
    simulate(in_turn(3, 10.0), learning, replace(ALONE, engine=engine, whole=whole))
    log, silent = [0, 1_023, 1_023], [None] * 3
    assert (learning.first, learning.corrections) == ((log, []) if whole else (silent, log))


@pytest.mark.parametrize("engine", ["fifo", "chunk", "shared"])
@pytest.mark.parametrize("whole", [0.0, 1.0])
def test_a_hung_server_s_requests_end_by_timeout(engine: Any, whole: float) -> None:
    """Answers under way are cut off; so is what is sent until the server works again."""
    hung = ServerFault("hung", 0, from_s=12.0, until_s=25.0)
    learning = Learning()
    requests = in_turn(7, 5.0, output=30)  # the third, at 10 s, is being answered at 12 s
    setup = replace(ALONE, engine=engine, whole=whole, faults=(hung,), timeout_s=60.0)
    outcomes = simulate(requests, learning, setup)
    assert [one.failed for one in outcomes] == [False, False, True, True, True, False, False]
    assert [one.at_s + one.answer_s for one in outcomes if one.failed] == pytest.approx([72.0, 75.0, 80.0])
    streams = not whole
    assert [at_s for at_s, _ in learning.failures] == pytest.approx([75.0, 80.0] if streams else [72.0, 75.0, 80.0])
    assert len(learning.ends) == 4 + streams
    metrics = measured(outcomes, 1)
    assert metrics.failed == 3 and metrics.p99_s == pytest.approx(60.0)
    at = {now_s: report for now_s, (report,) in learning.reports}
    # No report comes from a hung server, so the last is that of 12 s at most.
    assert at[20.0] is not None and at[20.0].at_s <= 12.0 and at[30.0] is not None and at[30.0].at_s == 30.0


@pytest.mark.parametrize("engine", ["fifo", "chunk", "shared"])
def test_what_an_emptied_cache_held_is_computed_again(engine: Any) -> None:
    outcomes = simulate(
        in_turn(4, 10.0), RandomChoice(), replace(ALONE, engine=engine, faults=(ServerFault("emptied", 0, 15),))
    )
    assert [one.hit_blocks for one in outcomes] == [0, 2, 0, 2]


@pytest.mark.parametrize("engine", ["fifo", "chunk", "shared"])
def test_a_liar_reports_hits_and_no_load(engine: Any) -> None:
    for kind, usage in (("uncached", 0), ("liar", 1_024)):
        learning = Learning()
        setup = replace(ALONE, engine=engine, faults=(ServerFault(kind, 0, 5.0, 35.0),))  # type: ignore[arg-type]
        outcomes = simulate(in_turn(5, 10.0, output=95), learning, setup)
        # From 5 s on nothing is cached, though blocks of the first request are still there.
        assert [one.hit_blocks for one in outcomes] == [0, 0, 0, 0, 2]
        assert learning.corrections[1:3] == [usage, usage] and learning.corrections[4] == 1_023
        (_, (report,)) = learning.reports[3]
        assert report is not None and (report.running == 0) == (kind == "liar")


@pytest.mark.parametrize("engine", ["fifo", "chunk", "shared"])
def test_a_slow_server_takes_its_factor(engine: Any) -> None:
    setup = replace(ALONE, engine=engine, faults=(ServerFault("slow", 0, 95.0, 150.0, 3.0),))
    quick, slow = (simulate(in_turn(2, 100.0), RandomChoice(), setup)[at] for at in (0, 1))
    assert slow.ttft_s == pytest.approx(0.003) and quick.ttft_s == pytest.approx(1.024)
    assert slow.answer_s - slow.ttft_s == pytest.approx(3 * (quick.answer_s - quick.ttft_s))


@pytest.mark.parametrize("engine", ["fifo", "chunk", "shared"])
def test_reports_have_totals_of_requests_that_ended(engine: Any) -> None:
    learning = Learning()
    simulate(in_turn(3, 4.0, output=20), learning, replace(ALONE, engine=engine))
    (_, (before,)), (_, (after,)) = learning.reports[1:]
    assert before is not None and before.prefills is not None and before.prefills.requests == 1
    assert before.prefills.seconds == pytest.approx(1.024) and before.prefills.computed == 1_024
    assert after is not None and after.prefills is not None and after.prefills.computed == 1_025
    assert (after.waiting, after.running, after.kv_usage) == (0, 0, 0.0)
