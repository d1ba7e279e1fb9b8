"""Questions to one satellite over virtual time: HAS, EVICT, LIST, PING, a single chunk; and journeys that end."""

from __future__ import annotations

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol import messages
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import Address, Op, SegmentBatch, SkyHeader, Status, build_packet

CHUNK = 6144


def test_miss_has_list_evict_ping(world, value_of):
    sky = world()
    centre = sky.sky.centre
    _, info = sky.put("v", value_of(100_000))
    absent = type(info)(bytes(32), *(getattr(info, field) for field in info.__slots__[1:]))
    missed, _ = sky.get(absent)
    assert not missed.ok and missed.report.failure == "missing"
    assert missed.report.seconds < 10 * sky.link_s

    answer = sky.ask(Op.HAS, messages.pack_keys([info.key, bytes(32)]), centre)
    here, nothing = messages.unpack_presences(answer.body)
    assert nothing is None
    assert (here.chunks, here.value_bytes, here.value_crc) == (info.chunks, info.value_bytes, info.value_crc)
    assert here.held == sky.spread(info)[centre] and here.index == here.tag.server == 0
    assert (here.tag.servers, here.tag.strategy) == (info.servers, info.strategy)

    listed = messages.unpack_listed(sky.ask(Op.LIST, messages.pack_list(bytes(32), 100), centre).body)
    assert listed == [(info.key, here)]
    housekeeping = messages.unpack_housekeeping(sky.ask(Op.PING, b"", centre).body)
    assert housekeeping["chunks_held"] == here.held and housekeeping["memory_limit_bytes"] == 64 << 20
    assert tuple(housekeeping) == messages.HOUSEKEEPING_FIELDS

    freed = messages.unpack_count(sky.ask(Op.EVICT, messages.pack_keys([info.key]), centre).body)
    assert freed == here.held and sky.spread(info)[centre] == 0
    gone, _ = sky.get(info)
    assert gone.report.failure == "missing"
    assert messages.unpack_count(sky.ask(Op.EVICT, messages.pack_keys([info.key]), centre).body) == 0


def test_one_chunk_can_be_asked_for_by_itself(world, value_of):
    sky = world()
    value = value_of(100_000)
    _, info = sky.put("v", value)
    (home,) = sky.homes(info, (0, 0))[3]
    answer = sky.ask(Op.GET, Selection.of(info.key, [3]).pack(), home)
    assert answer.ok and answer.body[72:] == value[3 * CHUNK : 4 * CHUNK]
    assert sky.ask(Op.GET, Selection.of(info.key, [4]).pack(), home).report.failure == "missing"


def test_a_listing_goes_on_page_by_page(world, value_of):
    sky = world()
    infos = [sky.put(f"v{i}", value_of(10, i), servers=1)[1] for i in range(200)]
    found, after = [], bytes(32)
    while page := messages.unpack_listed(sky.ask(Op.LIST, messages.pack_list(after, 1000), sky.sky.centre).body):
        found += [key for key, _ in page]
        after = page[-1][0]
    assert found == sorted(info.key for info in infos)


def test_a_gateway_asks_by_its_beam_from_the_first_question_on(world):
    sky = world("gateway")
    sky.host.machine.ask(Op.PING, b"", SatelliteId(0, 0), 0.0)
    ((_, beam),) = sky.host.machine.datagrams_to_send(0.0)
    assert beam == sky.sky.centre


@pytest.mark.parametrize(("limit", "status"), [(0, Status.HOP_LIMIT), (3, Status.HOP_LIMIT), (4, None)])
def test_the_hop_limit_ends_a_journey(world, limit, status):
    sky = world("gateway")
    centre, far = sky.sky.centre, SatelliteId(sky.sky.centre.plane, sky.sky.centre.slot + 4)
    header = SkyHeader(
        Op.PING, Address(*far), Address(*centre, 0xFF), ground=7, request_id=1, hop_limit=limit, timestamp_us=0
    )
    number = sky.host.machine.ask(Op.PING, b"", far, 0.0)
    sky.host.machine.datagrams_to_send(0.0)
    packet = build_packet(header, b"", 0, 0.0)
    sky.sim._send(SegmentBatch(packet, len(packet)), ("ground", 7), centre)
    sky.sim.settle(0.05)
    answer = sky.host.machine.next_event()
    assert answer is not None and answer.number == number
    assert answer.ok == (status is None)
    assert answer.report.failure == (None if status is None else "unreachable")
    assert sky.counted("packets_unroutable") == (0 if status is None else 1)


def test_a_destination_off_the_torus_is_unreachable_at_once(world):
    sky = world("gateway")
    answer = sky.ask(Op.PING, b"", SatelliteId(5, 0))
    assert answer.report.failure == "unreachable" and answer.report.seconds == pytest.approx(2 * sky.link_s)
