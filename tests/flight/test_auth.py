"""MACs, replays and the gate in C against the Python ones."""

from __future__ import annotations

import ctypes
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flight.parts import exact, library, numbers
from tests.protocol.exchanged import exchanged

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.keys import KeyRing, SecretKey
from skymemory.metrics import Counters
from skymemory.native.twin import backend
from skymemory.protocol import auth
from skymemory.protocol.auth import Authority, ReplayWindow, SatelliteGate, stamp
from skymemory.protocol.wire import (
    SKY_BYTES,
    Address,
    LinkEnd,
    Op,
    SegmentBatch,
    SkyHeader,
    build_packet,
    bulk_batch,
    single,
)

GOLDEN = {
    entry["name"]: bytes.fromhex(entry["hex"].replace(" ", ""))
    for entry in json.loads((Path(__file__).parents[1] / "vectors" / "authenticated.json").read_text("utf-8"))
}
SECRETS = [bytes(range(64, 96)), bytes(range(32)), bytes(range(1, 33))]
RING = KeyRing(
    (
        SecretKey(0x0102, SECRETS[0]),
        SecretKey(7, SECRETS[1], 1_700_000_000.0),
        SecretKey(9, SECRETS[2], 1_900_000_000.0),
    )
)
ON, ANSWERS, EVERY = LEVELS = range(3)
"""As in ``sky_auth``."""
STRANGERS = KeyRing((SecretKey(7, bytes(32)),))
NOW_US = 1_700_000_000_250_000
HERE = Address(2, 9)
BEAM = Address(2, 9, 0xFF)
MAX_SKEW_US = 30_000_000


def keys_in_c(ring: KeyRing) -> tuple[int, Any, bytes]:
    ids = [part for key in ring.keys for part in (key.key_id, round(key.from_s * 1e6))]
    return len(ring.keys), numbers(ids), b"".join(key.secret for key in ring.keys)


def at_level(level: int, ring: KeyRing = RING) -> Authority:
    return Authority(ring, level == EVERY, level == ANSWERS)


def sky_of(packet: bytes) -> int:
    return 8 if packet[0] & 0x10 else 16


def header(
    op: Op, sequence: int = 0, source: Address = BEAM, destination: Address = HERE, ground: int = 7
) -> SkyHeader:
    return SkyHeader(op, destination, source, ground, 0x01020304 + sequence, timestamp_us=5)


@pytest.mark.slow
@pytest.mark.seeded
def test_golden_packets_are_authentic_and_no_other_bit_is() -> None:
    lib, ring = library(), keys_in_c(RING)
    rng = random.Random(1)
    for name, packet in GOLDEN.items():
        level = ANSWERS if name.endswith("covered") else EVERY
        sky = sky_of(packet)
        sent_us = NOW_US if sky == 8 else 0
        assert lib.parts_mac(*ring, level, exact(packet), len(packet), NOW_US, MAX_SKEW_US) == sent_us
        for _ in range(40):
            wrong = bytearray(packet)
            at = rng.randrange(len(packet))
            wrong[at] ^= 1 << rng.randrange(8)
            if rng.random() < 0.5:  # with the CRC that belongs to it: the MAC alone is wrong
                end = min(len(wrong), sky + SKY_BYTES + 72 + 16) if len(packet) > 150 else len(wrong)
                head = wrong[:end]
                native.seal_headers(head, end, sky)
                wrong[:end] = head
            keys = at_level(level).mac_keys
            twin = native.check_macs(bytes(wrong), len(wrong), sky, keys, NOW_US, MAX_SKEW_US)[0]
            if (wrong[0] ^ packet[0]) & 0x10:
                continue  # the twin's caller takes commands and answers apart by this bit
            assert lib.parts_mac(*ring, level, exact(bytes(wrong)), len(wrong), NOW_US, MAX_SKEW_US) == (
                -1 if twin is None else twin
            ), at


def test_an_authentic_packet_without_its_mac_is_the_plain_one() -> None:
    for packet in GOLDEN.values():
        stripped = exact(packet)
        library().sky_mac_strip(stripped, len(packet))
        expected = native.strip_macs(packet, len(packet), sky_of(packet), b"\1")
        assert bytes(stripped)[: len(packet) - 16] == bytes(expected)


