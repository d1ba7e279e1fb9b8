"""Golden bytes of every message kind (``wire.json``): the frozen wire format, version 1.

``wire.json`` was written once and is meant for other implementations too. Here every packet is rebuilt from what it
says and read back, and one is derived by hand, bit by bit, with no code of ours.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.protocol.refs import pack_refs

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.native.twin import backend
from skymemory.protocol import messages
from skymemory.protocol.messages import (
    HOUSEKEEPING_FIELDS,
    Capabilities,
    ChunkPresence,
    Kept,
    Retain,
    Selection,
    pack_dead,
    pack_forget,
    pack_retain,
    pack_retained,
    pack_setting,
    unpack_dead,
    unpack_forget,
    unpack_retain,
    unpack_retained,
)
from skymemory.protocol.satellite.checks import Check, CheckResult, pack_checks, pack_found, unpack_found
from skymemory.protocol.satellite.gossip import Notice, Region
from skymemory.protocol.satellite.routing import Declaration, LinksBody
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    FLAG_SETTLED,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SkyHeader,
    Status,
    build_packet,
    bulk_batch,
    parse_packet,
)

VECTORS = {entry["name"]: entry for entry in json.loads((Path(__file__).parent / "wire.json").read_text("utf-8"))}

KEY, OTHER_KEY = bytes(range(32)), bytes(range(32, 64))
VALUE = b"SkyMemory keeps KV caches in orbit"
HERE, BEAM = Address(2, 9), Address(2, 9, 0xFF)
NOW_S = 1_700_000_000.25
SEQUENCE = 5
TAG = PlacementTag(strategy=3, servers=10, server=1, slot_moves=-2, plane_moves=1)
PRESENCE = ChunkPresence(1, 3, 16, 34, 0xDEADBEEF, 1, TAG)


def header(op: Op, status: Status = Status.OK, flags: int = 0) -> SkyHeader:
    there, back = (HERE, BEAM) if op.is_command else (BEAM, HERE)
    return SkyHeader(
        op,
        there,
        back,
        ground=7,
        request_id=0x01020304,
        status=status,
        hop_limit=64,
        timestamp_us=1_000_000,
        slot_moves=-2,
        plane_moves=1,
        credit=256,
        flags=flags,
    )


def chunk(op: Op, value: bytes = VALUE, index: int = 1) -> bytes:
    """One packet with chunk ``index`` of ``value`` in chunks of 16 bytes."""
    crcs = native.crc32_chunks(value, 16) if value else np.zeros(1, np.uint32)
    refs = pack_refs(KEY, [index], crcs, 16, len(value), native.crc32(value), 10, 3, (-2, 1))
    payload = value[16 * index : 16 * index + 16]
    (packet,) = bulk_batch(header(op), refs, [payload], SEQUENCE, NOW_S).datagrams()
    return packet


def control(op: Op, body: bytes, status: Status = Status.OK, flags: int = 0) -> bytes:
    return build_packet(header(op, status, flags), body, SEQUENCE, NOW_S)


LINKS = LinksBody(True, (-3, 1), 1_700_000_000_250, [Declaration(SatelliteId(2, 8), 0b0101, 1_700_000_000_251)])
DEAD = ((KEY, pack_setting(0xDEADBEEF, -2, 1)), (OTHER_KEY, pack_setting(5, 3, -4)))
SOME = Selection.of(KEY, [1, 11, 31], 10)
HOUSEKEEPING = messages.pack_housekeeping({name: (i + 1) << i for i, name in enumerate(HOUSEKEEPING_FIELDS)})
"""Of these the golden packet has the 22 that there were at first: fields are only ever appended."""
WITH_WORD = messages.pack_housekeeping({"chunks_held": 7} | Capabilities(1, 2, 0x1FFE, 0x701).figures())[: 4 + 40 * 8]
"""Of these, the 40 that there were when the word came."""

BUILT = {
    "set": chunk(Op.SET),
    "set-empty-value": chunk(Op.SET, b"", 0),
    "migrate": chunk(Op.MIGRATE),
    "data": chunk(Op.DATA),
    "data-last-chunk": chunk(Op.DATA, index=2),
    "get": control(Op.GET, SOME.pack()),
    "has": control(Op.HAS, messages.pack_keys([KEY, OTHER_KEY])),
    "evict": control(Op.EVICT, messages.pack_keys([KEY])),
    "ping": control(Op.PING, b""),
    "list": control(Op.LIST, messages.pack_list(bytes(32), 90)),
    "advance": control(Op.ADVANCE, messages.pack_moves(-3, 1)),
    "links": control(Op.LINKS, LINKS.pack()),
    "ack": control(Op.ACK, SOME.pack()),
    "ack-full": control(Op.ACK, Selection.of(KEY, [1]).pack(), Status.FULL),
    "miss": control(Op.MISS, SOME.pack()),
    "miss-settled": control(Op.MISS, SOME.pack(), flags=FLAG_SETTLED),
    "busy": control(Op.BUSY, SOME.pack()),
    "presence": control(Op.PRESENCE, messages.pack_presences([PRESENCE, None])),
    "listed": control(Op.LISTED, messages.pack_listed([(KEY, PRESENCE)])),
    "evicted": control(Op.EVICTED, messages.pack_count(470)),
    "advanced": control(Op.ADVANCED, messages.pack_moves(-3, 1)),
    "pong": control(Op.PONG, struct.pack(">HH", 22, 0) + HOUSEKEEPING[4 : 4 + 22 * 8]),
    "pong-word": control(Op.PONG, struct.pack(">HH", 40, 0) + WITH_WORD[4:]),
    "notice": control(Op.NOTICE, Notice(HERE, 77, Region(SatelliteId(2, 9), 1, 1, 2, 1), 6, True, DEAD).pack()),
    "retain": control(Op.RETAIN, pack_retain(Retain.PIN, 1_700_000_060.5, [KEY, OTHER_KEY])),
    "retained": control(Op.RETAINED, pack_retained([Kept.DONE, Kept.REFUSED])),
    "check": control(Op.CHECK, pack_checks([Check(*DEAD[0], 10, 3, 40, 6144), Check(*DEAD[1], 10, 9, 10, 65_375)])),
    "forget": control(Op.FORGET, pack_forget(DEAD, 1.3)),
    "checked-settled": control(Op.CHECKED, pack_found([CheckResult.LACKING]), flags=FLAG_SETTLED),
    "checked": control(Op.CHECKED, pack_found([CheckResult.WHOLE, CheckResult.LACKING, CheckResult.NO_ROOM])),
    "gone": control(Op.GONE, pack_dead(DEAD[:1])),
    "unreachable": control(Op.UNREACHABLE, b"", Status.HOP_LIMIT),
    "unsupported": control(Op.UNSUPPORTED, Capabilities(1, 2, 0x1FFE, 0x701).pack_unsupported(0x2A)),
}


def golden(name: str) -> bytes:
    return bytes.fromhex(VECTORS[name]["hex"].replace(" ", ""))


def test_every_operation_and_status_that_is_sent_has_a_vector():
    assert set(VECTORS) == set(BUILT)
    assert {parse_packet(golden(name)).header.op for name in VECTORS} == set(Op)


@pytest.mark.parametrize("name", BUILT)
def test_packets_are_built_byte_for_byte(name):
    assert BUILT[name].hex() == golden(name).hex()


@pytest.mark.parametrize("name", BUILT)
def test_packets_are_accepted_and_read_back(name):
    packet = golden(name)
    for implementation in (native, backend):
        assert implementation.verify_segments(packet, len(packet)) == b"\0"
    parsed = parse_packet(packet)
    status = {"ack-full": Status.FULL, "unreachable": Status.HOP_LIMIT}.get(name, Status.OK)
    assert parsed.header == header(parsed.header.op, status, FLAG_SETTLED if name.endswith("-settled") else 0)
    assert parsed.header.op.name == name.split("-")[0].upper()


def test_bodies_are_read_back():
    def body(name: str) -> memoryview:
        return parse_packet(golden(name)).body

    for name in ("get", "ack", "miss", "miss-settled", "busy"):
        assert Selection.unpack(body(name)) == SOME and SOME.indices() == [1, 11, 31]
    assert messages.unpack_keys(body("has")) == [KEY, OTHER_KEY]
    assert messages.unpack_keys(body("evict")) == [KEY]
    assert messages.unpack_list(body("list")) == (bytes(32), 90)
    assert messages.unpack_moves(body("advance")) == messages.unpack_moves(body("advanced")) == (-3, 1)
    assert LinksBody.unpack(body("links")) == LINKS
    assert messages.unpack_presences(body("presence")) == [PRESENCE, None]
    assert messages.unpack_listed(body("listed")) == [(KEY, PRESENCE)]
    assert messages.unpack_count(body("evicted")) == 470
    region = Region(SatelliteId(2, 9), north=1, south=1, west=2, east=1)
    assert Notice.unpack(body("notice")) == Notice(HERE, 77, region, 6, True, DEAD)
    assert unpack_retain(body("retain")) == (Retain.PIN, 1_700_000_060.5, [KEY, OTHER_KEY])
    assert unpack_retained(body("retained")) == [Kept.DONE, Kept.REFUSED]
    assert unpack_dead(body("gone")) == list(DEAD[:1])
    assert unpack_forget(body("forget")) == (list(DEAD), 1.3)
    assert unpack_found(body("checked-settled")) == [CheckResult.LACKING]
    assert list(messages.unpack_housekeeping(body("pong")).values()) == [(i + 1) << i for i in range(22)]
    word = Capabilities.of_figures(messages.unpack_housekeeping(body("pong-word")))
    assert word == Capabilities(1, 2, 0x1FFE, 0x701)
    assert Capabilities.unpack_unsupported(body("unsupported")) == (0x2A, Capabilities(1, 2, 0x1FFE, 0x701))
    for name, index in (("set", 1), ("migrate", 1), ("data", 1), ("data-last-chunk", 2)):
        ref, payload = ChunkRef.unpack(body(name)), bytes(body(name)[CHUNK_REF_BYTES:])
        tag = PlacementTag(3, 10, index, -2, 1)
        assert ref == ChunkRef(KEY, index, 3, len(payload), backend.crc32(payload), 34, backend.crc32(VALUE), tag)
        assert payload == VALUE[16 * index :][:16]
    empty = ChunkRef.unpack(body("set-empty-value"))
    assert (empty.chunks, empty.length_bytes, empty.crc, empty.value_bytes, empty.value_crc) == (1, 0, 0, 0, 0)


def bitwise_crc32(data: bytes) -> int:
    """CRC-32 as ISO 3309 writes it, a bit at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0xEDB88320 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_a_set_derived_by_hand():
    """The packet "set" field by field, as docs/reference/wire.md has it, with nothing of ours."""
    payload = b"KV caches in orb"
    assert payload == VALUE[16:32]
    primary = (
        "18c0"  # version 000, command 1, secondary header 1, APID 0x0C0
        "c005" + format(8 + 44 + 72 + 16 - 7, "04x")  # unsegmented 11, count 5  # whole packet less 6, less 1
    )
    secondary = "0100"  # function code: the operation; checksum: not used
    sky = (
        "01010000"  # version 1, SET, flags 0, status OK
        "00002009"  # to shell 0, plane 2, slot 9
        "ff002009"  # from the ground behind the beam of (2, 9)
        "00000007"  # ground host 7
        "01020304"  # request
        "40000000"  # hop limit 64, hop count 0, congestion 0
        "000f4240"  # 1,000,000 µs
        "fffffffe00000001"  # -2 slot moves, 1 plane move
        "01000000"  # credit 256 × 4 KiB, key id 0
    )
    reference = (
        KEY.hex()
        + "00000002"  # chunk 2 (1-based)
        + "00000003"  # of 3
        + "00000010"  # 16 bytes
        + format(bitwise_crc32(payload), "08x")
        + "00000022"  # of a value of 34 bytes
        + format(bitwise_crc32(VALUE), "08x")
        + "000a0002"  # 10 servers, server 2 (1-based)
        + "03000000"  # rotation_hop, replica, spare
        + "fffffffe00000001"  # set at -2 slot moves, 1 plane move
    )
    covered = bytearray.fromhex(primary + secondary + sky + reference)
    covered[8 + 20 : 8 + 24] = bytes(4)
    crc = bitwise_crc32(bytes(covered))
    packet = primary + secondary + sky + format(crc, "08x") + reference + payload.hex()
    assert packet == golden("set").hex()


def test_the_header_crc_is_what_the_reference_says():
    """Over all but the CRC itself, with the four bytes that forwarders change as zero."""
    for name in VECTORS:
        packet = bytearray(golden(name))
        sky = 8 if packet[0] & 0x10 else 16
        end = sky + 44 + 72 if packet[sky + 1] in (0x01, 0x05, 0x42) else len(packet)
        (crc,) = struct.unpack_from(">I", packet, sky + 40)
        packet[sky + 20 : sky + 24] = bytes(4)
        assert bitwise_crc32(bytes(packet[: sky + 40] + packet[sky + 44 : end])) == crc
