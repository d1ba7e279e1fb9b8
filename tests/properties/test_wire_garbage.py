"""Whatever arrives, in pieces of whatever length: no exception, counted, nothing stored wrongly, memory bounded."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory import native
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import MalformedPacket
from skymemory.protocol import messages
from skymemory.protocol.client import ClientConfig, ClientMachine
from skymemory.protocol.messages import HOUSEKEEPING_FIELDS, Presence
from skymemory.protocol.motion import MoveClock, SkyMap
from skymemory.protocol.satellite import SatelliteConfig, SatelliteMachine
from skymemory.protocol.segments import bulk_batch, pack_refs
from skymemory.protocol.selection import MAX_SELECTION_BITS, Selection
from skymemory.protocol.space_packet import parse_header
from skymemory.protocol.wire import (
    CHUNK_REF,
    MAX_CHUNK_BYTES,
    MAX_MOVES,
    SKY,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SkyHeader,
    Status,
)

SKY_MAP = SkyMap(Torus(5, 19), SatelliteId(2, 9))
HERE = SatelliteId(2, 9)
NEIGHBOUR = SatelliteId(2, 8)
KEY = bytes(range(32))
VALUE = np.random.default_rng(5).bytes(2500)
CHUNK_BYTES = 300
MEMORY_BYTES = 6000
GROUND = ("127.0.0.1", 4711)
SOURCES = st.sampled_from([GROUND, NEIGHBOUR])


def satellite() -> SatelliteMachine:
    return SatelliteMachine(SatelliteConfig(HERE, MEMORY_BYTES), SKY_MAP, MoveClock(), 0.0)


def header(op: Op, request_id: int = 1) -> SkyHeader:
    there, back = Address(*HERE), Address(*HERE, 0xFF)
    return SkyHeader(op, *((there, back) if op.is_command else (back, there)), 7, request_id)


def bulk(op: Op, request_id: int = 1, servers: int = 1) -> list[bytes]:
    """Every chunk of VALUE as SET, MIGRATE or DATA."""
    crcs = native.crc32_chunks(VALUE, CHUNK_BYTES)
    refs = pack_refs(KEY, range(9), crcs, CHUNK_BYTES, 2500, zlib.crc32(VALUE), servers, 3, (0, 0))
    payloads = [VALUE[at : at + CHUNK_BYTES] for at in range(0, 2500, CHUNK_BYTES)]
    return bulk_batch(header(op, request_id), refs, payloads, 0, 0.0).datagrams()


SELECTED = Selection.of(KEY, list(range(9))).pack()
SOUND = [
    *bulk(Op.SET), *bulk(Op.DATA)[:2],
    *(messages.build_packet(header(op), body, 1, 0.0) for op, body in [
        (Op.GET, SELECTED), (Op.HAS, messages.pack_keys([KEY])), (Op.EVICT, messages.pack_keys([KEY])),
        (Op.PING, b""), (Op.LIST, messages.pack_list(bytes(32), 9)), (Op.ADVANCE, messages.pack_moves(1, 1)),
        (Op.ACK, SELECTED), (Op.MISS, SELECTED), (Op.PONG, messages.pack_housekeeping({})), (Op.UNREACHABLE, b""),
    ]),
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, packets: list[bytes] = SOUND) -> bytes:
    """Some sound packets in a row, then bits flipped, bytes cut off or put in."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(packets), min_size=1, max_size=4))))
    for _ in range(draw(st.integers(0, 3))):
        bit = draw(st.integers(0, 8 * len(data) - 1))
        data[bit // 8] ^= 1 << bit % 8
    if draw(st.booleans()):
        del data[draw(st.integers(1, len(data))) :]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data)))
        data[at:at] = draw(st.binary(max_size=20))
    return bytes(data)


@st.composite
def segment_sizes(draw: st.DrawFn) -> int:
    return draw(st.one_of(st.integers(-1, 700), st.sampled_from([424, 416, 432, 424, 52, 60, 1 << 20])))