@settings(max_examples=100)
@given(
    st.sampled_from([Op.PING, Op.HAS, Op.PONG, Op.SET, Op.DATA]),
    st.binary(max_size=200),
    st.integers(0, 1 << 52),
    st.sampled_from([0, 1, 29_999_999, 30_000_000, 30_000_001, 1 << 31, (1 << 32) - 1, 1 << 32]),
    st.booleans(),
)
def test_packets_are_signed_and_checked_alike(op: Op, body: bytes, now_us: int, off_us: int, before: bool) -> None:
    lib, ring, authority = library(), keys_in_c(RING), Authority(RING, every_packet=True)
    if op in (Op.SET, Op.DATA):
        batch = bulk_batch(header(op), bytes(40) + len(body).to_bytes(4, "big") + bytes(28), [body], 3, now_us / 1e6)
    else:
        batch = single(build_packet(header(op), body, 3, now_us / 1e6))
    signed = authority.sign(batch, now_us / 1e6)
    room = (ctypes.c_uint8 * (len(batch.headers) + 16))(*batch.headers)
    assert lib.parts_sign(*ring, EVERY, room, len(batch.headers), exact(b""), 0, 1, now_us) == len(signed.headers)
    assert bytes(room) == bytes(signed.headers)
    packet = signed.datagrams()[0]
    then_us = max(0, now_us - off_us if before else now_us + off_us)
    twin = native.check_macs(packet, len(packet), sky_of(packet), authority.mac_keys, then_us, MAX_SKEW_US)[0]
    assert lib.parts_mac(*ring, EVERY, exact(packet), len(packet), then_us, MAX_SKEW_US) == (
        -1 if twin is None else twin
    )


@settings(max_examples=60)
@given(
    st.sampled_from([Op.SET, Op.MIGRATE]),
    st.one_of(st.integers(0, 4200), st.integers(0, auth.MAX_SIGNED_CHUNK_BYTES)),
    st.integers(0, 63),
    st.integers(1, 3000),
    st.randoms(use_true_random=False),
)
def test_payloads_are_covered_alike(op: Op, length: int, offset: int, piece: int, rng: random.Random) -> None:
    """By C, by the helper and by its twin, wherever the payload lies and in whatever pieces it comes."""
    ring, authority = keys_in_c(RING), at_level(ANSWERS)
    payload = memoryview(rng.randbytes(offset + length))[offset:]
    plain = bulk_batch(header(op), bytes(40) + length.to_bytes(4, "big") + bytes(28), [payload], 3, NOW_US / 1e6)
    signed = authority.sign(plain, NOW_US / 1e6)
    key_id = authority.signing_key_id(NOW_US / 1e6)
    key = authority.mac_keys[key_id]
    twin = backend.sign_packets(plain.headers, plain.header_bytes, 8, key, key_id, NOW_US, [payload])
    assert bytes(signed.headers) == bytes(twin)
    room = (ctypes.c_uint8 * (len(plain.headers) + 16))(*plain.headers)
    held = bytearray(offset + length + 1)
    held[offset:-1] = payload
    pieces = (ctypes.c_uint8 * (length + 1)).from_buffer(held, offset)
    assert library().parts_sign(*ring, ANSWERS, room, len(plain.headers), pieces, length, piece, NOW_US)
    assert bytes(room) == bytes(twin)
    packet = bytearray(signed.datagrams()[0])
    if length >= 5:
        at_byte = rng.randrange(length - 4)
        packet[-length:] = exchanged(bytes(payload), at_byte)
    for level, wrong in ((ANSWERS, length >= 5), (ON, length > 0)):
        found = library().parts_mac(*ring, level, exact(bytes(packet)), len(packet), NOW_US, MAX_SKEW_US)
        assert found == (-1 if wrong else NOW_US)
        for check in (native.check_macs, backend.check_macs):
            keys = at_level(level).mac_keys
            assert check(packet, len(packet), 8, keys, NOW_US, MAX_SKEW_US) == [None if wrong else NOW_US]


def test_a_packet_with_no_room_for_a_mac_is_not_signed() -> None:
    for length, fits in ((65_359, True), (65_360, False)):
        ref = bytes(40) + length.to_bytes(4, "big") + bytes(28)
        batch = bulk_batch(header(Op.DATA), ref, [bytes(length)], 3, 1.0)
        room = (ctypes.c_uint8 * (len(batch.headers) + 16))(*batch.headers)
        assert (
            bool(library().parts_sign(*keys_in_c(RING), EVERY, room, len(batch.headers), exact(b""), 0, 1, 0)) == fits
        )


