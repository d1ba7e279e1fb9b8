"""The circuit breaker and the choice of another gateway."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.circuit_breaker import CircuitBreaker
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.metrics import Counters
from skymemory.protocol.client.gateway import Gateway, first_responsive, nearest
from skymemory.protocol.client.liveness import _NO_SATELLITE_ANSWERS, witnesses
from skymemory.protocol.clock import FollowedClock, MoveClock, SkyMap
from skymemory.protocol.wire import Op

TORUS = Torus(5, 19)
some = st.lists(st.sampled_from(TORUS.satellites()), max_size=6, unique=True)


@given(some, some)
def test_the_best_living_candidate_is_chosen(candidates, suspects):
    chosen = first_responsive(candidates, suspects)
    living = [one for one in candidates if one not in suspects]
    assert chosen == (living or candidates or [None])[0]


def test_who_stands_in_is_near():
    centre = SatelliteId(2, 9)
    ordered = nearest(centre, TORUS)
    assert ordered[0] == centre and set(ordered[1:5]) == set(TORUS.neighbours(centre))
    assert [TORUS.hops(centre, one) for one in ordered] == sorted(TORUS.hops(centre, one) for one in ordered)


@given(st.sampled_from([*TORUS.satellites(), None]))
def test_witnesses_are_of_other_planes_than_the_silent(silent):
    asked = witnesses(SkyMap(TORUS, SatelliteId(2, 9)), SatelliteId(2, 9), silent)
    assert len({one.plane for one in asked}) == 3
    assert silent is None or silent.plane not in {one.plane for one in asked}
    assert witnesses(SkyMap(Torus(1, 1), SatelliteId(0, 0)), SatelliteId(0, 0), SatelliteId(0, 0))


@pytest.mark.parametrize("time_scale", [0.0, 1.0])
def test_a_gateway_that_was_silent_is_tried_again_after_a_while(time_scale):
    """Also where the satellites stand still, and nothing else would make it look again."""
    sky, clock = SkyMap(TORUS, SatelliteId(2, 9)), FollowedClock(MoveClock(time_scale=time_scale))
    gateway = Gateway("gateway", sky, Counters())
    assert not gateway.update(clock, 0.0) and gateway.current == sky.centre
    gateway.silent(SatelliteId(4, 4), 1.0)
    assert gateway.update(clock, 1.0) and gateway.current in TORUS.neighbours(sky.centre)
    assert not gateway.update(clock, 5.9) and gateway.current != sky.centre
    assert gateway.update(clock, 6.1) and gateway.current == sky.centre


def test_probes_come_at_growing_intervals():
    breaker, probes, now_s = CircuitBreaker(_NO_SATELLITE_ANSWERS), [], 0.0
    assert breaker.closed
    breaker.timed_out(0.0, probe_at_once=True)
    assert breaker.state == "open"
    while now_s < 10.0:
        if breaker.probe_due(now_s):
            probes.append(now_s)
        now_s += 0.01
    gaps = [b - a for a, b in pairwise(probes)]
    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0], abs=0.02) and breaker.state == "half-open"
    assert breaker.answered() and not breaker.answered()
    assert breaker.closed and breaker.next_probe_s == math.inf


def test_probes_of_a_breaker_that_opens_again_restart():
    breaker = CircuitBreaker(_NO_SATELLITE_ANSWERS)
    for opened_s in (0.0, 100.0):
        breaker.timed_out(opened_s, probe_at_once=True)
        probes = [opened_s + n / 100 for n in range(80) if breaker.probe_due(opened_s + n / 100)]
        assert [round(at_s - opened_s, 2) for at_s in probes] == pytest.approx([0.0, 0.1, 0.3, 0.7], abs=0.011)
        assert breaker.answered()


@pytest.mark.brief()
@pytest.mark.parametrize("access", ["los", "gateway"])
def test_with_the_constellation_gone_only_the_first_waits_and_it_heals(world, value_of, access):
    sky = world(access)
    value = value_of(200_000)
    _, info = sky.put("v", value)
    for satellite in TORUS.satellites():
        sky.sim.kill(satellite)
    first, _ = sky.get(info)
    assert first.report.failure == "timeout" and first.report.seconds < 1.0
    assert not sky.host.machine.breaker.closed
    sent = sky.sim.datagrams_sent
    for _ in range(100):
        assert sky.get(info)[0].report.seconds == 0.0
        stored, _ = sky.put("w", value)
        assert stored.report.failure == "unreachable" and stored.report.seconds == 0.0
        assert sky.ask(Op.HAS, b"", SatelliteId(0, 0)).report.seconds == 0.0
        sky.settle(0.1)
    assert sky.sim.datagrams_sent - sent < 400
    for satellite in TORUS.satellites():
        sky.sim.revive(satellite)
    for _ in range(3):
        sky.get(info)
        sky.settle(1.0)
    assert sky.host.machine.breaker.closed
    stored, info = sky.put("v", value)
    read, out = sky.get(info)
    assert stored.ok and read.ok and out == value


@pytest.mark.brief()
@pytest.mark.parametrize("access", ["los", "gateway"])
def test_a_part_that_is_gone_does_not_open_it(world, value_of, access):
    sky = world(access)
    _, wide = sky.put("wide", value_of(200_000))
    _, narrow = sky.put("narrow", value_of(3_000))
    (home,) = sky.spread(narrow)
    for plane in {home.plane, 0}:
        sky.sim.kill_plane(plane)
    for _ in range(6):
        for info in (wide, narrow):
            assert not sky.get(info)[0].ok
        sky.ask(Op.PING, b"", home)
        sky.settle(0.7)
    assert sky.host.machine.counters.get("breaker_opened") == 0
