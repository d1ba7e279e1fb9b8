"""The default strategy decides the same in one native call, part by part, and by the twin, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conductor.strategies.fleets import a_fleet, a_request

from skymemory import native
from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.picker import NoServer, Picker, PrefillTotals, ReportedLoad
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.events import BlocksStored, EventBatch
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Decision, Prompt, Request
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.native.twin import backend

PARTS = ("PrefillQueues", "ShareGuard", "TtftRanker", "UnderWay")


def a_scorer(dice: random.Random, parts: Any) -> LeastTtft:
    """One of many kinds: with a cost or without, fed by events or not, with thresholds and guards."""
    options: dict[str, Any] = {"delay_weight": dice.choice([0.0, 1.5]), "guard_limit": dice.choice([1.5, 4.0])}
    options |= {"guard_requests": dice.choice([2, 20]), "guard_mean": dice.choice([0.0, 5.0])}
    options |= dice.choice([{}, {}, {"min_match_tokens": 200}, {"min_match_ratio": 0.3}])
    kind = dice.choice(["", "", "events", "head", "cost"])
    with pytest.MonkeyPatch.context() as patch:
        for name in PARTS:
            patch.setattr(native, name, getattr(parts, name))
        if kind == "events":
            return LeastTtft(PreciseIndex(16, table=parts.HolderTable), LeastTtftSettings(cpu_load_s=1e-3, **options))
        table = ApproximatePrefixIndex(dice.choice([30, 4000]), 9 if kind == "head" else None, table=parts.PrefixTable)
        return LeastTtft(table, LeastTtftSettings(**options), LLAMA_70B_8xA800 if kind == "cost" else None)


def a_prompt(dice: random.Random, before: list[Prompt]) -> Prompt:
    if before and dice.random() < 0.3:
        return dice.choice(before)
    old = dice.choice(before).blocks if before else np.empty(0, np.uint64)
    fresh = [dice.getrandbits(64) for _ in range(dice.choice([0, 1, 3, 30]))]
    blocks = np.concatenate([old[: dice.randrange(len(old) + 1)], np.array(fresh, dtype=np.uint64)])
    before.append(Prompt(blocks, blocks, 16, 16 * len(blocks) + dice.randrange(16)))
    return before[-1]


def decisions(seed: int, servers: int, prepare: Callable[[random.Random], LeastTtft], steps: int = 150) -> list[Any]:
    """What is decided in a history that the seed makes: failures, retries, restarts, reports, adapters, whole answers,
    and time that goes by between what is decided and what is booked.
    """
    dice = random.Random(seed)
    scorer, fleet = prepare(dice), a_fleet(servers)
    picker, said = Picker(fleet, scorer, seed), list[Any]()
    speed = {server.name: 10 ** dice.uniform(-5, -3) for server in fleet}
    numbers, prompts, under_way = dict[int, int](), list[Prompt](), list[Decision]()
    index, now_s, sums = scorer.index, 0.0, (0.0, 0.0, 0.0)
    if isinstance(index, PreciseIndex):
        for server in fleet:
            index.follow(server.slot, "m")
    for _ in range(steps):
        now_s += dice.expovariate(20.0)
        what, server = dice.random(), dice.choice(list(fleet))
        if what < 0.45 or not under_way:
            asked = Request(
                a_prompt(dice, prompts), adapter=dice.choice(["", "", "", "a"]), streams=dice.random() < 0.7
            )
            among = None if dice.random() < 0.8 else {one.name for one in fleet if dice.random() < 0.6}
            try:
                decision = picker.pick(asked, now_s, among)
            except NoServer:
                continue
            said.append((decision.score, decision.estimated_ttft_s, decision.estimated_compute_s, decision.as_json()))
            if under_way and dice.random() < 0.1:
                picker.failed(under_way.pop(0), now_s)
            for _ in range(dice.choice([0, 1, 1, 1, 1, 1, 2])):
                picker.routed(decision, now_s + dice.choice([0.0, 0.02]))
                under_way.append(decision)
        elif what < 0.75:
            decision = under_way.pop(dice.choice([0, 0, -1]))
            tokens = decision.request.prompt.tokens
            if dice.random() < 0.1:
                picker.failed(decision, now_s)
                continue
            first_s = now_s + speed[decision.server] * tokens
            picker.succeeded(decision, first_s, dice.choice([None, None, 0, tokens]))
            picker.on_request_end(
                decision, first_s + dice.random(), dice.choice([None, tokens // 2]), dice.choice([None, 5, 90])
            )
        elif what < 0.93:
            adapters, most = dice.choice([frozenset(), frozenset("a")]), dice.choice([None, 2])
            sums = sums[0] + 1, sums[1] + 1000, sums[2] + 1000 * speed[server.name]
            totals = PrefillTotals(sums[0], sums[1], sums[1], sums[2]) if dice.random() < 0.5 else None
            waiting, blocks = dice.randrange(4), dice.choice([None, 300])
            server.reported = ReportedLoad(now_s - dice.random(), waiting, 3, 0.5, blocks, 16, adapters, most, totals)
            if isinstance(index, PreciseIndex) and prompts and len(chain := dice.choice(prompts).blocks):
                number = numbers[server.slot] = numbers.get(server.slot, -1) + 1
                stored = BlocksStored(
                    chain.tolist(), None, list(range(16 * len(chain))), 16, medium=dice.choice("GC") + "PU"
                )
                index.apply(server.slot, EventBatch(number, [stored]))
        elif what < 0.97:
            server.healthy, server.draining = dice.random() < 0.8, dice.random() < 0.1
        elif not isinstance(index, PreciseIndex):
            scorer.forget(server)
    return said


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), servers=st.sampled_from([1, 2, 4, 8, 70]))
def test_the_twin_decides_the_same(seed: int, servers: int) -> None:
    sums = [decisions(seed, servers, lambda dice, parts=parts: a_scorer(dice, parts)) for parts in (native, backend)]
    assert sums[0] == sums[1] and sums[0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), servers=st.sampled_from([1, 2, 4, 8]))
def test_part_by_part_decides_the_same(seed: int, servers: int) -> None:
    """As for estimates that err; all is looked up again when it is booked."""

    def by_parts(dice: random.Random) -> LeastTtft:
        scorer = a_scorer(dice, native)
        scorer._overridden = True
        return scorer

    assert decisions(seed, servers, by_parts) == decisions(seed, servers, lambda dice: a_scorer(dice, native))


def test_what_was_matched_is_not_matched_again_when_it_is_booked() -> None:
    class Counting(ApproximatePrefixIndex):
        asked = 0

        def match(self, *args: Any) -> list[int]:
            self.asked += 1
            return super().match(*args)

    index = Counting()
    picker = Picker(a_fleet(4), LeastTtft(index), seed=1)
    for number in range(20):
        decision = picker.pick(a_request((1, 10), (number, 2)), float(number))
        picker.routed(decision, number + 0.5)
        picker.succeeded(decision, number + 0.6)
        picker.on_request_end(decision, number + 0.7)
    assert index.asked == 0 and decision.matched_tokens == 160
    asked = picker.pick(a_request((1, 10), (3, 2)), 30.0)
    picker.scorer.forget(picker.fleet.servers[asked.server])
    picker.routed(asked, 30.0)
    assert index.asked == 1, "what was found then is no longer so"


@pytest.mark.parametrize("change", ["a failure", "the index", "the speed"])
def test_what_has_changed_since_it_was_ranked_is_booked_as_it_is_now(change: str) -> None:
    scorer = LeastTtft(ApproximatePrefixIndex())
    picker = Picker(a_fleet(1), scorer, seed=1)
    first = picker.pick(a_request((1, 50)), 0.0)
    picker.routed(first, 0.0)
    if change != "a failure":
        picker.succeeded(first, 0.0)
    asked = picker.pick(a_request((1, 50), (2, 2)), 0.0)
    assert asked.matched_tokens == 800 and asked.estimated_compute_s == pytest.approx(0.02 + 1e-4 * 32)
    expected = 0.02 + 1e-4 * 832
    if change == "a failure":
        picker.failed(first, 0.0)
    elif change == "the index":
        scorer.index.forget(0)
    else:
        for tokens in (100, 200, 300, 400):
            scorer.speeds.observe(0, tokens, 0, 0.01 * tokens)
        expected = 0.01 * 32
    picker.routed(asked, 0.0)
    (wait_s,) = scorer.waits_s(asked.request, list(picker.fleet), 0.0)
    assert wait_s == pytest.approx(expected)
