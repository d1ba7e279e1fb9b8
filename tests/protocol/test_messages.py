"""What packets refuse to carry, and what receivers refuse to take."""

from __future__ import annotations

import struct

import pytest

from skymemory import native
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.native.twin import backend
from skymemory.protocol import messages
from skymemory.protocol.messages import MAX_SELECTION_BITS, Selection
from skymemory.protocol.wire import (
    MAX_CHUNK_BYTES,
    MAX_MOVES,
    MAX_PACKET_BYTES,
    SKY_BYTES,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SegmentBatch,
    SkyHeader,
    build_packet,
    made_at_s,
    pack_command,
    pack_telemetry,
    parse_header,
    parse_packet,
    single,
)

KEY = bytes(32)
HEADER = SkyHeader(Op.PING, Address(1, 2), Address(1, 2, 0xFF), 7, 1)
PING = build_packet(HEADER, b"", 0, 0.0)


def malformed(packet: bytes, code: int) -> None:
    """Both verifiers give this reason; without a CRC to show it, parsing refuses too."""
    for implementation in (native, backend):
        assert implementation.verify_segments(packet, max(1, len(packet))) == bytes([code])


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("bit", range(8 * len(PING)))
def test_any_flipped_bit_is_noticed_but_those_that_forwarders_change(bit):
    packet = bytearray(PING)
    packet[bit // 8] ^= 1 << bit % 8
    (code,) = native.verify_segments(bytes(packet), len(packet))
    assert (code == 0) == (28 <= bit // 8 < 32)
    assert backend.verify_segments(bytes(packet), len(packet)) == bytes([code])


@pytest.mark.parametrize("size", range(len(PING)))
def test_every_truncation_is_malformed(size):
    malformed(PING[:size], 1) if size else None
    with pytest.raises(MalformedPacket):
        parse_packet(PING[:size])


def reseal(packet: bytearray) -> bytes:
    native.seal_headers(packet, len(packet), 8 if packet[0] & 0x10 else 16)
    return bytes(packet)


@pytest.mark.parametrize(
    ("offset", "byte", "match"),
    [
        (0, 0x38, "version 1"),
        (0, 0x10, "no secondary header"),
        (1, 0xC1, "APID 0xc1"),
        (2, 0x40, "sequence flags 1"),
        (8, 2, "protocol version 2"),
        (9, 0x77, "operation 0x77"),
        (9, 0x46, "PONG in a command"),
        (11, 9, "status 9"),
        (36, 0x7F, "moves"),
    ],
)
def test_what_a_parser_refuses_is_named(offset, byte, match):
    packet = bytearray(PING)
    packet[offset] = byte
    with pytest.raises(MalformedPacket, match=match):
        parse_packet(reseal(packet))


def test_the_idle_packet_is_refused():
    packet = bytearray(PING)
    packet[0:2] = struct.pack(">H", 0x1FFF)
    with pytest.raises(MalformedPacket, match="idle"):
        parse_header(packet)
    with pytest.raises(InvalidInput, match="2047"):
        pack_command(0, 0, 100, 2047)


def test_packets_beyond_a_datagram_are_refused():
    for pack in (lambda size: pack_command(0, 0, size), lambda size: pack_telemetry(0.0, 0, size)):
        assert pack(MAX_PACKET_BYTES)
        with pytest.raises(InvalidInput, match=str(MAX_PACKET_BYTES)):
            pack(MAX_PACKET_BYTES + 1)
    with pytest.raises(InvalidInput):
        build_packet(HEADER, bytes(MAX_PACKET_BYTES), 0, 0.0)
    assert 16 + SKY_BYTES + 72 + MAX_CHUNK_BYTES == MAX_PACKET_BYTES


@pytest.mark.parametrize(("first", "stride", "count"), [(1, 0xFFFFFFFF, 3), (0xFFFFFFFF, 1, 2), (2, 0x10002, 0x10000)])
def test_a_selection_ends_where_chunks_can(first, stride, count):
    """However few bits are set: the requested chunks would be looked up one by one."""
    bitmap = (1 | 1 << count - 1).to_bytes((count + 7) // 8, "little")
    with pytest.raises(MalformedPacket, match="beyond"):
        Selection.unpack(struct.pack(">32sIII", bytes(32), first, stride, count) + bitmap)


def test_keys_and_selections_have_limits():
    assert len(messages.unpack_keys(messages.pack_keys([KEY] * 180))) == 180
    for keys in ([], [KEY] * 181):
        with pytest.raises(InvalidInput, match="1 to 180"):
            messages.pack_keys(keys)
    with pytest.raises(InvalidInput):
        Selection.of(KEY, [])
    with pytest.raises(InvalidInput, match="grid"):
        Selection.of(KEY, [0, 3], 2)
    with pytest.raises(InvalidInput, match="grid"):
        Selection.of(KEY, [5, 3], 2)
    with pytest.raises(InvalidInput, match=str(MAX_SELECTION_BITS)):
        Selection.of(KEY, [0, MAX_SELECTION_BITS])
    assert Selection.of(KEY, [0, MAX_SELECTION_BITS - 1]).count == MAX_SELECTION_BITS
    assert Selection.cover(KEY, []) == []
    assert len(Selection.cover(KEY, [0, 1, MAX_SELECTION_BITS, 2 * MAX_SELECTION_BITS])) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"index": -1},
        {"index": 10},
        {"chunks": 0},
        {"chunks": 101},
        {"length_bytes": 101},
        {"value_bytes": 9},
        {"tag": PlacementTag(3, 0, 0, 0, 0)},
        {"tag": PlacementTag(3, 10, 4, 0, 0)},
        {"tag": PlacementTag(3, 2, 3, 0, 0)},
    ],
)
def test_chunk_references_that_contradict_themselves(change):
    fields = {
        "key": KEY,
        "index": 3,
        "chunks": 10,
        "length_bytes": 10,
        "crc": 0,
        "value_bytes": 100,
        "value_crc": 0,
        "tag": PlacementTag(3, 10, 3, 0, 0),
    }
    assert ChunkRef.unpack(ChunkRef(**fields).pack()).index == 3
    with pytest.raises(MalformedPacket):
        ChunkRef.unpack(ChunkRef(**fields | change).pack())