u32 = st.one_of(st.integers(1, 12), st.integers(0, 12), st.integers(0, 2**32 - 1), st.sampled_from([2**31, 2**32 - 1]))
u16 = st.one_of(st.integers(1, 12), st.integers(0, 2**16 - 1))
u8 = st.integers(0, 255)
i32 = st.one_of(st.integers(-3, 3), st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1))
GROUNDS = st.sampled_from([7, 7, 7, 8])
addresses = st.one_of(st.sampled_from([Address(*HERE).pack(), Address(*HERE, 0xFF).pack(), Address(0, 0).pack()]), u32)


@st.composite
def hostile(draw: st.DrawFn, to_ground: bool = False) -> bytes:
    """A packet whose checksums are all right and whose fields say anything."""
    op = draw(st.sampled_from([Op.SET, Op.SET, Op.MIGRATE, Op.GET, Op.DATA, *Op]))
    status = draw(st.sampled_from([0, 0, 1, 2]))
    there = Address(*HERE, 0xFF if to_ground else 0).pack()
    sky = SKY.pack(
        1, op, 0, status, there if draw(st.integers(0, 9)) else draw(addresses), draw(addresses), draw(GROUNDS),
        draw(st.one_of(st.integers(1, 4), u32)), draw(u8), draw(u8), 0, draw(u32), draw(i32), draw(i32), draw(u16),
        0, 0,
    )  # fmt: skip
    payload = b""
    if op in (Op.SET, Op.MIGRATE, Op.DATA):
        payload = draw(st.one_of(st.binary(max_size=30), st.sampled_from([VALUE[:CHUNK_BYTES], VALUE[-100:]])))
        key = draw(st.sampled_from([KEY, bytes(32)]))
        crc, value_crc = zlib.crc32(payload), draw(st.sampled_from([zlib.crc32(VALUE), 1]))
        number, servers = draw(u32), draw(st.one_of(st.integers(1, 12), u16))
        server = (number - 1) % servers + 1 if servers and draw(st.integers(0, 4)) else draw(u16)
        chunks = number + draw(st.integers(0, 9)) if number < 2**31 and draw(st.integers(0, 4)) else draw(u32)
        body = CHUNK_REF.pack(
            key, number, chunks, len(payload), crc, draw(st.one_of(st.just(2500), u32)), value_crc,
            servers, server, draw(st.sampled_from([3, 3, 1, 2, 4, 5, 0, 6])), 0, 0, draw(i32), draw(i32),
        )  # fmt: skip
    else:
        selection = struct.pack(">32sIII", KEY, draw(u32), draw(u32), draw(u32))
        bitmap = draw(st.one_of(st.binary(max_size=4), st.just(b"\xff" * 9000)))
        presence = struct.pack(">IIIIIHHBBHii", *(draw(u32) for _ in range(5)), *(draw(u16) for _ in range(2)),
                               3, 0, draw(u16), draw(i32), draw(i32))  # fmt: skip
        body = draw(
            st.sampled_from(
                [b"", selection + bitmap, SELECTED, b"\0\1\0\0" + KEY, b"\0\1\0\0" + presence, KEY + b"\0\1\0\0"]
            )
        )
        if op is Op.ADVANCE:
            body = struct.pack(">ii", draw(i32), draw(i32))
    outer = 8 if op.is_command else 16
    word = 0x18C0 if op.is_command else 0x08C0
    total = outer + len(sky) + len(body) + len(payload)
    front = struct.pack(">HHH", word, 0xC000, total - 7) + bytes(outer - 6) + sky + body
    sealed = bytearray(front)
    native.seal_headers(sealed, len(sealed), outer)
    return bytes(sealed) + payload


def check_store(machine: SatelliteMachine, honest: bool) -> None:
    """Within its budget; every chunk is what it says it is and can be told of."""
    store = machine.store
    assert 0 <= store.used_bytes <= MEMORY_BYTES
    total = 0
    for (key, index), chunk in store.items():
        total += len(chunk.payload) + len(chunk.ref)
        ref = ChunkRef.unpack(chunk.ref)
        assert (ref.key, ref.index, ref.length_bytes) == (key, index, len(chunk.payload))
        assert ref.crc == zlib.crc32(chunk.payload)
        assert store.presence(key) is not None
        if honest:
            assert key == KEY and chunk.payload == VALUE[CHUNK_BYTES * index :][:CHUNK_BYTES]
    assert total == store.used_bytes


