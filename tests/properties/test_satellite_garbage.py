"""Whatever arrives at a satellite, in pieces of whatever length: no exception, counted, memory bounded."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.wire_traffic import (
    GROUND,
    KEY,
    MEMORY_BYTES,
    SOUND,
    SOURCES,
    answers_ping,
    bulk,
    check_store,
    damaged,
    drain,
    header,
    hostile,
    satellite,
    segment_sizes,
)
from tests.protocol.datagrams import receive_datagram

from skymemory.errors import MalformedPacket
from skymemory.protocol.messages import MAX_SELECTION_BITS, Selection
from skymemory.protocol.wire import (
    CHUNK_REF,
    Op,
    build_packet,
    bulk_batch,
    parse_packet,
)


@settings(max_examples=300)
@given(data=st.binary(max_size=900), segment_bytes=segment_sizes(), source=SOURCES)
def test_random_bytes_at_a_satellite(data, segment_bytes, source):
    machine = satellite()
    machine.receive_batch(data, segment_bytes, source, 0.0)
    assert len(machine.store) == 0
    if source == GROUND:
        segments = -(-len(data) // segment_bytes) if segment_bytes > 0 else 1
        assert machine.counters.get("packets_malformed") == max(segments, 1)
        assert drain(machine) == 0
    else:
        assert drain(machine) <= len(data)
    assert answers_ping(machine)


@settings(max_examples=400)
@given(data=damaged(), segment_bytes=segment_sizes(), source=SOURCES)
def test_damaged_packets_at_a_satellite(data, segment_bytes, source):
    machine = satellite()
    machine.receive_batch(data, segment_bytes, source, 0.0)
    check_store(machine, honest=True)
    drain(machine)
    assert answers_ping(machine)


@pytest.mark.slow
@pytest.mark.seeded
@settings(max_examples=500)
@given(packets=st.lists(hostile(), min_size=1, max_size=5), batched=st.booleans(), source=SOURCES)
def test_hostile_packets_at_a_satellite(packets, batched, source):
    machine = satellite()
    for packet in bulk(Op.SET):
        receive_datagram(machine, packet, GROUND, 0.0)
    drain(machine)
    sent = 0
    if batched:
        machine.receive_batch(b"".join(packets), len(packets[0]), source, 0.0)
    else:
        for packet in packets:
            receive_datagram(machine, packet, source, 0.0)
    check_store(machine, honest=False)
    sent += drain(machine)
    for now_s in (0.5, 2.0, 20.0):
        due_s = machine.next_timer_s()
        assert due_s is None or not math.isnan(due_s)
        machine.handle_timer(now_s)
        sent += drain(machine, now_s)
    check_store(machine, honest=False)
    # A GET is answered with what is here and a MISS no longer than itself; a handover repeats what is here.
    assert sent <= 20 * MEMORY_BYTES + 2 * sum(map(len, packets)) + 20 * 300
    assert answers_ping(machine)


@settings(max_examples=200)
@given(packets=st.lists(st.sampled_from([*bulk(Op.SET), *SOUND]), min_size=1, max_size=12))
def test_a_batch_does_what_its_packets_do(packets):
    """Runs as receive offload makes them: equally long, the last maybe shorter."""
    together, apart = satellite(), satellite()
    run: list[bytes] = []
    for packet in [*packets, b""]:
        if run and (len(packet) > len(run[0]) or not packet or len(run[-1]) < len(run[0])):
            together.receive_batch(b"".join(run), len(run[0]), GROUND, 0.0)
            run = []
        run.append(packet)
    for packet in packets:
        receive_datagram(apart, packet, GROUND, 0.0)
    assert list(together.store.items()) == list(apart.store.items())
    assert together.counters.as_dict() == apart.counters.as_dict()
    assert together.moves == apart.moves


def test_a_selection_of_everything_is_cheap_and_bounded():
    """What one GET of 8 KB can make a satellite do: one MISS of 8 KB."""
    machine = satellite()
    body = struct.pack(">32sIII", KEY, 1, 1, MAX_SELECTION_BITS) + b"\xff" * (MAX_SELECTION_BITS // 8)
    receive_datagram(machine, build_packet(header(Op.GET), body, 0, 0.0), GROUND, 0.0)
    assert drain(machine) < len(body) + 100
    with pytest.raises(MalformedPacket):
        Selection.unpack(struct.pack(">32sIII", KEY, 1, 1, MAX_SELECTION_BITS + 8) + b"\xff" * 8193)
    with pytest.raises(MalformedPacket):
        Selection.unpack(struct.pack(">32sIII", KEY, 2**32 - 1, 2, 2) + b"\3")
    with pytest.raises(MalformedPacket):
        Selection.unpack(struct.pack(">32sIII", KEY, 1, 1, 8) + b"\0")


def test_spread_out_chunks_are_acknowledged_without_a_bitmap_of_gigabytes():
    machine = satellite()
    packets = []
    for number in (1, 2, 2**31, 2**32 - 1):
        ref = CHUNK_REF.pack(KEY, number, 2**32 - 1, 1, zlib.crc32(b"x"), 2**32 - 1, 9, 1, 1, 3, 0, 0, 0, 0)
        packets += bulk_batch(header(Op.SET), ref, [b"x"], 0, 0.0).datagrams()
    machine.receive_batch(b"".join(packets), len(packets[0]), GROUND, 0.0)
    assert len(machine.store) == 4
    acknowledged = []
    for batch, _ in machine.datagrams_to_send(0.0):
        acknowledged += Selection.unpack(parse_packet(batch.datagrams()[0]).body).indices()
    assert sorted(acknowledged) == [0, 1, 2**31 - 1, 2**32 - 2]