# --- Replays ---

commands = st.tuples(
    st.integers(0, 1),
    st.sampled_from([0, 0, 1, 2, 3, 4, 5]),
    st.integers(0, 2),
    st.integers(-50, 90),
    st.integers(0, 3),
)


@settings(max_examples=150)
@given(st.lists(commands, max_size=120), st.integers(2, 6))
def test_a_command_is_taken_once_as_by_the_twin(sent: list[tuple[int, int, int, int, int]], remembered: int) -> None:
    lib, start_us = library(), NOW_US
    it = lib.parts_replay(numbers([start_us, 3, 2, remembered]))
    before = auth.REMEMBERED, auth.MAX_SENDERS, auth.MAX_FORGOTTEN
    auth.REMEMBERED, auth.MAX_SENDERS, auth.MAX_FORGOTTEN = remembered, 3, 2
    try:
        twin = ReplayWindow(start_us)
        for key_id, ground, source, after_s, sequence in sent:
            sent_us = start_us + after_s * 1_000_000
            sender = (key_id, ground, 0 if ground else source)
            ours = lib.parts_first(it, key_id, ground, source, sent_us, sequence)
            assert bool(ours) == twin.first(sender, stamp(sent_us, sequence))
    finally:
        auth.REMEMBERED, auth.MAX_SENDERS, auth.MAX_FORGOTTEN = before


def test_a_forgotten_sender_is_remembered_for_a_minute() -> None:
    """Then its newest command is the floor of all: what was made before counts as seen."""
    lib = library()
    before = auth.MAX_SENDERS
    auth.MAX_SENDERS = 1
    try:
        for after_s in (29, 31, 59, 60, 61, 90):
            it, twin = lib.parts_replay(numbers([NOW_US, 1, 8, 16])), ReplayWindow(NOW_US)
            taken = []
            for ground, at_s, sequence in ((1, 0, 3), (2, after_s, 3), (3, after_s, 4), (4, 0, 2)):
                sent_us = NOW_US + at_s * 1_000_000
                taken.append(bool(lib.parts_first(it, 7, ground, 0, sent_us, sequence)))
                assert taken[-1] == twin.first((7, ground, 0), stamp(sent_us, sequence)), (after_s, ground)
            assert taken == [True, True, True, after_s <= 60]
    finally:
        auth.MAX_SENDERS = before


