"""The ranking and the fits behind it: compiled and twin, to the last digit, over random fleets and histories."""

from __future__ import annotations

import math
import random
import struct
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conductor.strategies.fleets import a_fleet
from tests.native.conftest import IMPLEMENTATIONS

from skymemory.conductor.picker import ReportedLoad, Server
from skymemory.native.twin import backend
from skymemory.native.twin.ttft import BENDS, FIGURES, PRICE, Price

NAN = math.nan


class World:
    """All that a ranking looks at, of one implementation."""

    def __init__(self, impl: ModuleType, min_tokens: int = 0, min_ratio: float = 0.0, limit: float = 2.2) -> None:
        self.table = impl.PrefixTable(40)
        self.queues = impl.PrefillQueues(0.1)
        self.guard = impl.ShareGuard(limit, 60.0, 4, 1.0)
        self.under_way = impl.UnderWay(30)
        self.price = impl.DelayPrice(1.5)
        self.ranker = impl.TtftRanker(self.queues, self.guard, self.under_way, min_tokens, min_ratio)
        self.heard: list[list[str]] = []

    def rank(
        self,
        servers: Any,
        chain: Any,
        tokens: int,
        now_s: float,
        curves: Any,
        held: Any = None,
        prices: Any = b"",
        answer_tokens: float = 4.0,
    ) -> Any:
        rate = self.price.rate(len(servers), now_s)
        table = self.table if held is None else held
        terms = (table, chain, tokens, 16, servers, now_s, rate, curves, prices, answer_tokens, self.hear)
        return self.ranker.rank(*terms)

    def hear(self, servers: list[Server]) -> None:
        self.heard.append([server.name for server in servers])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), servers=st.sampled_from([1, 2, 5, 70]))
def test_compiled_and_twin_rank_alike(seed: int, servers: int) -> None:
    dice = random.Random(seed)
    fleet = list(a_fleet(servers))
    terms = dice.choice([(0, 0.0), (100, 0.0), (0, 0.5)])
    limit = dice.choice([1.2, 4.0])
    worlds = [World(module, *terms, limit) for module in IMPLEMENTATIONS]
    chains = [np.array([dice.getrandbits(64) for _ in range(dice.randrange(30))], dtype=np.uint64) for _ in range(4)]
    curves = array("d", [0.02, 1e-4, 0.0])
    now_s, open_now, prices = 0.0, [], b""
    for _ in range(25):
        now_s += dice.choice([0.0, 0.05, 1.0])
        old, fresh = dice.choice(chains), [dice.getrandbits(64) for _ in range(dice.randrange(4))]
        chain = np.concatenate([old[: dice.randrange(len(old) + 1)], np.array(fresh, dtype=np.uint64)])
        tokens = 16 * len(chain) + dice.randrange(16)
        asked = fleet if dice.random() < 0.7 else dice.sample(fleet, dice.randint(1, servers))
        held = None if dice.random() < 0.8 else [dice.randrange(len(chain) + 1) for _ in asked]
        answer_tokens = dice.choice([0.0, 4.0, 900.0])
        found = [world.rank(asked, chain, tokens, now_s, curves, held, prices, answer_tokens) for world in worlds]
        assert all(one == found[0] for one in found)
        for world in worlds[1:]:
            assert world.heard == worlds[0].heard
        server = asked[found[0][0][0]]
        wait_s, work_s, *_ = FIGURES.unpack_from(found[0][4], FIGURES.size * found[0][0][0])
        sent = []
        for world in worlds:
            ticket = world.queues.add(server.slot, work_s, now_s, unseen=wait_s > 1.0)
            sent.append((world, ticket, world.under_way.add(server.slot, chain)))
            world.guard.sent(server.slot, now_s)
            world.price.sent(work_s, now_s)
        open_now.append((server.slot, chain, sent))
        if dice.random() < 0.6:
            slot, done, ended = open_now.pop(dice.randrange(len(open_now)))
            for world, ticket, under_way in ended:
                world.queues.remove(slot, ticket, now_s)
                world.under_way.drop(under_way)
                world.table.learn(slot, done)
        if dice.random() < 0.3:
            dice.choice(fleet).reported = ReportedLoad(now_s - dice.random(), dice.randrange(4))
        if dice.random() < 0.3:
            slot = dice.randrange(servers)
            curves.extend([NAN] * max(0, 3 * slot + 6 - len(curves)))
            curves[3 * slot + 3 : 3 * slot + 6] = array("d", [dice.random(), 10 ** dice.uniform(-6, -2), 1e-5])
        if dice.random() < 0.5:
            rows = [
                PRICE.pack(*(dice.choice([0.0, dice.random()]) for _ in range(4)), dice.random(), 10.0 * dice.random())
                for _ in range(dice.randrange(servers + 2))
            ]
            prices = b"".join(rows)
        if dice.random() < 0.1:
            slot = dice.randrange(servers)
            for world in worlds:
                for part in (world.table, world.queues, world.guard, world.under_way, world.ranker):
                    part.forget(slot)


