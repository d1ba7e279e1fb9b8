"""Packets sound, damaged and hostile, a satellite to receive them, and what must hold of it afterwards."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from hypothesis import strategies as st
from tests.protocol.datagrams import receive_datagram
from tests.protocol.refs import pack_refs

from skymemory import native
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol import messages
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import (
    OURS,
    Kept,
    Retain,
    Selection,
    pack_dead,
    pack_forget,
    pack_retain,
    pack_retained,
    pack_setting,
)
from skymemory.protocol.satellite.checks import Check, CheckResult, pack_checks, pack_found
from skymemory.protocol.satellite.gossip import Notice, Region
from skymemory.protocol.satellite.machine import SatelliteConfig, SatelliteMachine
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.protocol.wire import (
    CHUNK_REF,
    SKY,
    Address,
    ChunkRef,
    Op,
    SkyHeader,
    build_packet,
    bulk_batch,
    parse_packet,
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
    eviction = EvictionConfig.of(["gossip", "periodic", "migration"])
    return SatelliteMachine(SatelliteConfig(HERE, MEMORY_BYTES, eviction=eviction), SKY_MAP, MoveClock(), 0.0)


def header(op: Op, request_id: int = 1) -> SkyHeader:
    there, back = Address(*HERE), Address(*HERE, 0xFF)
    return SkyHeader(op, *((there, back) if op.is_command else (back, there)), 7, request_id)


def bulk(op: Op, request_id: int = 1, servers: int = 1) -> list[bytes]:
    """Every chunk of VALUE as SET, MIGRATE or DATA."""
    crcs = native.crc32_chunks(VALUE, CHUNK_BYTES)
    refs = pack_refs(KEY, range(9), crcs, CHUNK_BYTES, 2500, zlib.crc32(VALUE), servers, 3, (0, 0))
    payloads = [VALUE[at : at + CHUNK_BYTES] for at in range(0, 2500, CHUNK_BYTES)]
    return bulk_batch(header(op, request_id), refs, payloads, 0, 0.0).datagrams()


DEAD = (KEY, pack_setting(zlib.crc32(VALUE), 0, 0))
SELECTED = Selection.of(KEY, list(range(9))).pack()
SOUND = [
    *bulk(Op.SET),
    *bulk(Op.DATA)[:2],
    *(
        build_packet(header(op), body, 1, 0.0)
        for op, body in [
            (Op.GET, SELECTED),
            (Op.HAS, messages.pack_keys([KEY])),
            (Op.EVICT, messages.pack_keys([KEY])),
            (Op.PING, b""),
            (Op.LIST, messages.pack_list(bytes(32), 9)),
            (Op.ADVANCE, messages.pack_moves(1, 1)),
            (Op.ACK, SELECTED),
            (Op.MISS, SELECTED),
            (Op.PONG, messages.pack_housekeeping({})),
            (Op.UNREACHABLE, b""),
            (Op.RETAIN, pack_retain(Retain.PIN, 60.0, [KEY])),
            (Op.RETAIN, pack_retain(Retain.EXPIRE, 60.0, [KEY])),
            (Op.RETAIN, pack_retain(Retain.TOUCH, 0.0, [KEY])),
            (Op.RETAINED, pack_retained([Kept.DONE])),
            (Op.PRESENCE, messages.pack_presences([None])),
            (Op.GONE, pack_dead([DEAD])),
            (Op.CHECK, pack_checks([Check(*DEAD, 1, 0, 9, CHUNK_BYTES)])),
            (Op.CHECKED, pack_found([CheckResult.LACKING])),
            (Op.FORGET, pack_forget([DEAD], 1.3)),
            (Op.UNSUPPORTED, OURS.pack_unsupported(Op.HAS)),
            (Op.PONG, messages.pack_housekeeping(OURS.figures())),
        ]
    ),
    build_packet(
        SkyHeader(Op.NOTICE, Address(*HERE), Address(*NEIGHBOUR), 0, 3),
        Notice(Address(*NEIGHBOUR), 3, Region(HERE, 1, 1, 1, 1), 9, False, (DEAD,)).pack(),
        1,
        0.0,
    ),
]


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
        1,
        op,
        0,
        status,
        there if draw(st.integers(0, 9)) else draw(addresses),
        draw(addresses),
        draw(GROUNDS),
        draw(st.one_of(st.integers(1, 4), u32)),
        draw(u8),
        draw(u8),
        0,
        draw(u32),
        draw(i32),
        draw(i32),
        draw(u16),
        0,
        0,
    )
    payload = b""
    if op in (Op.SET, Op.MIGRATE, Op.DATA):
        payload = draw(st.one_of(st.binary(max_size=30), st.sampled_from([VALUE[:CHUNK_BYTES], VALUE[-100:]])))
        key = draw(st.sampled_from([KEY, bytes(32)]))
        crc, value_crc = zlib.crc32(payload), draw(st.sampled_from([zlib.crc32(VALUE), 1]))
        number, servers = draw(u32), draw(st.one_of(st.integers(1, 12), u16))
        server = (number - 1) % servers + 1 if servers and draw(st.integers(0, 4)) else draw(u16)
        chunks = number + draw(st.integers(0, 9)) if number < 2**31 and draw(st.integers(0, 4)) else draw(u32)
        body = CHUNK_REF.pack(
            key,
            number,
            chunks,
            len(payload),
            crc,
            draw(st.one_of(st.just(2500), u32)),
            value_crc,
            servers,
            server,
            draw(st.sampled_from([3, 3, 1, 2, 4, 5, 0, 6])),
            0,
            0,
            draw(i32),
            draw(i32),
        )
    else:
        selection = struct.pack(">32sIII", KEY, draw(u32), draw(u32), draw(u32))
        bitmap = draw(st.one_of(st.binary(max_size=4), st.just(b"\xff" * 9000)))
        presence = struct.pack(
            ">IIIIIHHBBHii",
            *(draw(u32) for _ in range(5)),
            *(draw(u16) for _ in range(2)),
            3,
            0,
            draw(u16),
            draw(i32),
            draw(i32),
        )
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
    """Within its budget; every chunk is what it says it is and can be announced."""
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
    receive_datagram(machine, build_packet(header(Op.PING), b"", 0, 0.0), GROUND, 1.0)
    ((batch, to),) = machine.datagrams_to_send(1.0)
    return to == GROUND and parse_packet(batch.datagrams()[0]).header.op is Op.PONG