def drain(machine: SatelliteMachine, now_s: float = 0.0) -> int:
    """Bytes it wants to send; all must be packets that a receiver accepts or passes on."""
    total = 0
    for batch, _ in machine.datagrams_to_send(now_s):
        total += batch.total_bytes
        assert len(batch.datagrams()) == batch.count
    return total


def answers_ping(machine: SatelliteMachine) -> bool:
    machine.receive_datagram(messages.build_packet(header(Op.PING), b"", 0, 0.0), GROUND, 1.0)
    ((batch, to),) = machine.datagrams_to_send(1.0)
    return to == GROUND and messages.parse_packet(batch.datagrams()[0]).header.op is Op.PONG


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


@settings(max_examples=500)
@given(packets=st.lists(hostile(), min_size=1, max_size=5), batched=st.booleans(), source=SOURCES)
def test_hostile_packets_at_a_satellite(packets, batched, source):
    machine = satellite()
    for packet in bulk(Op.SET):
        machine.receive_datagram(packet, GROUND, 0.0)
    drain(machine)
    sent = 0
    if batched:
        machine.receive_batch(b"".join(packets), len(packets[0]), source, 0.0)
    else:
        for packet in packets:
            machine.receive_datagram(packet, source, 0.0)
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
        apart.receive_datagram(packet, GROUND, 0.0)
    assert list(together.store.items()) == list(apart.store.items())
    assert together.counters.as_dict() == apart.counters.as_dict()
    assert together.moves == apart.moves


# --- the ground host ---


def client() -> tuple[ClientMachine, bytearray]:
    """A client that reads VALUE (request 1), writes it (request 2), and asks (3 and 4)."""
    machine = ClientMachine(ClientConfig(ground=7), SKY_MAP, MoveClock())
    out = bytearray(2500)
    _, info = machine.put(KEY, VALUE, CHUNK_BYTES, 3, 1, 0.0)
    machine.cancel(1)
    machine.get(info, memoryview(out), 0.0)
    machine.datagrams_to_send(0.0)
    machine.put(KEY, VALUE, CHUNK_BYTES, 3, 1, 0.0)
    machine.datagrams_to_send(0.0)
    machine.ask(Op.HAS, messages.pack_keys([KEY]), HERE, 0.0)
    machine.ask(Op.PING, b"", HERE, 0.0)
    machine.datagrams_to_send(0.0)
    return machine, out


def end(machine: ClientMachine) -> None:
    """Whatever came: every operation ends, in time, and leaves nothing behind."""
    now_s = 0.0
    for _ in range(3000):
        machine.datagrams_to_send(now_s)
        due_s = machine.next_timer_s()
        if due_s is None:
            break
        now_s = max(now_s, due_s)
        machine.handle_timer(now_s)
    assert machine.next_timer_s() is None and now_s < 15
    finished = []
    while (event := machine.next_event()) is not None:
        finished.append(event.number)
    assert sorted(finished) == [2, 3, 4, 5]
    assert machine._links.inbound.in_flight_bytes == 0
    assert all(window.in_flight_bytes == 0 for window in machine._links._outbound.values())


@settings(max_examples=200)
@given(data=st.binary(max_size=900), segment_bytes=segment_sizes())
def test_random_bytes_at_a_client(data, segment_bytes):
    machine, out = client()
    machine.receive_batch(data, segment_bytes, 0.0)
    assert not any(out) and machine.next_event() is None
    end(machine)