def test_a_report_is_applied_once_and_before_the_curves_are_read(impl: ModuleType) -> None:
    fleet, curves, chain = list(a_fleet(2)), array("d", [0.0, 1e-4, 0.0]), np.arange(9, dtype=np.uint64)

    class Learning(World):
        def hear(self, servers: list[Server]) -> None:
            super().hear(servers)
            curves[1] = 1e-3

    world = Learning(impl)
    fleet[1].reported = ReportedLoad(0.0)
    figures = world.rank(fleet, chain, 1000, 1.0, curves)[4]
    assert FIGURES.unpack_from(figures)[1] == 1.0 and world.heard == [["s1"]]
    world.rank(fleet, chain, 1000, 1.0, curves)
    assert world.heard == [["s1"]]
    world.ranker.forget(1)
    fleet[0].reported = ReportedLoad(0.0)
    world.rank(fleet, chain, 1000, 1.0, curves)
    assert world.heard == [["s1"], ["s0", "s1"]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"servers": []},
        {"tokens": -1},
        {"block_tokens": NAN},
        {"block_tokens": math.inf},
        {"block_tokens": -1.0},
        {"held": [1]},
        {"held": [1, -1]},
        {"prices": b"1"},
        {"prices": PRICE.pack(0.0, 0.0, 0.0, 0.0, 1.1, 0.0)},
        {"prices": PRICE.pack(0.0, 0.0, 0.0, 0.0, NAN, 0.0)},
    ],
)
def test_what_cannot_be_ranked_is_refused(impl: ModuleType, wrong: dict[str, Any]) -> None:
    world = World(impl)
    given = {"held": world.table, "blocks": b"", "tokens": 5, "block_tokens": 16.0, "servers": list(a_fleet(2))}
    given |= {"now_s": 0.0, "rate": 0.0, "curves": array("d", [0.0, 0.0, 0.0]), "prices": b""} | wrong
    with pytest.raises(ValueError):
        world.ranker.rank(*given.values(), 1.0, world.hear)


def test_a_price_is_what_its_parts_say(impl: ModuleType) -> None:
    """A prompt of 160 tokens, 5 of whose blocks are believed at the second server, of which it has three quarters."""
    world, fleet, chain = World(impl), list(a_fleet(2)), np.arange(10, dtype=np.uint64)
    world.table.learn(1, chain[:5])
    second = Price(token_s=0.03, stall=2.0, evict_s=0.001, crowd_s=0.8, trust=0.75, due_s=7.0)
    prices = PRICE.pack(*Price()) + PRICE.pack(*second)
    curves = array("d", [0.0, 0.01, 0.0])
    best, _, _, scores, figures = world.rank(fleet, chain, 160, 10.0, curves, None, prices, 20.0)
    (wait_s, work_s, price_s, matched, held) = FIGURES.unpack_from(figures, FIGURES.size)
    assert (matched, held) == (60, 5) and wait_s == 3.0 and work_s == pytest.approx(1.0)
    assert price_s == pytest.approx(20 * 0.03 + 1.0 * 2.0 + 100 * 0.001 + 100 / 160 * 0.8)
    assert struct.unpack("=2d", scores) == pytest.approx((-1.6, -(3.0 + 1.0) - price_s))
    assert best == (0,)


@pytest.mark.parametrize(
    "bad",
    [
        lambda impl: impl.DelayPrice(-1.0),
        lambda impl: impl.DelayPrice(1.0, 0.0),
        lambda impl: impl.DelayPrice(1.0, 60.0, 1.0),
        lambda impl: impl.DelayPrice().rate(0, 0.0),
        lambda impl: impl.fit_prefills([]),
        lambda impl: impl.fit_prefills([(1.0, 0.0, 1.0)], 0.3),
        lambda impl: impl.fit_prefills([(1.0, 1.0, 1.0)]),
        lambda impl: impl.fit_prefills([(5.0, 1.0, NAN)]),
        lambda impl: impl.fit_whole([(5.0, 1.0, 1.0, 1.0)] * 2),
        lambda impl: impl.fit_whole([(5.0, 1.0, NAN, 1.0)] * 3),
    ],
)
def test_what_makes_no_sense_is_refused(impl: ModuleType, bad: Callable[[ModuleType], object]) -> None:
    with pytest.raises(ValueError):
        bad(impl)


def test_the_fits_agree_and_the_better_bend_is_found(fast: ModuleType) -> None:
    dice = random.Random(11)
    found = set()
    for number in range(150):
        bend, per_token_s = BENDS[number % len(BENDS)], 10 ** dice.uniform(-5, -3)
        points, whole = [], []
        for _ in range(dice.choice([4, 7, 16, 32, 33, 64, 100])):
            tokens = float(int(math.exp(dice.gauss(8.0, 1.2))) + 1)
            held = float(min(tokens - 1, int(tokens * dice.choice([0.0, 0.0, 0.5]))))
            seconds = per_token_s * (tokens - held) * (1 + bend * (tokens + held)) * dice.gauss(1.0, 0.1)
            seconds = 10.0 if dice.random() < 0.02 else seconds
            output = float(dice.choice([0, 20, 300]))
            points.append((tokens, held, seconds))
            whole.append((tokens, held, output, seconds + 0.01 * output))
        line = backend.fit_prefills(points, bend)
        assert fast.fit_prefills(points, bend) == line
        assert fast.fit_whole(whole) == backend.fit_whole(whole)
        assert line[1] > 0 and line[0] >= 0
        found.add(line[2])
    assert found == set(BENDS)


def test_whole_answers_of_one_shape_do_not_separate_prefill_and_answer(impl: ModuleType) -> None:
    assert impl.fit_whole([(100.0, 0.0, 50.0, 1.0)] * 20) is None
    assert impl.fit_whole([(100.0 + at, 0.0, 0.0, 0.5 + 0.005 * at) for at in range(20)])[1] == pytest.approx(0.005)
