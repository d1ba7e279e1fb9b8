"""What a forwarder changes, and that a packet arrives sound wherever it goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory import native
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.satellite.routing import Router
from skymemory.protocol.wire import Address, Op, SkyHeader, Status, build_packet, parse_packet

TORUS = Torus(7, 9)
satellites = st.builds(SatelliteId, st.integers(0, 6), st.integers(0, 8))


def ping(destination: Address, limit: int = 64) -> bytes:
    header = SkyHeader(Op.PING, destination, Address(0, 0, 0xFF), 7, 1, hop_limit=limit)
    return build_packet(header, b"", 0, 0.0)


@given(here=satellites, there=satellites, mode=st.sampled_from(["greedy", "alternate"]))
def test_a_packet_arrives_in_the_least_hops_and_still_sound(here, there, mode):
    packet, at, source = ping(Address(*there), TORUS.hops(here, there)), here, ("ground", 7)
    hops = 0
    while at != there:
        batch, link = Router(at, TORUS, mode).forward(memoryview(packet), len(packet), Address(*there), source)
        assert link in TORUS.neighbours(at)
        changed = [i for i, (a, b) in enumerate(zip(packet, batch.headers, strict=True)) if a != b]
        assert changed == [28, 29]
        packet, at, source = bytes(batch.headers), link, at
        hops += 1
    assert hops == TORUS.hops(here, there)
    header = parse_packet(packet).header
    assert (header.hop_limit, header.hop_count) == (0, hops)
    assert native.verify_segments(packet, len(packet)) == b"\0"


def test_the_end_of_the_way_is_said():
    router = Router(SatelliteId(0, 0), TORUS, "greedy")
    far, off = Address(3, 3), Address(7, 0)
    assert router.forward(memoryview(ping(far, 0)), 52, far, ("ground", 7)) is Status.HOP_LIMIT
    assert router.forward(memoryview(ping(off)), 52, off, ("ground", 7)) is Status.NO_ROUTE
    ground = Address(0, 0, 0xFF)
    assert router.forward(memoryview(ping(ground)), 52, ground, SatelliteId(0, 1)) is Status.NO_ROUTE
    router.remember(7, "beam")
    batch, link = router.forward(memoryview(ping(ground, 0)), 52, ground, SatelliteId(0, 1))
    assert link == "beam" and bytes(batch.headers) == ping(ground, 0)


def test_a_run_is_forwarded_as_one_and_every_packet_counted():
    far = Address(3, 3)
    run = b"".join(ping(far, limit) for limit in (9, 5, 64))
    batch, _ = Router(SatelliteId(0, 0), TORUS, "greedy").forward(memoryview(run), 52, far, ("ground", 7))
    headers = [parse_packet(packet).header for packet in batch.datagrams()]
    assert [(header.hop_limit, header.hop_count) for header in headers] == [(8, 1), (4, 1), (63, 1)]


def test_known_ground_hosts_are_bounded_and_the_latest_stay():
    router = Router(SatelliteId(0, 0), TORUS, "greedy")
    for ground in range(5000):
        router.remember(ground, ground)
        router.remember(1, "first")
    assert len(router._ground_links) == 4096 and router._ground_links[1] == "first" and 0 not in router._ground_links
    assert router.heard_last(2) == [1, 4999]


@pytest.mark.parametrize(
    ("packets", "one"),
    [
        ([ping(Address(1, 1))] * 3, True),
        ([ping(Address(1, 1)), ping(Address(1, 2))], False),
        ([ping(Address(1, 1)), ping(Address(1, 1))[:51]], False),
        ([ping(Address(1, 1)), b"\x18"], False),
    ],
)
def test_runs_of_one_journey(packets, one):
    assert native.same_journey(memoryview(b"".join(packets)), len(packets[0])) is one