@settings(max_examples=300)
@given(data=damaged([*bulk(Op.DATA), *SOUND]), segment_bytes=segment_sizes())
def test_damaged_packets_at_a_client(data, segment_bytes):
    machine, out = client()
    machine.receive_batch(data, segment_bytes, 0.001)
    for at in range(0, 2500, CHUNK_BYTES):
        chunk = out[at : at + CHUNK_BYTES]
        assert not any(chunk) or chunk == VALUE[at : at + CHUNK_BYTES]
    end(machine)


@settings(max_examples=500)
@given(packets=st.lists(hostile(to_ground=True), min_size=1, max_size=6), batched=st.booleans())
def test_hostile_packets_at_a_client(packets, batched):
    machine, out = client()
    if batched:
        machine.receive_batch(b"".join(packets), len(packets[0]), 0.001)
    else:
        for packet in packets:
            machine.receive_datagram(packet, 0.001)
            machine.datagrams_to_send(0.001)
    assert len(out) == 2500
    end(machine)


@settings(max_examples=200)
@given(
    runs=st.lists(
        st.lists(st.sampled_from([*bulk(Op.DATA), *bulk(Op.DATA), *SOUND[-4:]]), min_size=1, max_size=5),
        min_size=1, max_size=4,
    ),
    damage=st.lists(st.integers(0, 10**6), max_size=2),
)  # fmt: skip
def test_runs_at_a_client_do_what_their_packets_do(runs, damage):
    joined = [bytearray(b"".join(run)) for run in runs]
    for bit in damage:
        data = joined[bit % len(joined)]
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    sizes = [len(run[0]) for run in runs]
    (together, out_together), (apart, out_apart) = client(), client()
    together.receive_runs([(memoryview(data), size) for data, size in zip(joined, sizes, strict=True)], 0.001)
    for data, size in zip(joined, sizes, strict=True):
        for at in range(0, len(data), size):
            apart.receive_datagram(data[at : at + size], 0.001)
    assert out_together == out_apart
    ended = [[(event.number, event.ok) for event in machine._events] for machine in (together, apart)]
    assert ended[0] == ended[1]
    assert together._links.inbound.in_flight_bytes == apart._links.inbound.in_flight_bytes
    if not ended[0]:
        for name in ("packets_malformed", "packets_unexpected"):
            assert together.counters.get(name) == apart.counters.get(name)


# --- round trips ---

keys = st.binary(min_size=32, max_size=32)
tags = st.integers(1, 0xFFFF).flatmap(
    lambda servers: st.builds(
        PlacementTag, st.integers(0, 255), st.just(servers), st.integers(0, servers - 1), i32, i32
    )
)


@given(
    op=st.sampled_from(Op), status=st.sampled_from(Status), ground=u32, request_id=u32, body=st.binary(max_size=50),
    numbers=st.tuples(u8, u8, u16, u32, u16, u16, u8), moves=st.tuples(*[st.integers(-MAX_MOVES, MAX_MOVES)] * 2),
    places=st.lists(st.builds(Address, *[st.integers(0, 4095)] * 2, u8), min_size=2, max_size=2),
    count=u16, time_s=st.floats(0, 2**32 - 1),
)  # fmt: skip
def test_every_header_round_trips(op, status, ground, request_id, body, numbers, moves, places, count, time_s):
    hop_limit, hop_count, congestion, timestamp_us, credit, key_id, flags = numbers
    said = SkyHeader(
        op, *places, ground, request_id, status, hop_limit, hop_count, congestion, timestamp_us, *moves, credit,
        key_id, flags,
    )  # fmt: skip
    packet = messages.build_packet(said, body, count, time_s)
    if op not in (Op.SET, Op.MIGRATE, Op.DATA):
        assert native.verify_segments(packet, len(packet)) == b"\0"
    read = messages.parse_packet(packet)
    assert read.header == said and bytes(read.body) == body
    outer = parse_header(packet)
    assert outer.sequence_count == count % 16384 and outer.total_bytes == len(packet)


