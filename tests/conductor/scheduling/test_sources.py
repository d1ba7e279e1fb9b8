"""Where KV is loaded from, and how busy the ways there are."""

from __future__ import annotations

from tests.conductor.scheduling.worlds import Busy, KnownHoldings, Quadratic, a_request, centric, fleet_of

from skymemory.conductor.cost_model import Medium
from skymemory.conductor.picker import Picker
from skymemory.conductor.scheduling.kvcache_centric import KvCacheCentric, KvCacheCentricSettings, LoadSources
from skymemory.conductor.scheduling.prefill import PlannedLinks, PrefixSource, deepest, undominated

NETWORK = Medium("network", 2.0)


def on_ways(held: dict[int, int], out_s: dict[int, float], in_s: dict[int, float]) -> KvCacheCentric:
    settings = KvCacheCentricSettings(cake=False)
    return KvCacheCentric(
        KnownHoldings(held), Quadratic(), 1.0, LoadSources(NETWORK, links=Busy(out_s, in_s)), settings
    )


def test_what_ways_are_busy_with_is_waited_for() -> None:
    """s2 lacks 80 tokens: 40 s to load, 20 to compute."""
    servers = list(fleet_of(3))
    for out_s, in_s, load_s, source in (
        ({}, {}, 40.0, "s0"),
        ({0: 7.0}, {2: 3.0}, 47.0, "s0"),
        ({0: 7.0}, {2: 9.0}, 49.0, "s0"),
        ({0: 30.0}, {}, 35.0, "s1"),  # with 70 of it from the other, and 30 to compute
    ):
        ranking = on_ways({0: 8, 1: 7}, out_s, in_s).rank(a_request(10), servers, 0.0)
        assert ranking.plan_at is not None
        plan = ranking.plan_at(2)
        assert (plan.source, plan.load_s) == (source, load_s)


def test_loads_that_were_planned_are_booked_on_both_ways() -> None:
    links = PlannedLinks()
    links.take(0, 1, 10.0, 5.0)
    links.take(-1, 2, 4.0, 5.0)
    assert links.waits_out_s((0, 1, 2), 7.0) == [8.0, 0.0, 0.0]
    assert links.waits_in_s((0, 1, 2), 7.0) == [0.0, 8.0, 2.0]
    links.take(0, 2, 1.0, 7.0)
    assert links.waits_out_s((0,), 7.0) == [9.0] and links.waits_in_s((2,), 7.0) == [3.0]
    links.forget(0)
    assert links.waits_out_s((0,), 7.0) == [0.0]


def test_a_server_that_left_owes_nothing() -> None:
    fleet = fleet_of(2)
    scorer = centric({0: 8}, network=NETWORK, fleet=fleet)
    picker = Picker(fleet, scorer)
    picker.routed(picker.pick(a_request(10), 0.0, {"s1"}), 0.0)
    assert scorer._links.in_s and scorer._links.out_s
    picker.remove("s0")
    picker.remove("s1")
    assert not scorer._links.in_s and not scorer._links.out_s


def test_the_deepest_that_is_free_and_busy_ones_deeper_still() -> None:
    servers = list(fleet_of(5))
    found = deepest(servers, [3, 9, 5, 7, 5], [0.0, 2.0, 0.0, 0.0, 0.0], 2)
    assert [(server.name, blocks, wait_s) for server, blocks, wait_s in found] == [("s3", 7, 0.0), ("s1", 9, 2.0)]
    assert deepest(servers, [2] * 5, [0.0] * 5, 2) == []


def test_sources_that_are_worse_in_every_way_are_left_out() -> None:
    near, far = PrefixSource("s0", 0, 5, 0.0, 0.1, 1.0), PrefixSource("sky", -1, 9, 0.0, 3.0, 2.0)
    worse = PrefixSource("s1", 1, 4, 0.0, 0.1, 1.0)
    equal = PrefixSource("s2", 2, 5, 0.0, 0.1, 1.0)
    assert undominated([worse, near, far, equal]) == [far, near]


def test_a_way_that_is_busy_is_not_worse_than_one_that_is_long() -> None:
    """Where the receiver is busy for 5 s itself, it waits for the first 5 s and for the second 9."""
    busy, long = PrefixSource("s0", 0, 5, 5.0, 0.0, 1.0), PrefixSource("sky", -1, 5, 0.0, 4.0, 1.0)
    assert undominated([busy, long]) == [long, busy]
    assert (busy.load_s(1, 5.0), long.load_s(1, 5.0)) == (6.0, 10.0)


def test_what_is_booked_is_the_request_that_was_sent_not_the_last_that_was_asked_about() -> None:
    fleet = fleet_of(2)
    scorer = centric({0: 8}, network=NETWORK, cake=False, fleet=fleet)
    picker = Picker(fleet, scorer)
    first = picker.pick(a_request(10), 0.0, {"s1"})
    picker.pick(a_request(50, seed=5), 0.0)
    picker.routed(first, 0.0)
    assert scorer.load_s(fleet.servers["s1"], 0.0) == 60.0
    assert scorer._links.in_s == {1: 40.0}


def test_speeds_are_learnt_from_prefills_that_waited_for_no_load() -> None:
    """A second per token; loads of 40 s would make 20 tokens look three times as slow."""
    fleet = fleet_of(2)
    settings = KvCacheCentricSettings(cake=False)
    scorer = KvCacheCentric(KnownHoldings({0: 8}), None, 1.0, LoadSources(NETWORK, fleet=fleet), settings)
    picker = Picker(fleet, scorer)
    now_s = 0.0
    for number in range(8):
        decision = picker.pick(a_request(4 + number, seed=number), now_s, {"s0"})
        picker.routed(decision, now_s)
        now_s += max(1, 40 + 10 * number - 80)
        picker.succeeded(decision, now_s)
    before = scorer.speeds.prefills_s([1], 100, [0])
    decision = picker.pick(a_request(10), now_s, {"s1"})
    assert decision.plan is not None and decision.plan.loaded_tokens == 80
    for _ in range(5):
        picker.routed(decision, now_s)
        now_s += 60.0
        picker.succeeded(decision, now_s)
    assert scorer.speeds.prefills_s([1], 100, [0]) == before
