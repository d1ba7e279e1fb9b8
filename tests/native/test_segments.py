"""Packets in runs: sealed, verified and placed alike by both implementations, whatever the bytes."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.protocol.refs import pack_refs

from skymemory.native.twin import backend, segments
from skymemory.protocol import wire
from skymemory.protocol import wire as space_packet
from skymemory.protocol.wire import Address, Op, SkyHeader, bulk_batch

KEY = bytes(range(32))
CHUNK, CHUNKS, VALUE_BYTES = 48, 5, 48 * 4 + 17
VALUE = bytes(n * 7 % 251 for n in range(VALUE_BYTES))
VALUE_CRC = zlib.crc32(VALUE)
_settings = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)


@dataclass
class Target:
    """Where a value is put together."""

    out: bytearray
    arrived: bytearray
    crcs: np.ndarray

    def state(self) -> tuple[bytes, bytes, bytes]:
        return bytes(self.out), bytes(self.arrived), self.crcs.tobytes()


def target() -> Target:
    return Target(bytearray(b"\xaa" * VALUE_BYTES), bytearray(CHUNKS), np.zeros(CHUNKS, dtype=np.uint32))


def landing(out: object, to: Target) -> tuple[object, ...]:
    return KEY, CHUNKS, CHUNK, VALUE_BYTES, VALUE_CRC, out, to.arrived, to.crcs


def place(impl: ModuleType, data: bytes, segment: int, to: Target) -> tuple[int, int, int, int]:
    result: tuple[int, int, int, int] = impl.place_segments(data, segment, landing(to.out, to))
    return result


def packets(op: Op, indices: list[int]) -> list[bytes]:
    """What the protocol itself builds."""
    header = SkyHeader(op, Address(1, 2), Address(3, 4), ground=7, request_id=9, credit=3)
    crcs = backend.crc32_chunks(VALUE, CHUNK)
    refs = pack_refs(KEY, indices, crcs, CHUNK, VALUE_BYTES, VALUE_CRC, 3, 1, (5, -2))
    payloads = [VALUE[index * CHUNK : (index + 1) * CHUNK] for index in indices]
    return bulk_batch(header, refs, payloads, 77, 12.5).datagrams()


WIDTH = len(packets(Op.DATA, [0])[0])


def plain(op: int, body: bytes, telemetry: bool) -> bytes:
    """A packet without payload, from the written layout and zlib alone."""
    head = 16 if telemetry else 8
    total = head + 44 + len(body)
    if telemetry:
        first = space_packet.pack_telemetry(1.0, 5, total) if total > 16 else b""
    else:
        first = space_packet.pack_command(op, 5, total)
    sky = bytearray(44)
    sky[0], sky[1] = wire.VERSION, op
    packet = bytearray(first + sky + body)
    zeroed = packet[: head + 20] + bytes(4) + packet[head + 24 : head + 40] + packet[head + 44 :]
    struct.pack_into(">I", packet, head + 40, zlib.crc32(zeroed))
    return bytes(packet)


def test_the_twin_restates_the_frozen_bytes() -> None:
    assert segments.SKY_APID == space_packet.SKY_APID
    assert segments.UNSEGMENTED == space_packet.UNSEGMENTED
    assert (segments.COMMAND_BYTES, segments.TELEMETRY_BYTES) == (
        space_packet.COMMAND_BYTES,
        space_packet.TELEMETRY_BYTES,
    )
    assert (segments.SKY_BYTES, segments.REF_BYTES) == (wire.SKY_BYTES, wire.CHUNK_REF_BYTES)
    assert segments.CRC_AT == wire.CRC_OFFSET
    assert segments.MUTABLE_AT == wire.MUTABLE_OFFSET
    assert segments.MUTABLE_END == wire.MUTABLE_OFFSET + wire.MUTABLE_BYTES
    assert segments.VERSION == wire.VERSION
    assert {Op.SET, Op.MIGRATE, Op.DATA} == segments.CARRIERS


@pytest.mark.parametrize(("offset", "width"), [(8, 124), (16, 132), (8, 52), (16, 60), (8, 400), (0, 44), (30, 99)])
def test_sealing_writes_the_crc_of_the_written_rule(impl: ModuleType, offset: int, width: int) -> None:
    before = bytes(n * 13 % 256 for n in range(3 * width))
    rows = bytearray(before)
    impl.seal_headers(rows, width, offset)
    for at in range(0, len(rows), width):
        row = before[at : at + width]
        covered = row[: offset + 20] + bytes(4) + row[offset + 24 : offset + 40] + row[offset + 44 :]
        assert rows[at : at + width] == row[: offset + 40] + zlib.crc32(covered).to_bytes(4, "big") + row[offset + 44 :]


@pytest.mark.parametrize(
    ("size", "width", "offset"),
    [(52, 51, 8), (51, 51, 8), (100, 52, 8), (52, 0, 8), (52, -52, 8), (52, 52, -1), (52, 52, 2**62)],
)
def test_rows_that_cannot_be_are_refused(impl: ModuleType, size: int, width: int, offset: int) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        impl.seal_headers(bytearray(size), width, offset)
    with pytest.raises((TypeError, BufferError)):
        impl.seal_headers(bytes(52), 52, 8)


@pytest.mark.parametrize("op", [Op.SET, Op.MIGRATE, Op.DATA])
def test_what_the_protocol_builds_is_sound(impl: ModuleType, op: Op) -> None:
    run = packets(op, [0, 1, 2, 3, 4])
    assert impl.verify_segments(b"".join(run), len(run[0])) == bytes(5)
    forwarded = bytearray(run[0])
    sky = 8 if op.is_command else 16
    forwarded[sky + 20 : sky + 24] = b"\x01\x02\x03\x04"
    assert impl.verify_segments(forwarded, len(forwarded)) == b"\0", "hop limit, count and marks are not covered"


@pytest.mark.parametrize("telemetry", [False, True])
@pytest.mark.parametrize("size", [0, 1, 71, 72, 73, 500])
def test_packets_without_payload_are_covered_to_the_end(impl: ModuleType, telemetry: bool, size: int) -> None:
    packet = plain(Op.PRESENCE if telemetry else Op.HAS, bytes(size), telemetry)
    assert impl.verify_segments(packet, len(packet)) == b"\0"
    for at in range(len(packet)):
        damaged = bytearray(packet)
        damaged[at] ^= 0x40
        mutable = (16 if telemetry else 8) + 20 <= at < (16 if telemetry else 8) + 24
        code = impl.verify_segments(damaged, len(damaged))[0]
        assert (code == 0) == mutable or at == 6, at


def test_each_byte_of_a_data_packet_is_covered_once(impl: ModuleType) -> None:
    packet = packets(Op.DATA, [1])[0]
    for at in range(len(packet)):
        damaged = bytearray(packet)
        damaged[at] ^= 0x10
        code = impl.verify_segments(damaged, len(damaged))[0]
        if 36 <= at < 40:
            assert code == 0
        elif at >= 132:
            assert code == 3
        else:
            assert code in (1, 2), at
    for size in range(len(packet)):
        assert impl.verify_segments(packet[:size], len(packet)) == (b"\1" if size else b"")


def test_a_value_is_put_together_from_any_order(impl: ModuleType) -> None:
    to = target()
    last_first = packets(Op.DATA, [4])[0]
    assert place(impl, last_first, 65_535, to) == (1, 0, 0, 0)
    run = packets(Op.DATA, [3, 1, 3, 0])
    assert place(impl, b"".join(run), WIDTH, to) == (3, 1, 0, 0)
    assert bytes(to.arrived) == b"\1\1\0\1\1"
    assert place(impl, b"".join(packets(Op.DATA, [2, 4])), WIDTH, to) == (1, 1, 0, 0)
    assert bytes(to.out) == VALUE
    assert to.crcs.tolist() == backend.crc32_chunks(VALUE, CHUNK).tolist()


def test_only_data_of_this_value_is_placed(impl: ModuleType) -> None:
    to = target()
    before = to.state()
    assert place(impl, b"".join(packets(Op.SET, [0, 1])), WIDTH - 8, to) == (0, 0, 0, 2)
    has = plain(Op.HAS, b"x" * 80, telemetry=False)
    assert place(impl, has, len(has), to) == (0, 0, 0, 1)
    damaged = bytearray(packets(Op.DATA, [0])[0])
    damaged[-1] ^= 1
    assert place(impl, bytes(damaged), WIDTH, to) == (0, 0, 1, 0)
    assert to.state() == before


@pytest.mark.parametrize("changed", [{"chunks": 4}, {"value_bytes": VALUE_BYTES - 1}, {"value_crc": VALUE_CRC ^ 1}])
def test_a_chunk_of_another_version_of_the_value_is_foreign(impl: ModuleType, changed: dict[str, int]) -> None:
    """Its own checksums are right, and so is its place: only what it says of the whole gives it away."""
    header = SkyHeader(Op.DATA, Address(1, 2), Address(3, 4), ground=7, request_id=9)
    refs = pack_refs(
        KEY,
        [1],
        backend.crc32_chunks(VALUE, CHUNK),
        CHUNK,
        changed.get("value_bytes", VALUE_BYTES),
        changed.get("value_crc", VALUE_CRC),
        3,
        1,
        (5, -2),
    )
    if "chunks" in changed:
        refs[:, 36:40] = np.frombuffer(struct.pack(">I", changed["chunks"]), np.uint8)
    (packet,) = bulk_batch(header, refs, [VALUE[CHUNK : 2 * CHUNK]], 77, 12.5).datagrams()
    to = target()
    assert place(impl, packet, len(packet), to) == (0, 0, 0, 1) and not any(to.arrived)


def test_a_value_without_bytes_has_one_empty_chunk(impl: ModuleType) -> None:
    header = SkyHeader(Op.DATA, Address(1, 2), Address(3, 4), ground=7, request_id=9)
    refs = pack_refs(KEY, [0], np.zeros(1, dtype=np.uint32), 48, 0, 0, 3, 1, (0, 0))
    data = bulk_batch(header, refs, [b""], 1, 0.0).datagrams()[0]
    arrived, crcs = bytearray(1), np.ones(1, dtype=np.uint32)
    assert impl.place_segments(data, len(data), (KEY, 1, 48, 0, 0, bytearray(), arrived, crcs)) == (1, 0, 0, 0)
    assert arrived == b"\1" and crcs[0] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment": 0},
        {"segment": -1},
        {"key": b"short"},
        {"chunks": 4},
        {"chunks": 6},
        {"chunk_bytes": 0},
        {"chunk_bytes": -5},
        {"value_bytes": -1},
        {"out": bytearray(VALUE_BYTES - 1)},
        {"arrived": bytearray(4)},
        {"crcs": np.zeros(4, dtype=np.uint32)},
        {"out": bytes(VALUE_BYTES)},
        {"value_bytes": 2**40},
    ],
)
def test_a_target_that_cannot_hold_the_value_is_refused(impl: ModuleType, wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "key": KEY,
        "chunks": CHUNKS,
        "chunk_bytes": CHUNK,
        "value_bytes": VALUE_BYTES,
        "value_crc": VALUE_CRC,
        "out": bytearray(VALUE_BYTES),
        "arrived": bytearray(CHUNKS),
        "crcs": np.zeros(CHUNKS, dtype=np.uint32),
    }
    with pytest.raises((ValueError, BufferError, TypeError)):
        impl.place_segments(packets(Op.DATA, [0])[0], WIDTH, tuple((arguments | wrong).values()))


@st.composite
def hostile_packet(draw: st.DrawFn) -> bytes:
    """A packet with any of its fields wrong, its header CRC made right again or not."""
    op = draw(st.sampled_from([Op.DATA, Op.DATA, Op.DATA, Op.SET, Op.MIGRATE]))
    packet = bytearray(packets(op, [draw(st.integers(0, CHUNKS - 1))])[0])
    sky = 8 if op.is_command else 16
    ref = sky + 44
    word = st.one_of(st.integers(0, 7), st.integers(0, 2**32 - 1), st.sampled_from([48, 17, 209, 2**31, 2**32 - 1]))
    for at in draw(st.lists(st.sampled_from([32, 36, 40, 44, 48, 52]), max_size=2)):
        struct.pack_into(">I", packet, ref + at, draw(word))
    for at, flip in draw(st.lists(st.tuples(st.integers(0, len(packet) - 1), st.integers(1, 255)), max_size=2)):
        packet[at] ^= flip
    payload = draw(st.one_of(st.none(), st.binary(max_size=80)))
    if payload is not None:
        packet[ref + 72 :] = payload
        if draw(st.booleans()):
            struct.pack_into(">I", packet, 4, len(packet) - 7 << 16 | draw(st.just(0)))
            struct.pack_into(">H", packet, 4, len(packet) - 7)
            struct.pack_into(">I", packet, ref + 40, len(payload))
            struct.pack_into(">I", packet, ref + 44, zlib.crc32(payload))
    if draw(st.booleans()):
        head = packet[: ref + 72]
        backend.seal_headers(head, len(head), sky)
        packet[: ref + 72] = head
    return bytes(packet[: draw(st.one_of(st.none(), st.integers(0, len(packet))))])


hostile_run = st.one_of(st.binary(max_size=400), st.lists(hostile_packet(), max_size=4).map(b"".join))


@_settings
@given(hostile_run, st.one_of(st.just(WIDTH), st.integers(1, 400)), st.binary(min_size=5, max_size=5))
def test_hostile_bytes_are_judged_alike(fast: ModuleType, data: bytes, segment: int, arrived: bytes) -> None:
    assert fast.verify_segments(data, segment) == backend.verify_segments(data, segment)
    one, other = target(), target()
    one.arrived[:] = other.arrived[:] = arrived
    assert place(fast, data, segment, one) == place(backend, data, segment, other)
    assert one.state() == other.state()


@pytest.mark.brief("backend")
@_settings
@given(hostile_run, st.integers(1, 400))
def test_a_placed_chunk_always_has_its_own_crc(impl: ModuleType, data: bytes, segment: int) -> None:
    to = target()
    counted = place(impl, data, segment, to)
    assert sum(counted) == -(-len(data) // segment)
    assert counted[0] == sum(to.arrived)
    for index in range(CHUNKS):
        span = slice(index * CHUNK, (index + 1) * CHUNK)
        if to.arrived[index]:
            assert zlib.crc32(to.out[span]) == to.crcs[index]
        else:
            assert set(to.out[span]) == {0xAA}


@st.composite
def rows(draw: st.DrawFn) -> segments.Rows:
    """Memory for the value: some bytes ahead, the rest in rows that are apart."""
    count = draw(st.integers(1, 20))
    row_bytes = draw(st.integers(1, VALUE_BYTES // count))
    stride, first = row_bytes + draw(st.integers(0, 9)), draw(st.integers(0, 9))
    behind = draw(st.integers(0, 9))
    room = bytearray(b"\xaa" * (first + (count - 1) * stride + row_bytes + behind))
    head = bytearray(VALUE_BYTES - count * row_bytes)
    return segments.Rows(memoryview(head), memoryview(room), first, count, row_bytes, stride)


@_settings
@given(rows(), st.permutations(range(CHUNKS)))
def test_rows_are_filled_alike_and_nothing_beside_them(fast: ModuleType, its: segments.Rows, order: list[int]) -> None:
    states = []
    for impl in (fast, backend):
        head, room, to = bytearray(its.head), bytearray(its.room), target()
        out = its._replace(head=memoryview(head), room=memoryview(room))
        for (packet,) in [packets(Op.DATA, [index]) for index in order]:
            impl.place_segments(packet, WIDTH, landing(out, to))
        states.append((head, room))
        starts = [its.first + row * its.stride for row in range(its.row_count)]
        assert bytes(head) + b"".join(room[at : at + its.row_bytes] for at in starts) == VALUE
        inside = {at + n for at in starts for n in range(its.row_bytes)}
        assert all(byte == 0xAA for at, byte in enumerate(room) if at not in inside)
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": -1},
        {"first": 6},
        {"row_count": 2},
        {"row_count": 4},
        {"row_count": -3},
        {"row_bytes": 50},
        {"row_bytes": 0},
        {"row_bytes": -60},
        {"stride": 59},
        {"stride": 67},
        {"stride": 1 << 62},
        {"head": bytearray(8)},
        {"room": bytearray(3)},
    ],
)
def test_rows_that_are_not_the_values_are_refused(impl: ModuleType, wrong: dict[str, object]) -> None:
    right = segments.Rows(memoryview(bytearray(VALUE_BYTES - 180)), memoryview(bytearray(3 * 65)), 3, 3, 60, 65)
    to = target()

    def place_in(out: object) -> object:
        return impl.place_segments(packets(Op.DATA, [0])[0], WIDTH, landing(out, to))

    with pytest.raises(ValueError, match="rows"):
        place_in(
            right._replace(
                **{name: memoryview(its) if isinstance(its, bytearray) else its for name, its in wrong.items()}
            )
        )
    with pytest.raises((TypeError, BufferError)):
        place_in(right._replace(room=right.room.toreadonly()))
    assert not any(to.arrived) and not any(right.room)
    assert place_in(right) == (1, 0, 0, 0)
