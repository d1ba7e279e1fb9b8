"""Packets in C: golden bytes, and the same verdict as the Python parsers on whatever comes."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.flight.parts import exact, library, numbers

from skymemory import native
from skymemory.errors import MalformedPacket
from skymemory.protocol import messages
from skymemory.protocol.messages import Capabilities, Selection
from skymemory.protocol.satellite.checks import unpack_checks, unpack_found
from skymemory.protocol.satellite.gossip import Notice
from skymemory.protocol.satellite.routing import LinksBody
from skymemory.protocol.wire import (
    SKY_BYTES,
    Address,
    ChunkRef,
    Op,
    SkyHeader,
    Status,
    UnknownOperation,
    build_packet,
    parse_packet,
)

VECTORS = Path(__file__).parents[1] / "vectors"
GOLDEN = [
    bytes.fromhex(entry["hex"].replace(" ", ""))
    for name in ("wire", "authenticated")
    for entry in json.loads((VECTORS / f"{name}.json").read_text("utf-8"))
]
PLAIN = [packet for packet in GOLDEN if not packet[8 + 2 if packet[0] & 0x10 else 16 + 2] & 1]
NOW_US = 1_700_000_000_250_000
SOUND, MALFORMED, UNKNOWN, BODY = 0, 1, 4, 5

BODIES: dict[int, Callable[[memoryview], Any]] = {
    Op.GET: Selection.unpack,
    Op.ACK: Selection.unpack,
    Op.MISS: Selection.unpack,
    Op.BUSY: Selection.unpack,
    Op.HAS: messages.unpack_keys,
    Op.EVICT: messages.unpack_keys,
    Op.LIST: messages.unpack_list,
    Op.ADVANCE: messages.unpack_moves,
    Op.ADVANCED: messages.unpack_moves,
    Op.NOTICE: Notice.unpack,
    Op.LINKS: LinksBody.unpack,
    Op.RETAIN: messages.unpack_retain,
    Op.CHECK: unpack_checks,
    Op.FORGET: messages.unpack_forget,
    Op.PRESENCE: messages.unpack_presences,
    Op.LISTED: messages.unpack_listed,
    Op.EVICTED: messages.unpack_count,
    Op.PONG: messages.unpack_housekeeping,
    Op.RETAINED: messages.unpack_retained,
    Op.CHECKED: unpack_found,
    Op.GONE: messages.unpack_dead,
    Op.UNSUPPORTED: Capabilities.unpack_unsupported,
    Op.SET: ChunkRef.unpack,
    Op.MIGRATE: ChunkRef.unpack,
    Op.DATA: ChunkRef.unpack,
}


def body_verdict(op: int, body: memoryview) -> bool:
    try:
        BODIES.get(op, bytes)(body)
    except MalformedPacket:
        return False
    return True


def verdict_of(packet: bytes) -> int:
    """As ``sky_packet_check`` gives it, by the Python parsers."""
    code = native.verify_segments(packet, max(1, len(packet)))
    if not packet or code[0]:
        return code[0] if packet else MALFORMED
    try:
        parsed = parse_packet(packet)
    except UnknownOperation:
        return UNKNOWN
    except MalformedPacket:
        return MALFORMED
    body = parsed.body
    if parsed.header.op in (Op.SET, Op.MIGRATE, Op.DATA):
        body = body[:72]
    elif parsed.header.flags & 1:
        body = body[:-16]
    return SOUND if body_verdict(parsed.header.op, body) else BODY


def check(packet: bytes) -> int:
    return library().sky_packet_check(exact(packet), len(packet))


@pytest.mark.parametrize("packet", PLAIN, ids=lambda packet: f"{packet[9 if packet[0] & 0x10 else 17]:#x}")
def test_golden_packets_are_read_and_made_again(packet: bytes) -> None:
    lib, out = library(), (ctypes.c_uint8 * len(packet))()
    if check(packet) == UNKNOWN:
        assert verdict_of(packet) == UNKNOWN
        return
    assert check(packet) == verdict_of(packet) == SOUND
    assert lib.parts_rebuild(exact(packet), len(packet), NOW_US, out) == len(packet)
    assert bytes(out).hex() == packet.hex()


@pytest.mark.parametrize("packet", GOLDEN)
def test_a_golden_packet_with_any_wrong_bit_gets_the_verdict_of_the_twin(packet: bytes) -> None:
    """Whatever is wrong in one bit; and with the checksum made right again, so that the parsers see it."""
    sky = 8 if packet[0] & 0x10 else 16
    end = sky + SKY_BYTES + 72 if packet[sky + 1] in (1, 5, 0x42) else len(packet)
    rng = random.Random(len(packet))
    for _ in range(60):
        bits = bytearray(packet)
        bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
        assert check(bytes(bits)) == verdict_of(bytes(bits))
        head = bits[: end + (16 if bits[sky + 2] & 1 and end != len(packet) else 0)]
        if len(head) <= len(bits):
            native.seal_headers(head, len(head), sky)
            sealed = bytes(head) + bytes(bits[len(head) :])
            assert check(sealed) == verdict_of(sealed), sealed.hex()
        cut = bytes(bits[: rng.randrange(len(bits))])
        assert check(cut) == verdict_of(cut)


words = st.sampled_from([0, 1, 2, 3, 4, 5, 90, 100, 130, 180, 181, 360, 361, 65535, 65536, 1 << 30, (1 << 32) - 1])
parts = st.one_of(
    st.binary(max_size=48),
    words.map(lambda word: word.to_bytes(4, "big")),
    st.tuples(words, words).map(
        lambda pair: (pair[0] & 0xFFFF).to_bytes(2, "big") + (pair[1] & 0xFFFF).to_bytes(2, "big")
    ),
    st.integers(0, 70).map(bytes),
)


@settings(max_examples=400)
@given(
    st.sampled_from([*Op]) | st.integers(0, 255),
    st.lists(parts, max_size=6).map(b"".join) | st.binary(max_size=300),
    st.integers(0, 7),
    st.sampled_from([0, 1, 2, 3, 5]),
    st.sampled_from([0, 5, -1, 1 << 30, -(1 << 30), (1 << 30) + 1, -(1 << 31)]),
)
def test_any_sealed_packet_gets_the_verdict_of_the_twin(
    op: int, body: bytes, flags: int, status: int, moves: int
) -> None:
    header = SkyHeader(Op.PING, Address(1, 2), Address(3, 4, 0xFF), 7, 9)
    packet = bytearray(build_packet(header, body, 3, 0.0))
    packet[6] = packet[9] = op
    packet[10], packet[11] = flags, status
    packet[8 + 28 : 8 + 32] = moves.to_bytes(4, "big", signed=True)
    if op >= 0x40:
        packet = packet[:6] + bytes(10) + packet[8:]
        packet[0] &= 0xEF
    packet[4:6] = (len(packet) - 7).to_bytes(2, "big")
    sky = 8 if op < 0x40 else 16
    carried = op in (1, 5, 0x42)
    end = min(len(packet), sky + SKY_BYTES + 72 + 16 * (flags & 1)) if carried else len(packet)
    head = bytearray(packet[:end])
    native.seal_headers(head, len(head), sky)
    whole = bytes(head + packet[end:])
    assert check(whole) == verdict_of(whole)


BODY_HINTS = st.sampled_from([packet[60 if not packet[0] & 0x10 else 52 :] for packet in PLAIN])


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(BODIES)),
    BODY_HINTS,
    st.lists(st.tuples(st.integers(0, 400), words), max_size=4),
    st.integers(-2, 40),
)
def test_any_body_gets_the_verdict_of_the_twin(op: int, hint: bytes, writes: list[tuple[int, int]], more: int) -> None:
    body = bytearray(hint + bytes(more) if more >= 0 else hint[:more])
    for at, word in writes:
        if body:
            at %= len(body)
            body[at : at + 4] = word.to_bytes(4, "big")[: len(body) - at]
    assert library().sky_body_check(op, exact(bytes(body)), len(body)) == body_verdict(op, memoryview(bytes(body)))


def test_checks_and_presences_at_their_bounds_get_the_verdict_of_the_twin() -> None:
    verdicts = set()
    for number in (0, 1, 3, 4, 5):
        for servers in (0, 3, 4, 65535):
            for chunks in (0, 3, 4):
                for length in (0, 65_375, 65_376):
                    share = servers.to_bytes(2, "big") + number.to_bytes(2, "big")
                    check_body = (
                        bytes([0, 1, 0, 0]) + bytes(44) + share + chunks.to_bytes(4, "big") + length.to_bytes(4, "big")
                    )
                    presence = number.to_bytes(4, "big") + chunks.to_bytes(4, "big") + bytes(12) + share + bytes(12)
                    for op, body in ((Op.CHECK, check_body), (Op.PRESENCE, bytes([0, 1, 0, 0]) + presence)):
                        verdict = library().sky_body_check(op, exact(body), len(body))
                        assert verdict == body_verdict(op, memoryview(body))
                        verdicts.add((op, verdict))
    assert len(verdicts) == 4


@settings(max_examples=200)
@given(st.sampled_from(PLAIN), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3))
def test_headers_are_read_alike(packet: bytes, writes: list[tuple[int, int]]) -> None:
    packet = bytearray(packet)
    for at, value in writes:
        packet[at % len(packet)] = value
    fields = numbers([0] * 17)
    verdict = library().parts_parse(exact(bytes(packet)), len(packet), fields)
    try:
        header = parse_packet(bytes(packet)).header
    except UnknownOperation:
        assert verdict == UNKNOWN
        return
    except MalformedPacket:
        assert verdict == MALFORMED
        return
    assert verdict == SOUND
    addresses = header.destination.pack(), header.source.pack()
    journey = header.hop_limit, header.hop_count, header.congestion
    moves = header.slot_moves, header.plane_moves
    expected = (header.op, header.flags, header.status, *journey, header.credit, header.key_id, *addresses)
    assert tuple(fields[:15]) == (*expected, header.ground, header.request_id, header.timestamp_us, *moves)
    assert fields[15] + fields[16] == len(packet)


@settings(max_examples=150)
@given(st.integers(0, (1 << 32) * 1_000_000 - 1), st.integers(0, 0x3FFF))
@example(1_764_000_000_999_999, 0)
def test_the_time_of_telemetry_is_that_of_the_twin(time_us: int, sequence: int) -> None:
    header = SkyHeader(Op.EVICTED, Address(1, 2), Address(3, 4), 7, 9, Status.OK, timestamp_us=1)
    packet = build_packet(header, bytes(4), sequence, time_us / 1e6)
    out = (ctypes.c_uint8 * len(packet))()
    time_us = round(time_us / 1e6 * 1e6)
    assert library().parts_rebuild(exact(packet), len(packet), time_us, out)
    assert bytes(out) == packet


indices = st.one_of(
    st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True).map(sorted),
    st.tuples(st.integers(0, 99), st.integers(1, 12), st.integers(1, 50)).map(
        lambda t: list(range(t[0], t[0] + t[1] * t[2], t[1]))
    ),
    st.lists(st.integers(0, (1 << 32) - 2), min_size=1, max_size=5, unique=True).map(sorted),
)


@settings(max_examples=200)
@given(indices)
def test_selections_cover_as_the_twin_has_it(chosen: list[int]) -> None:
    lib, key = library(), bytes(range(32))
    stride = 0
    taken, made = 0, []
    expected = [selection.pack() for selection in Selection.cover(key, chosen)]
    if expected:
        stride = Selection.unpack(expected[0]).stride
    while taken < len(chosen):
        rest = (ctypes.c_uint32 * (len(chosen) - taken))(*chosen[taken:])
        out, written = (ctypes.c_uint8 * 9000)(), ctypes.c_size_t()
        count = lib.parts_cover(key, rest, len(rest), stride, out, 44 + 8192, ctypes.byref(written))
        assert count
        made.append(bytes(out[: written.value]))
        taken += count
    assert made == expected


@settings(max_examples=150)
@given(st.integers(0, 3), st.integers(1, 8), st.integers(50, 80), st.data())
def test_runs_are_one_journey_and_count_hops_as_the_twin_has_it(kind: int, count: int, segment: int, data: Any) -> None:
    first = bytearray(PLAIN[kind][:segment].ljust(segment, b"\1"))
    run = bytearray(first * count)
    for at in data.draw(st.lists(st.integers(0, len(run) - 1), max_size=2)):
        run[at] ^= data.draw(st.sampled_from([1, 0x40, 0x80]))
    run = run[: data.draw(st.integers(max(1, len(run) - segment), len(run)))]
    lib = library()
    assert lib.sky_same_journey(exact(bytes(run)), len(run), segment) == native.same_journey(bytes(run), segment)
    counted = exact(bytes(run))
    try:
        expected = native.count_hops(bytes(run), segment)
    except ValueError:
        expected = None
    assert lib.sky_count_hops(counted, len(run), segment) == (expected is not None)
    assert bytes(counted) == bytes(run if expected is None else expected)


@settings(max_examples=100)
@given(st.binary(max_size=700), st.integers(0, (1 << 32) - 1))
def test_crc_sha_and_hmac(data: bytes, start: int) -> None:
    lib, digest = library(), (ctypes.c_uint8 * 32)()
    assert lib.sky_crc32(start, exact(data), len(data)) == zlib.crc32(data, start)
    sha = (ctypes.c_uint8 * 256)()
    lib.sky_sha_begin(sha)
    for at in range(0, len(data), 97):
        lib.sky_sha_take(sha, exact(data[at : at + 97]), len(data[at : at + 97]))
    lib.sky_sha_end(sha, digest)
    assert bytes(digest) == hashlib.sha256(data).digest()
    secret = bytes(range(32))
    lib.parts_hmac(secret, exact(data), len(data), digest)
    assert bytes(digest) == hmac.digest(secret, data, "sha256")
