"""The simulated engines: steps beside an obvious twin, shares by hand, room, and each fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA100, LLAMA_70B_8xA800, Machine
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.engines import MOST_RUNNING, STEP_TOKENS, EngineJob, SimulatedEngine
from skymemory_lab.sim.held_cache import HeldCache, Room
from skymemory_lab.sim.routing import Fault, RoutingSetup
from skymemory_lab.sim.step_engine import StepEngine
from skymemory_lab.sim.trace import TraceRequest

LINEAR = CostModel(
    replace(LLAMA_70B_8xA800.shape, layers=1, width=1, attention_flops=0.0, weight_flops=1.0),
    Machine("a token in a millisecond", 2_000.0, 1.0, 1.0),
    mfu=0.5,
)


class Told:
    """All that an engine tells."""

    def __init__(self) -> None:
        self.first_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.resident: set[int] = set()

    def on_first_token(self, engine: SimulatedEngine, job: EngineJob, now_s: float) -> None:
        assert job.request.session not in self.first_s
        self.first_s[job.request.session] = now_s

    def on_answer_end(self, engine: SimulatedEngine, job: EngineJob, now_s: float) -> None:
        assert job.request.session not in self.end_s
        self.end_s[job.request.session] = now_s

    def on_cache_change(
        self, engine: SimulatedEngine, chain: Sequence[int], cached_blocks: int, evicted: Sequence[int], now_s: float
    ) -> None:
        assert self.resident.issuperset(chain[:cached_blocks]) and self.resident.issuperset(evicted)
        assert not self.resident.intersection(chain[cached_blocks:])
        self.resident.difference_update(evicted)
        self.resident.update(chain)


def play(kind: type[Any], requests: Sequence[TraceRequest], setup: RoutingSetup) -> Told:
    told, clock = Told(), Clock()
    engine = kind(0, setup, clock.at, told)
    for request in requests:
        clock.run(request.at_s)
        engine.arrive(EngineJob(request, request.blocks()), request.at_s)
    clock.run()
    assert engine.waiting == engine.running == 0 and engine.kv_usage == 0
    assert engine.prefills.requests == len(requests) == len(told.end_s) == len(told.first_s)
    assert engine.prefills.tokens == sum(request.input_tokens for request in requests)
    return told


@dataclass(slots=True, eq=False)
class Running:
    request: TraceRequest
    room: Room
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
            budget -= chunk
        for fault in slow:
            seconds *= fault.factor if fault.holds(now_s) else 1.0
        now_s += seconds
        for one in [*answers, *(one for one in running if not one.made and one.at == one.request.input_tokens)]:
            one.made += 1
            if one.made == 1:
                cache.store(one.room)
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate_per_s", [0.3, 3.0])
@pytest.mark.parametrize("blocks", [100, 5_000])
@pytest.mark.parametrize("faults", [(), (Fault("slow", 0, 20.0, 45.0, 3.0), Fault("slow", 0, 40.0, 60.0, 0.5))])
def test_steps_taken_together_are_those_taken_one_by_one(
    seed: int, rate_per_s: float, blocks: int, faults: tuple[Fault, ...]
) -> None:
    cost = LLAMA_70B_8xA800 if seed % 2 else replace(LLAMA_70B_8xA100, cached_token_s=1e-6)
    setup = RoutingSetup(engine="chunk", cache_blocks=blocks, cost=cost, decode_more_s=1e-3, faults=faults)
    requests = drawn(seed, rate_per_s)
    told = play(StepEngine, requests, setup)
    first_s, end_s = naive_steps(requests, setup)
    assert told.first_s == pytest.approx(first_s, abs=1e-7) and told.end_s == pytest.approx(end_s, abs=1e-7)
