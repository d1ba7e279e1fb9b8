"""Satellites that did not answer: no read waits for them twice, and all heals without a call."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client.liveness import MAX_SUSPECTS, Suspects
from skymemory.protocol.wire import Op
from skymemory.transport.faults import FaultInjector

HERE, THERE = SatelliteId(1, 2), SatelliteId(3, 4)


def test_a_suspect_is_asked_ever_more_rarely_until_it_is_heard():
    suspects, asked, now_s = Suspects(), [], 0.0
    suspects.add(HERE, 0.0)
    assert suspects.take_new() == [HERE] and suspects.take_new() == []
    while now_s < 60.0:
        if suspects.take_due(now_s):
            asked.append(now_s)
        assert suspects.next_s > now_s
        now_s += 0.01
    gaps = [b - a for a, b in pairwise(asked)]
    assert asked[0] == pytest.approx(0.25, abs=0.02) and min(gaps) > 0.24
    assert gaps == pytest.approx(sorted(gaps), abs=0.02) and 3.9 < max(gaps) < 4.1
    assert all(gap < 0.26 + a / 4 for a, gap in zip(asked, gaps, strict=False))
    suspects.remove(HERE)
    assert HERE not in suspects and suspects.next_s == math.inf and not suspects.take_due(1e9)


def test_when_things_change_all_are_asked_at_once_and_there_is_a_most():
    suspects = Suspects()
    suspects.add(HERE, 0.0)
    suspects.add(THERE, 50.0)
    suspects.take_due(100.0)
    suspects.probe_all(101.0)
    assert suspects.take_due(101.0) == [HERE, THERE]
    for slot in range(MAX_SUSPECTS):
        suspects.add(SatelliteId(9, slot), 102.0)
    assert len(suspects) == MAX_SUSPECTS and HERE not in suspects


def test_when_the_constellation_is_back_all_suspects_are_asked_at_once(world, value_of):
    """After a minute of silence each would else be asked every four seconds only."""
    sky = world()
    _, info = sky.put("v", value_of(200_000))
    for satellite in sky.torus.satellites():
        sky.sim.kill(satellite)
    assert not sky.get(info)[0].ok
    sky.settle(60.0)
    suspects = sky.host.machine._peers.suspects
    assert not sky.host.machine.breaker.closed and len(suspects) >= 5
    for satellite in sky.torus.satellites():
        sky.sim.revive(satellite)
    while not sky.host.machine.breaker.closed:
        sky.sim.step(math.inf)
    sky.settle(0.1)
    assert not len(suspects)


@pytest.mark.brief("los")
@pytest.mark.parametrize("access", ["los", "gateway"])
def test_with_a_plane_of_the_box_dead_only_the_first_read_waits(world, value_of, access):
    """Reads of a value on all the box, every 0.1 s for 20 s; before, every second one of them waited for 0.8 s."""
    sky = world(access)
    value = value_of(200_000)
    _, info = sky.put("v", value)
    sky.sim.kill_plane(1)
    first, _ = sky.get(info)
    assert not first.ok and first.report.seconds < 1.0
    waited = []
    for _ in range(200):
        sky.settle(0.1)
        read, _ = sky.get(info)
        assert not read.ok
        waited.append(read.report.seconds)
    assert max(waited) < 0.01 if access == "los" else max(waited) < 0.1, "a round trip to who had its chunks before"
    assert sky.host.machine.counters.get("breaker_opened") == 0
    sky.sim.revive_plane(1)
    sky.settle(4.5)
    stored, info = sky.put("v", value)
    read, out = sky.get(info)
    assert stored.ok and read.ok and out == value, "without a call in between"
    assert not sky.host.machine.probing


def test_the_rest_of_a_dead_plane_is_known_before_it_is_needed(world, value_of):
    sky = world()
    _, info = sky.put("v", value_of(200_000))
    sky.sim.kill_plane(1)
    sky.get(info)
    sky.settle(12.0)
    suspects = sky.host.machine._peers.suspects
    assert len(suspects) == 19 and all(SatelliteId(1, slot) in suspects for slot in range(19))
    for slots in range(1, 6):  # the box comes to satellites of the plane that nothing has ever been asked of
        moved = sky.sky.servers_at(info.strategy, info.servers, info.set_moves, (slots, 0))
        for satellite in moved:
            if satellite.plane == 1:
                begun_s = sky.now_s
                finished = sky.host.run([sky.host.machine.ask(Op.LIST, b"", satellite, sky.now_s)])
                assert not next(iter(finished.values())).ok and sky.now_s == begun_s


def test_a_satellite_that_only_lost_packets_is_trusted_again_within_half_a_second(world, value_of):
    sky = world()
    value = value_of(200_000)
    _, info = sky.put("v", value)
    (home, *_) = sky.holders(info)[0]
    sky.sim.cut(("ground", 7), home)
    assert not sky.get(info)[0].ok
    sky.sim.mend(("ground", 7), home)
    sky.settle(0.5)
    read, out = sky.get(info)
    assert read.ok and out == value


@pytest.mark.brief()
@pytest.mark.parametrize("access", ["los", "gateway"])
def test_the_breaker_closes_without_a_call(world, value_of, access):
    sky = world(access)
    value = value_of(200_000)
    _, info = sky.put("v", value)
    for satellite in sky.torus.satellites():
        sky.sim.kill(satellite)
    assert not sky.get(info)[0].ok and not sky.host.machine.breaker.closed
    sky.settle(4.0)
    sent = sky.sim.datagrams_sent
    sky.settle(60.0)
    assert 60 < sky.sim.datagrams_sent - sent <= 31 * 4, "three witnesses, and the gateway, every two seconds"
    for satellite in sky.torus.satellites():
        sky.sim.revive(satellite)
    sky.settle(5.0)
    assert sky.host.machine.breaker.closed and not sky.host.machine.probing
    stored, info = sky.put("v", value)
    read, out = sky.get(info)
    assert stored.ok and read.ok and out == value


def test_an_operation_under_way_stops_waiting_for_whom_another_has_found_silent(world, value_of):
    """The second read begins 0.5 s after the first, and ends a moment after it instead of 0.5 s later."""
    sky = world()
    value = value_of(200_000)
    _, info = sky.put("v", value)
    _, other = sky.put("w", value)
    sky.sim.kill(sky.holders(info)[0][0])
    machine = sky.host.machine
    first = machine.get(info, memoryview(bytearray(len(value))), sky.now_s)
    sky.settle(0.5)
    second = machine.get(other, memoryview(bytearray(len(value))), sky.now_s)
    finished = sky.host.run([first, second])
    assert finished[first].report.failure == "timeout" and finished[second].report.failure == "unreachable"
    assert finished[second].report.seconds < 0.45
    assert machine.breaker.closed


def test_satellites_that_answer_late_are_found_alive_and_reads_go_on(world, value_of):
    """Every answer takes longer than a silent satellite is waited for, as where hosts get too little processor: what
    comes late says that its sender lives, and how long to wait for it.
    """
    sky = world(give_up_s=0.8)
    _, info = sky.put("v", value_of(200_000))
    assert sky.get(info)[0].ok
    sky.sim._delay_s = lambda sender, receiver: 0.5
    outcomes = []
    for _ in range(20):
        outcomes.append(sky.get(info)[0].ok)
        sky.settle(0.4)
    assert outcomes[5:] == [True] * 15, outcomes


def test_a_question_asked_once_is_waited_for_and_not_repeated(world):
    """It is lost, while its satellite answers all else: that alone was a reason to send it again."""
    sky = world(give_up_s=0.8)
    satellite = sky.sky.centre
    assert sky.ask(Op.PING, b"", satellite).ok
    sky.sim._faults = FaultInjector(loss=1.0)
    number = sky.host.machine.ask(Op.PING, b"", satellite, sky.now_s, once=True)
    sky.settle(0.001)
    sky.sim._faults = None
    for _ in range(10):
        assert sky.ask(Op.PING, b"", satellite).ok
        sky.settle(0.1)
    answer = sky.host.run([number])[number]
    assert not answer.ok and answer.report.requests == 1 and answer.report.failure == "timeout"