@given(key=keys, tag=tags, data=st.data(), value_crc=u32, crc=u32)
def test_chunk_references_round_trip(key, tag, data, value_crc, crc):
    value_bytes = data.draw(st.integers(0, 2**32 - 1))
    chunks = data.draw(st.integers(1, max(1, value_bytes)))
    index = data.draw(st.integers(0, chunks - 1))
    length = data.draw(st.integers(0, min(value_bytes, MAX_CHUNK_BYTES)))
    tag = PlacementTag(tag.strategy, tag.servers, index % tag.servers, tag.slot_moves, tag.plane_moves)
    ref = ChunkRef(key, index, chunks, length, crc, value_bytes, value_crc, tag)
    assert ChunkRef.unpack(ref.pack()) == ref


@given(key=keys, indices=st.sets(st.integers(0, 2**32 - 2), min_size=1, max_size=40), data=st.data())
def test_selections_cover_exactly(key, indices, data):
    selections = Selection.cover(key, indices)
    assert sorted(index for selection in selections for index in selection.indices()) == sorted(indices)
    for selection in selections:
        assert selection.count <= MAX_SELECTION_BITS
        assert Selection.unpack(selection.pack()) == selection
    body = bytearray(selections[0].pack())
    body[data.draw(st.integers(32, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = Selection.unpack(body)
    except MalformedPacket:
        return
    assert min(read.indices()) >= 0 and max(read.indices()) < 2**32 - 1


@given(first=st.integers(0, 1000), stride=st.integers(1, 5000), steps=st.sets(st.integers(0, 300), min_size=1))
def test_a_grid_is_one_selection(first, stride, steps):
    indices = sorted(first + stride * step for step in steps)
    assert Selection.of(KEY, indices, stride).indices() == indices
    (selection,) = Selection.cover(KEY, reversed(indices))
    assert selection.indices() == indices


@given(
    entries=st.lists(
        st.tuples(keys, st.builds(Presence, st.integers(0, 99), st.just(100), u32, u32, u32, u16, tags)), max_size=5
    ),
    values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=22, max_size=22),
    moves=st.tuples(*[st.integers(-MAX_MOVES, MAX_MOVES)] * 2),
    limit=st.integers(0, 90),
)  # fmt: skip
def test_bodies_round_trip(entries, values, moves, limit):
    presences = [presence for _, presence in entries] + [None]
    assert messages.unpack_presences(messages.pack_presences(presences)) == presences
    assert messages.unpack_listed(messages.pack_listed(entries)) == entries
    named = dict(zip(HOUSEKEEPING_FIELDS, values, strict=True))
    assert messages.unpack_housekeeping(messages.pack_housekeeping(named)) == named
    assert messages.unpack_moves(messages.pack_moves(*moves)) == moves
    assert messages.unpack_list(messages.pack_list(KEY, limit)) == (KEY, limit)
    if entries:
        body = [key for key, _ in entries]
        assert messages.unpack_keys(messages.pack_keys(body)) == body


@settings(max_examples=300)
@given(body=st.binary(max_size=200), count=st.integers(0, 200))
def test_bodies_of_garbage_are_malformed_or_sound(body, count):
    for garbage in (body, struct.pack(">HH", count, 0) + body):
        for unpack in (
            messages.unpack_keys, messages.unpack_presences, messages.unpack_listed, messages.unpack_list,
            messages.unpack_moves, messages.unpack_count, messages.unpack_housekeeping, Selection.unpack,
            ChunkRef.unpack, SkyHeader.unpack, messages.parse_packet,
        ):  # fmt: skip
            try:
                unpack(garbage)
            except MalformedPacket:
                continue


def test_a_selection_of_everything_is_cheap_and_bounded():
    """What one GET of 8 KB can make a satellite do: one MISS of 8 KB."""
    machine = satellite()
    body = struct.pack(">32sIII", KEY, 1, 1, MAX_SELECTION_BITS) + b"\xff" * (MAX_SELECTION_BITS // 8)
    machine.receive_datagram(messages.build_packet(header(Op.GET), body, 0, 0.0), GROUND, 0.0)
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
        acknowledged += Selection.unpack(messages.parse_packet(batch.datagrams()[0]).body).indices()
    assert sorted(acknowledged) == [0, 1, 2**31 - 1, 2**32 - 2]
