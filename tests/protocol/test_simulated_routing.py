"""Satellites notice what is dead and send round it, over virtual time: no notice is given to them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.protocol.conftest import World
from tests.protocol.datagrams import receive_datagram
from tests.protocol.test_link_state import hops_around

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.satellite.routing import Declaration, LinksBody
from skymemory.protocol.wire import Address, Op, SkyHeader, build_packet
from skymemory.transport.faults import FaultInjector, FaultRates, seeded_faults

TORUS = Torus(5, 19)
CENTRE = SatelliteId(2, 9)


def ping(sky: World, there: SatelliteId) -> bool:
    return sky.ask(Op.PING, b"", there).ok


def test_nothing_is_sent_while_nothing_is_forwarded(world):
    sky = world()
    for satellite in TORUS.satellites():
        assert ping(sky, satellite)
    sky.settle(100.0)
    assert sky.sim.datagrams_sent == 2 * TORUS.size


def test_one_dead_satellite_on_the_way(world):
    sky = world("gateway")
    there = SatelliteId(2, 12)
    sky.sim.kill(SatelliteId(2, 10))
    answer = sky.ask(Op.PING, b"", there)
    assert answer.ok and answer.report.seconds < 0.7
    answer = sky.ask(Op.PING, b"", there)
    assert answer.ok and answer.report.seconds == pytest.approx(2 * sky.link_s * (1 + 5))


@pytest.mark.brief()
@given(st.sets(st.sampled_from([s for s in TORUS.satellites() if s != CENTRE]), max_size=45), st.randoms())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_if_there_is_a_way_packets_find_it(dead, random):
    sky = World("gateway")
    for satellite in dead:
        sky.sim.kill(satellite)
    living = [s for s in TORUS.satellites() if s not in dead]
    there = random.choice(living)
    hops = hops_around(TORUS, CENTRE, there, dead)
    for _ in range(12):  # each try may come to dead satellites not met yet
        answer = sky.ask(Op.PING, b"", there)
        if answer.ok and hops is not None and answer.report.seconds < 2 * sky.link_s * (1 + hops) + 1e-6:
            break
        sky.settle(1.0)
    if hops is None:
        assert not answer.ok
    else:
        assert answer.ok and answer.report.seconds <= 2 * sky.link_s * (1 + hops + 4)
    assert sky.counted("packets_forwarded") < 20_000


@pytest.mark.brief()
def test_a_dead_plane_is_passed_the_other_way_round(world):
    sky = world("gateway")
    sky.sim.kill_plane(3)
    there = SatelliteId(4, 9)  # two planes south, three planes north
    assert [ping(sky, there) for _ in range(3)][-1]
    answer = sky.ask(Op.PING, b"", there)
    assert answer.ok and answer.report.seconds == pytest.approx(2 * sky.link_s * (1 + 3))
    sky.settle(1.0)
    assert sky.ask(Op.PING, b"", SatelliteId(3, 9)).report.failure == "unreachable"


@pytest.mark.slow
@pytest.mark.seeded
def test_the_revived_are_found_at_once_and_the_way_is_short_again(world):
    sky = world("gateway")
    sky.sim.kill_plane(3)
    there = SatelliteId(4, 9)
    for _ in range(4):
        ping(sky, there)
        sky.settle(0.5)
    sky.sim.revive_plane(3)
    sky.settle(0.2)
    assert ping(sky, SatelliteId(3, 9))
    answer = sky.ask(Op.PING, b"", there)
    assert answer.ok and answer.report.seconds == pytest.approx(2 * sky.link_s * (1 + 2))
    assert all(machine.neighbours.links.clear for machine in sky.sim.satellites.values())


@pytest.mark.brief()
def test_a_link_that_flaps(world):
    sky = world("gateway")
    there = SatelliteId(2, 10)
    for _ in range(4):
        sky.sim.cut(CENTRE, there)
        ping(sky, there)
        sky.settle(0.5)
        answer = sky.ask(Op.PING, b"", there)
        assert answer.ok and answer.report.seconds == pytest.approx(2 * sky.link_s * (1 + 3))
        sky.sim.mend(CENTRE, there)
        sky.settle(20.0)
        answer = sky.ask(Op.PING, b"", there)
        assert answer.ok and answer.report.seconds == pytest.approx(2 * sky.link_s * 2)


def test_a_lossy_link_is_a_slow_link_and_wrong_bytes_there_are_none(world, value_of):
    sky = world("gateway")
    for neighbour in TORUS.neighbours(CENTRE):
        sky.sim.spoil(CENTRE, neighbour, FaultInjector(loss=0.1, corrupt=0.02, seed=neighbour.slot))
    value = value_of(500_000)
    stored, info = sky.put("v", value)
    assert stored.ok
    for _ in range(5):
        read, out = sky.get(info)
        assert read.ok and out == value
    for neighbour in TORUS.neighbours(CENTRE):
        sky.sim.spoil(CENTRE, neighbour, None)


@pytest.mark.brief()
def test_what_is_known_survives_a_partition_that_heals(world):
    """Slots 5 and 14 cut off: two halves that learn different things, then meet."""
    sky = world("gateway")
    walls = [SatelliteId(plane, slot) for plane in range(5) for slot in (5, 14)]
    for wall in walls:
        sky.sim.kill(wall)
    other = SatelliteId(2, 0)
    assert not ping(sky, other)
    sky.settle(2.0)
    assert sky.ask(Op.PING, b"", other).report.failure in ("unreachable", "timeout")
    for wall in walls:
        sky.sim.revive(wall)
    sky.settle(0.5)
    assert ping(sky, other)


def test_pushed_moves_are_learnt_from_the_neighbours(world):
    sky = world()
    sky.sim.kill(SatelliteId(2, 9))
    sky.sim.kill_plane(0)
    living = [s for s in TORUS.satellites() if s not in sky.sim.dead]
    sky.host.run(sky.begin_advance(3, 1, living))
    sky.sim.revive(SatelliteId(2, 9))
    sky.sim.revive_plane(0)
    sky.settle(1.0)
    assert {machine.moves for machine in sky.sim.satellites.values()} == {(3, 1)}
    sky.host.run(sky.begin_advance(-2, 0))
    sky.sim.kill_plane(4)
    sky.sim.revive_plane(4)
    sky.settle(1.0)
    assert {machine.moves for machine in sky.sim.satellites.values()} == {(-2, 0)}


def test_links_from_the_ground_or_in_anothers_name_are_not_believed(world):
    sky = world()
    machine = sky.sim.satellites[CENTRE]
    body = LinksBody(True, (9, 9), 10**6, [Declaration(SatelliteId(0, 0), 0xF, 1)]).pack()
    for claimed, link in ((Address(2, 9, 0xFF), ("ground", 7)), (Address(1, 9), SatelliteId(2, 8))):
        packet = build_packet(SkyHeader(Op.LINKS, Address(*CENTRE), claimed, 0, 0), body, 0, 0.0)
        before = machine.counters.get("packets_malformed")
        receive_datagram(machine, packet, link, 0.0)
        assert machine.counters.get("packets_malformed") == before + 1
        assert machine.moves == (0, 0) and machine.neighbours.links.clear


@pytest.mark.parametrize("made_ms", [10**6, 1 << 62, (1 << 64) - 1])
def test_what_is_made_up_of_our_future_does_not_make_us_unbelievable(world, made_ms):
    """A declaration in our name is outdone only if others can believe it, and then ours."""
    sky = world("gateway")
    west, east = SatelliteId(2, 8), SatelliteId(2, 10)
    body = LinksBody(False, (0, 0), 0, [Declaration(CENTRE, 0xF, made_ms)]).pack()
    packet = build_packet(SkyHeader(Op.LINKS, Address(*CENTRE), Address(*west), 0, 0), body, 0, 0.0)
    receive_datagram(sky.sim.satellites[CENTRE], packet, west, 0.0)
    sky.settle(1.0)
    sky.sim.cut(CENTRE, east)
    ping(sky, east)
    sky.settle(1.0)
    assert not sky.sim.satellites[SatelliteId(0, 0)].neighbours.links.is_up(CENTRE, east)


@pytest.mark.slow
@pytest.mark.parametrize("access", ["los", "gateway"])
def test_ten_minutes_of_faults_by_seed(world, value_of, access):
    """Satellites, planes and links fail and come back; what is read is right or an honest miss, and it ends well."""
    sky = world(access, memory_bytes=1 << 20)
    rates = FaultRates(satellite_every_s=4.0, plane_every_s=40.0, link_every_s=10.0, lasts_s=15.0)
    events = seeded_faults(TORUS, rates, 600.0, seed=5)
    assert events == seeded_faults(TORUS, rates, 600.0, seed=5) != seeded_faults(TORUS, rates, 600.0, seed=6)
    assert {bool(event.link) for event in events} == {True, False}
    sky.sim.follow(events)
    hits = tries = 0
    for number in range(60):
        value = value_of(40_000, number)
        stored, info = sky.put("v", value, strategy="rotation_hop")
        sky.settle(5.0)
        read, out = sky.get(info)
        tries += stored.ok
        hits += read.ok
        assert not read.ok or out == value
        assert read.ok or read.report.failure in ("missing", "timeout", "unreachable", "other version")
    assert 0 < hits <= tries < 60
    sky.sim.settle(700.0)
    assert not sky.sim.dead
    stored, info = sky.put("v", value_of(40_000))
    assert stored.ok and sky.get(info)[0].ok