def test_thousands_of_commands_out_of_order_are_taken_once() -> None:
    lib, rng = library(), random.Random(2)
    it, twin = lib.parts_replay(numbers([NOW_US, 256, 4096, 2048])), ReplayWindow(NOW_US)
    times = [NOW_US + 10 * number for number in range(9000)]
    sent = [time for at in range(0, 9000, 50) for time in rng.sample(times[at : at + 50] * 2, 100)]
    sent += rng.sample(times, 3000)
    for time in sent:
        assert bool(lib.parts_first(it, 1, 7, 0, time, time // 10 % 4)) == twin.first(
            (1, 7, 0), stamp(time, time // 10 % 4)
        )


# --- The gate ---

LINKS: list[LinkEnd] = ["host", SatelliteId(2, 8)]
IN_C = {"host": 0xFF000005, SatelliteId(2, 8): Address(2, 8).pack()}

traffic = st.lists(
    st.tuples(
        st.sampled_from([Op.PING, Op.GET, Op.SET, Op.MIGRATE, Op.PONG, Op.ACK]),
        st.sampled_from([HERE, HERE, Address(3, 3)]),
        st.sampled_from([BEAM, BEAM, Address(1, 1, 0xFF), Address(2, 8)]),
        st.sampled_from(
            ["good", "good", "good", "plain", "stranger", "flipped", "again", "late", "short", "exchanged"]
        ),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=6,
)


def packets_of(op: Op, to: Address, source: Address, kind: str, number: int, now_us: int, level: int = EVERY) -> bytes:
    head = header(op, number, source, to, 0 if not source.shell else 7)
    payload = number.to_bytes(2, "big") * 10
    body = bytes(40) + (20).to_bytes(4, "big") + native.crc32(payload).to_bytes(4, "big") + bytes(24)
    if op in (Op.SET, Op.MIGRATE):
        batch = bulk_batch(head, body, [payload], number, now_us / 1e6)
    else:
        batch = single(build_packet(head, body + payload, number, now_us / 1e6))
    if kind in ("good", "flipped", "late", "again", "short", "exchanged"):
        at_us = now_us - 40_000_000 if kind == "late" else now_us
        batch = at_level(level).sign(batch, at_us / 1e6)
    elif kind == "stranger":
        batch = at_level(level, STRANGERS).sign(batch, now_us / 1e6)
    payloads = [exchanged(payload)] if kind == "exchanged" and batch.payloads is not None else batch.payloads
    packet = bytearray(SegmentBatch(batch.headers, batch.header_bytes, payloads).datagrams()[0])
    if kind == "flipped":
        packet[sky_of(bytes(packet)) + SKY_BYTES + 3] ^= 8
    return bytes(packet)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(LINKS), traffic, st.integers(0, 400)), min_size=1, max_size=5),
    st.sampled_from(LEVELS),
)
def test_the_gate_admits_what_its_twin_admits(events: list[Any], level: int) -> None:
    lib, now_us, number = library(), NOW_US, 0
    refused: list[bytes] = []
    counters = Counters()
    twin = SatelliteGate(
        at_level(level),
        HERE,
        counters,
        lambda packet, link, now_s: refused.append(bytes(packet)),
        now_us / 1e6,
    )
    it = lib.parts_gate(HERE.pack(), *keys_in_c(RING), level, numbers([256, 4096, 2048]), now_us)
    for link, sent, wait_ms in events:
        now_us += wait_ms * 1000
        made: list[bytes] = []
        for op, to, source, kind, count in sent:
            if kind == "again" and made:
                made.append(made[-1])
                continue
            for _ in range(count):
                number += 1
                made.append(packets_of(op, to, source, kind, number, now_us, level))
        for size in sorted({len(packet) for packet in made}):
            run = b"".join(packet for packet in made if len(packet) == size)
            if sent[0][3] == "short":
                run = run[:-30]
            admitted, commanded = twin.admit([(memoryview(run), size)], link, now_us / 1e6)
            data, runs = exact(run), numbers([0] * 3 * 1300)
            count = lib.parts_admit(it, data, len(run), size, IN_C[link], now_us, runs)
            ours = [(bytes(data)[runs[3 * n] : runs[3 * n] + runs[3 * n + 1]], runs[3 * n + 2]) for n in range(count)]
            assert ours == [(bytes(view), segment) for view, segment in admitted]
            out = numbers([0] * 6)
            lib.parts_gated(it, out)
            names = ("packets_received", "packets_refused", "packets_malformed", "packets_replayed")
            assert tuple(out) == (*map(counters.get, names), len(refused), commanded)


def test_the_gate_answers_a_flood_a_hundred_times_a_second() -> None:
    lib, now_us = library(), NOW_US
    it = lib.parts_gate(HERE.pack(), *keys_in_c(RING), 0, numbers([256, 4096, 2048]), now_us)
    out, answered = numbers([0] * 6), []
    twin = SatelliteGate(Authority(RING), HERE, Counters(), lambda packet, *_: answered.append(packet), now_us / 1e6)
    for number in range(200):
        run = packets_of(Op.PING, HERE, BEAM, "plain", number, now_us)
        lib.parts_admit(it, exact(run), len(run), len(run), 0xFF000005, now_us, numbers([0] * 3900))
        twin.admit([(memoryview(run), len(run))], "host", now_us / 1e6)
    lib.parts_gated(it, out)
    assert tuple(out[:5]) == (200, 200, 0, 0, 100)
    assert len(answered) == 100


@pytest.mark.parametrize("length", [0, 1, 51, 52, 59, 60, 68])
def test_short_packets_pass_to_the_machine_which_counts_them(length: int) -> None:
    it = library().parts_gate(HERE.pack(), *keys_in_c(RING), 2, numbers([256, 4096, 2048]), NOW_US)
    for first in (0x18, 0x08):
        run, runs, counters = bytes([first]) + bytes(max(0, length - 1)), numbers([0] * 3900), Counters()
        twin = SatelliteGate(Authority(RING, True), HERE, counters, lambda *_: None, NOW_US / 1e6)
        run = run[:length]
        admitted, _ = twin.admit([(memoryview(run), max(1, length))], SatelliteId(2, 8), NOW_US / 1e6)
        count = library().parts_admit(it, exact(run), length, max(1, length), Address(2, 8).pack(), NOW_US, runs)
        assert count == len(admitted)