def test_moves_and_addresses_have_bounds():
    for moves in ((MAX_MOVES + 1, 0), (0, -MAX_MOVES - 1)):
        with pytest.raises(MalformedPacket, match=str(MAX_MOVES)):
            messages.unpack_moves(messages.pack_moves(*moves))
    for address in (Address(4096, 0), Address(0, -1), Address(0, 0, 256)):
        with pytest.raises(InvalidInput):
            address.pack()
    assert Address.unpack(Address(4095, 4095, 255).pack()) == Address(4095, 4095, 255)


def test_an_older_reader_takes_the_housekeeping_it_knows():
    known = len(messages.HOUSEKEEPING_FIELDS)
    body = struct.pack(">HH", known + 2, 0) + struct.pack(f">{known + 2}q", *range(known + 2))
    assert list(messages.unpack_housekeeping(body).values()) == list(range(known))
    assert messages.unpack_housekeeping(struct.pack(">HHq", 1, 0, 5)) == {"memory_used_bytes": 5}


def test_batches_know_their_packets():
    headers = bytes(range(20))
    batch = SegmentBatch(headers, 10, [b"abc", b""])
    assert (batch.count, batch.total_bytes) == (2, 23)
    assert batch.datagrams() == [headers[:10] + b"abc", headers[10:]]
    run = SegmentBatch(headers, 8)
    assert (run.count, run.total_bytes) == (3, 20)
    assert run.datagrams() == [headers[:8], headers[8:16], headers[16:]]
    assert single(PING).datagrams() == [PING]


@pytest.mark.parametrize("now_s", [0.0, 1.7e9, 2**32 - 0.5, 2**32 + 3.0])
@pytest.mark.parametrize("ahead_s", [0.0, -0.25, 12.5, -3600.0])
def test_the_time_of_telemetry_survives_the_wrap_of_the_seconds(now_s, ahead_s):
    packet = memoryview(pack_telemetry((now_s + ahead_s) % 2**32, 0, 60))
    assert made_at_s(packet, now_s) - now_s == pytest.approx(ahead_s, abs=2e-5)
