"""The controller of elastic pools: what it may never do, and what it does to a cluster whose demands are known."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skymemory.conductor.pools import (
    MOST_GROWTH,
    ROLES,
    TAIL,
    ElasticSettings,
    InstanceSample,
    PoolController,
    Role,
    RoleChange,
    other,
)
from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput

SLO = Slo(10.0, 0.1)
QUICK = ElasticSettings(smoothing_s=5.0, settle_s=5.0, drain_weight=0.5)


class Cluster:
    """Instances that share their pool's demand evenly, and drain for ``drain_s``. A demand is as it is read: without
    ``idle_tbt_s`` decode loads are the times themselves."""

    def __init__(self, prefill: int, decode: int, settings: ElasticSettings = QUICK, drain_s: float = 8.0) -> None:
        self.roles: dict[str, Role] = {f"p{at}": "prefill" for at in range(prefill)}
        self.roles |= {f"d{at}": "decode" for at in range(decode)}
        self.controller = PoolController(SLO, settings)
        self.draining: tuple[str, float] | None = None
        self.now_s, self.drain_s = 0.0, drain_s
        self.down: set[str] = set()
        self.changes: list[tuple[float, RoleChange]] = []

    def serving(self, role: Role) -> list[str]:
        closed = self.draining[0] if self.draining is not None else None
        return [name for name, its in self.roles.items() if its == role and name != closed and name not in self.down]

    def sample(self, name: str, demands: dict[Role, float]) -> InstanceSample:
        role = self.roles[name]
        if name in self.down:
            return InstanceSample(name, role, "down")
        if self.draining is not None and name == self.draining[0]:
            return InstanceSample(name, role, "draining")
        load = demands[role] / len(self.serving(role))
        if role == "prefill":  # a load below 1 is the share of the time in which it is busy
            if load > 1:
                return InstanceSample(name, role, queue_s=load * SLO.ttft_s)
            return InstanceSample(name, role, queue_s=0.1 * (int(self.now_s * load) - int((self.now_s - 1) * load)))
        return InstanceSample(name, role, tbt_s=load * SLO.tbt_s)

    def step(self, demands: dict[Role, float]) -> RoleChange | None:
        self.now_s += 1.0
        if self.draining is not None and self.now_s >= self.draining[1] and self.draining[0] not in self.down:
            name = self.draining[0]
            self.roles[name], self.draining = other(self.roles[name]), None
        change = self.controller.observe([self.sample(name, demands) for name in self.roles], self.now_s)
        if change is not None:
            self.changes.append((self.now_s, change))
            if change.role == self.roles[change.instance]:
                self.draining = None
            else:
                assert self.draining is None, "one at a time"
                self.draining = (change.instance, self.now_s + self.drain_s)
                assert self.serving(other(change.role)), "it keeps one"
        return change

    def run(self, seconds: int, prefill: float, decode: float) -> int:
        """Number of changes."""
        before = len(self.changes)
        for _ in range(seconds):
            self.step({"prefill": prefill, "decode": decode})
        return len(self.changes) - before

    def split(self) -> tuple[int, int]:
        return tuple(sum(its == role for its in self.roles.values()) for role in ROLES)  # type: ignore[return-value]


def test_an_instance_goes_to_the_pool_that_needs_it() -> None:
    cluster = Cluster(4, 4)
    cluster.run(300, 1.0, 4.8)
    assert cluster.split() == (2, 6), "five would have 0.96, six 0.8"
    ((at_s, first), *_) = cluster.changes
    assert (first.role, 5.0 <= at_s <= 8.0) == ("decode", True)
    assert first.reason.startswith("decode is at 1.20 of its objective; prefill would have a load of 0.3")


def test_a_pool_gives_nothing_that_it_needs_itself() -> None:
    """However much the other needs it: with three, decode would be at 1.25 of its objective."""
    cluster = Cluster(4, 4)
    assert cluster.run(300, 8.0, 3.0) == 0
    assert cluster.run(300, 8.0, 2.0) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_both_pools_are_treated_alike(swapped: bool) -> None:
    cluster = Cluster(4, 4)
    cluster.run(400, *((1.0, 6.2) if not swapped else (6.2, 1.0)))
    split = cluster.split()
    assert (split if not swapped else split[::-1]) == (2, 6), "seven would leave one with 1.0"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    prefill=st.integers(1, 5),
    decode=st.integers(1, 5),
    idle=st.sampled_from([0.0, 0.02, 0.05]),
    shared=st.floats(0.0, 1.0),
)
def test_a_pool_within_its_objective_never_gets_an_instance(
    seed: int, prefill: int, decode: int, idle: float, shared: float
) -> None:
    """However busy both are: whatever comes, each sample is within the objective that its pool is judged by."""
    quick = replace(QUICK, smoothing_s=2.0, idle_tbt_s=idle, shared_tbt_s=shared * idle)
    controller, dice = PoolController(SLO, quick), random.Random(seed)
    tbt_s = SLO.tbt_s * 0.84 if not idle else idle / (1 - 0.84 * (1 - idle / SLO.tbt_s))
    for second in range(60):
        queues = [dice.uniform(0.0, 0.84 * SLO.ttft_s / TAIL) for _ in range(prefill)]
        samples = [InstanceSample(f"p{at}", "prefill", queue_s=queue_s) for at, queue_s in enumerate(queues)]
        for at in range(decode):
            busy = dice.random() < 0.9
            rest = {"kv_share": dice.uniform(0.0, 0.84), "in_flight": dice.randrange(1, 20)} if busy else {}
            samples.append(InstanceSample(f"d{at}", "decode", tbt_s=dice.uniform(idle, tbt_s) * busy, **rest))
        assert controller.observe(samples, float(second)) is None
        assert max(map(controller.need, ROLES)) < quick.high


def test_a_busy_prefill_pool_gets_none_until_its_requests_are_about_to_be_late() -> None:
    """One that is busy all the time, beside two decode instances with hardly any work."""
    for queue_s, moves in ((0.25 * SLO.ttft_s, False), (0.3 * SLO.ttft_s, True)):
        controller = PoolController(SLO, QUICK)
        for second in range(100):
            samples = [InstanceSample("p0", "prefill", queue_s=queue_s + 0.2 * (second % 2) - 0.1)]
            samples += [InstanceSample(f"d{at}", "decode", tbt_s=0.01) for at in range(2)]
            if controller.observe(samples, float(second)) is not None:
                break
        assert (controller.under_way is not None) == moves
        assert controller.load("prefill") == pytest.approx(1.0)


def test_a_pool_does_not_give_what_makes_its_requests_late() -> None:
    """Two prefill instances, each busy 0.3 of the time: one has room for both. But with long requests it is late."""
    for length_s, moves in ((2.0, True), (8.0, False)):
        controller = PoolController(SLO, replace(QUICK, smoothing_s=1e6))
        for tick in range(2_000):
            queue_s = max(0.0, length_s - tick * 0.1 % (length_s / 0.3))
            samples = [InstanceSample(f"p{at}", "prefill", queue_s=queue_s) for at in range(2)]
            samples += [InstanceSample(f"d{at}", "decode", tbt_s=0.2, in_flight=9) for at in range(3)]
            if tick > 1_000 and controller.under_way is None:
                controller.observe(samples, 0.1 * tick)
            elif tick <= 1_000:
                controller._next_s = math.inf
                controller.observe(samples, 0.1 * tick)
                controller._next_s = -math.inf
        assert (controller.under_way is not None) == moves


def test_one_burst_moves_nothing_and_an_overload_does() -> None:
    """Of two to three instances: a queue of twice the objective that is worked off, and one that stays."""
    for split in ((1, 2), (1, 1)):
        for lasting in (False, True):
            cluster = Cluster(*split, replace(QUICK, smoothing_s=20.0))
            cluster.run(60, 0.3, 0.3)
            moved = sum(cluster.run(1, 2.0 if lasting or second < 2 else 0.3, 0.3) for second in range(60))
            assert bool(moved) == (lasting and split == (1, 2))


def test_requests_count_and_not_the_time_in_which_there_are_none() -> None:
    """A decode instance that is busy half of the time, with ten requests at twice their objective."""
    controller = PoolController(SLO, replace(QUICK, smoothing_s=1e6))
    for second in range(100):
        busy = second % 2
        one = InstanceSample("d0", "decode", tbt_s=2 * SLO.tbt_s * busy, in_flight=10 * busy)
        controller.observe([InstanceSample("p0", "prefill"), one], float(second))
    assert controller.need("decode") == pytest.approx(20 / 11, rel=0.02)
    assert controller.load("decode") == pytest.approx(1.0, rel=0.02)


def test_an_engine_that_shares_nothing_has_its_busy_share_as_load() -> None:
    """Oracle: one request after the other, Poisson arrivals: with a load of ρ a request takes 1 / (1 - ρ) as long."""
    idle_s, work = 0.02, 0.6
    controller = PoolController(SLO, replace(QUICK, smoothing_s=1e6, idle_tbt_s=idle_s, shared_tbt_s=0.0))
    dice = random.Random(1)
    for second in range(4_000):
        count = 0
        while dice.random() < work:
            count += 1
        one = InstanceSample("d0", "decode", tbt_s=idle_s * count, in_flight=count)
        controller.observe([InstanceSample("p0", "prefill"), one], float(second))
    # At the objective of five times the idle time it could be busy for four fifths.
    assert controller.load("decode") == pytest.approx(work / 0.8, rel=0.15)


def test_nothing_moves_while_objectives_are_met() -> None:
    assert Cluster(6, 2).run(500, 0.5, 1.6) == 0
    assert Cluster(2, 6).run(500, 0.1, 5.0) == 0


def test_nothing_moves_where_both_are_overloaded() -> None:
    assert Cluster(4, 4).run(500, 5.0, 8.0) == 0


@settings(max_examples=60)
@given(
    prefill=st.integers(1, 8),
    decode=st.integers(1, 8),
    demands=st.tuples(st.floats(0.0, 12.0), st.floats(0.0, 12.0)),
    high=st.floats(0.3, 1.2),
    low=st.floats(0.3, 1.5),
    margin=st.floats(0.01, 0.5),
)
@example(prefill=8, decode=8, demands=(8.1, 8.1), high=0.3, low=1.5, margin=0.1)
def test_a_constant_demand_leads_to_few_changes_in_one_direction(
    prefill: int, decode: int, demands: tuple[float, float], high: float, low: float, margin: float
) -> None:
    # Without smoothing every sample counts for itself; a busy share that is sampled would not be constant.
    quick = ElasticSettings(high=high, low=low, margin=margin, smoothing_s=0.0, settle_s=1.0, drain_weight=0.0)
    cluster = Cluster(prefill, decode, quick, drain_s=1.0)

    def sample(name: str, wanted: dict[Role, float]) -> InstanceSample:
        one = Cluster.sample(cluster, name, wanted)
        load = wanted[one.role] / max(1, len(cluster.serving(one.role)))
        if one.role == "prefill" and one.state == "serving":
            return replace(one, queue_s=load * SLO.ttft_s if load > 1 else 1e-9 * (load > 0))
        return one

    cluster.sample = sample  # type: ignore[method-assign]
    cluster.run(60, *demands)
    assert len(cluster.changes) < prefill + decode
    assert len({change.role for _, change in cluster.changes}) <= 1
    assert cluster.run(20, *demands) == 0
    assert min(cluster.split()) >= 1


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), prefill=st.integers(1, 5), decode=st.integers(1, 5))
def test_whatever_comes_each_pool_keeps_one_and_changes_are_apart(seed: int, prefill: int, decode: int) -> None:
    dice = random.Random(seed)
    cluster = Cluster(prefill, decode, drain_s=dice.choice([1.0, 10.0, 40.0]))
    demands: dict[Role, float] = {"prefill": 1.0, "decode": 1.0}
    ended_s = 0.0
    for _ in range(300):
        if dice.random() < 0.05:
            demands = {role: dice.uniform(0.0, 10.0) for role in ROLES}
        under_way = cluster.controller.under_way
        began = cluster.step(demands)  # asserts that a pool keeps one, and that none is under way
        if under_way is not None:
            assert began is None
            if cluster.controller.under_way is None:
                ended_s = cluster.now_s
        elif began is not None:
            assert cluster.now_s - ended_s >= QUICK.settle_s
        assert min(cluster.split()) >= 1


def test_the_next_change_waits_longer_after_a_long_drain() -> None:
    times = []
    for drain_s in (4.0, 40.0):
        cluster = Cluster(6, 2, drain_s=drain_s)
        cluster.run(300, 0.5, 6.0)
        (first_s, _), (second_s, _), *_ = cluster.changes
        times.append(second_s - first_s - drain_s)
    assert times == pytest.approx([5.0 + 2.0, 5.0 + 20.0], abs=1.5)


def test_the_one_that_drains_soonest_goes() -> None:
    controller = PoolController(SLO, replace(QUICK, smoothing_s=0.0, settle_s=0.0))
    decode = [InstanceSample("d0", "decode", tbt_s=0.2, in_flight=9)]
    queues = [InstanceSample(f"p{at}", "prefill", in_flight=count) for at, count in enumerate((3, 2, 4))]
    change = controller.observe([*queues, *decode], 0.0)
    assert change is not None and (change.instance, change.role) == ("p1", "decode")


def test_a_pool_that_lost_all_its_instances_gets_one() -> None:
    cluster = Cluster(1, 3)
    cluster.down = {"p0"}
    cluster.run(30, 0.0, 0.1)
    assert [(change.role, at_s >= QUICK.settle_s) for at_s, change in cluster.changes] == [("prefill", True)]
    assert "no prefill instance has served for" in cluster.changes[0][1].reason
    cluster = Cluster(1, 1)
    cluster.down = {"p0"}
    assert cluster.run(30, 0.0, 0.1) == 0, "the other pool keeps one, too"


def test_a_drain_that_does_not_end_is_called_off() -> None:
    cluster = Cluster(4, 2, replace(QUICK, most_drain_s=50.0), drain_s=1e9)
    cluster.run(60, 0.5, 3.0)
    (began_s, began), (ended_s, ended) = cluster.changes
    assert (began.instance, ended.role, ended_s - began_s) == (ended.instance, "prefill", 51.0)
    assert "has not been decode after 51 s" in ended.reason
    assert cluster.split() == (4, 2) and cluster.controller.under_way is None


def test_an_instance_that_dies_in_its_drain_is_waited_for_and_one_that_is_gone_is_not() -> None:
    cluster = Cluster(4, 2, drain_s=20.0)
    cluster.run(8, 0.5, 3.0)
    ((_, change),) = cluster.changes
    cluster.down = {change.instance}
    cluster.run(100, 0.5, 3.0)
    assert cluster.controller.under_way == change
    cluster.draining = None
    del cluster.roles[change.instance]
    cluster.run(1, 0.5, 3.0)
    assert cluster.controller.under_way is None
    assert cluster.run(70, 0.5, 3.0) == 1, "another one goes, after half of those 109 s"


def test_a_decode_load_is_proportional_to_the_tokens_a_second() -> None:
    """Oracle: batches of a machine whose step is ``idle + c·n``; one of two machines takes what both did."""
    idle_s, per_request_s = 0.045, 0.001
    slo, settings = Slo(10.0, 0.1), replace(QUICK, idle_tbt_s=idle_s, smoothing_s=0.0)

    def load(instances: int, tokens_per_s: float, room: float = 1e9) -> float:
        each = tokens_per_s / instances
        tbt_s = idle_s / (1 - each * per_request_s)  # n = each · tbt, and tbt = idle + c·n
        controller = PoolController(slo, settings)
        share = each * tbt_s / room
        samples = [InstanceSample(f"d{at}", "decode", tbt_s=tbt_s, kv_share=share) for at in range(instances)]
        controller.observe([InstanceSample("p0", "prefill"), *samples], 0.0)
        return controller.load("decode")

    assert load(1, 550.0) == pytest.approx(1.0), "a step of 0.1 s makes 55 / 0.1 tokens a second"
    assert load(2, 550.0) == pytest.approx(0.5)
    assert load(4, 550.0) == pytest.approx(0.25)
    # With room for ten requests it is full at 10 / 0.055 tokens a second.
    assert load(1, 10 / 0.055, room=10) == pytest.approx(1.0)
    assert load(2, 10 / 0.055, room=10) == pytest.approx(0.5)


def test_a_prefill_load_is_its_busy_share_and_beyond_that_its_queue() -> None:
    controller = PoolController(SLO, replace(QUICK, smoothing_s=1e6, settle_s=1e6))
    decode = InstanceSample("d0", "decode")
    for second in range(100):
        queue_s = 0.5 * (second % 4 == 0)
        controller.observe([InstanceSample("p0", "prefill", queue_s=queue_s), decode], float(second))
    assert controller.load("prefill") == pytest.approx(0.25, abs=0.02)
    controller = PoolController(SLO, replace(QUICK, smoothing_s=0.0))
    controller.observe([InstanceSample("p0", "prefill", queue_s=25.0), decode], 0.0)
    assert controller.load("prefill") == 2.5


def test_the_flow_that_one_more_instance_lets_through_is_counted() -> None:
    # decode: one instance, at its limit; two prefill instances, of which the other one would be at 0.8.
    controller = PoolController(SLO, replace(QUICK, smoothing_s=0.0, settle_s=0.0, low=0.9))
    prefill = [InstanceSample("p0", "prefill", queue_s=8e-9), InstanceSample("p1", "prefill")]
    assert controller.observe([*prefill, InstanceSample("d0", "decode", tbt_s=0.15)], 0.0) is None, "1.0 · 1.25 > 0.9"
    assert MOST_GROWTH == 1.25


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"high": 0.0}, "expected above 0"),
        ({"low": float("nan")}, "low is nan; expected 0 or more"),
        ({"margin": 0.0}, "margin is 0; expected above 0"),
        ({"settle_s": -1.0}, "settle_s is -1; expected 0 or more"),
        ({"most_drain_s": float("inf")}, "most_drain_s is inf"),
        ({"shared_tbt_s": float("nan")}, "shared_tbt_s is nan; expected 0 or more"),
        ({"idle_tbt_s": 0.1}, "expected below the objective between tokens, 0.1 s"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        PoolController(SLO, ElasticSettings(**changed))


def test_bad_samples_are_refused() -> None:
    with pytest.raises(InvalidInput, match="instance 'a': queue_s is nan; expected 0 or more"):
        InstanceSample("a", "prefill", queue_s=float("nan"))
    with pytest.raises(InvalidInput, match="role 'both' and state 'serving'; expected one of prefill, decode"):
        InstanceSample("a", "both")  # type: ignore[arg-type]
    controller, one = PoolController(SLO), InstanceSample("a", "prefill")
    with pytest.raises(InvalidInput, match="two instances of one name"):
        controller.observe([one, one], 0.0)
    controller.observe([one], 5.0)
    with pytest.raises(InvalidInput, match="at 4 s after one at 5 s"):
        controller.observe([one], 4.0)
