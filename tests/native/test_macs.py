"""MACs of whole runs: the compiled helper and its twin sign, check and strip alike, as the standard library would."""

from __future__ import annotations

import hashlib
import hmac
import random
import subprocess
import sys
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skymemory.native.twin import backend
from skymemory.protocol.wire import Address, ChunkRef, Op, PlacementTag, SkyHeader, build_packet, bulk_batch

KEYS = {1: bytes(range(32)), 9: bytes(32)}
NOW_US = 1_700_000_000_250_000
SKEW_US = 30_000_000


def packets(op: Op, count: int = 3) -> tuple[bytes, int, list[bytes], int]:
    """Headers, their width, payloads, and where the SKY header begins."""
    header = SkyHeader(op, Address(2, 9), Address(2, 9, 0xFF), 7, 5)
    if op in (Op.SET, Op.DATA, Op.MIGRATE):
        payloads = [bytes([number]) * 50 for number in range(count)]
        payloads[-1] = payloads[-1][:20]
        tag = PlacementTag(1, 1, 0, 0, 0)
        refs = b"".join(
            ChunkRef(bytes(32), number, count, len(payload), backend.crc32(payload), 150, 0, tag).pack()
            for number, payload in enumerate(payloads)
        )
        batch = bulk_batch(header, refs, payloads, 16_382, NOW_US / 1e6)
        return bytes(batch.headers), batch.header_bytes, payloads, 16 if op is Op.DATA else 8
    packet = build_packet(header, b"body" * 9, 3, NOW_US / 1e6)
    return packet, len(packet), [b""], 16 if op in (Op.ACK, Op.PONG) else 8


def joined(headers: bytes | bytearray, width: int, payloads: list[bytes]) -> bytes:
    rows = [bytes(headers[at : at + width]) for at in range(0, len(headers), width)]
    return b"".join(row + payload for row, payload in zip(rows, payloads, strict=True))


@pytest.mark.parametrize("op", [Op.SET, Op.MIGRATE, Op.DATA, Op.EVICT, Op.PONG])
def test_what_is_signed_is_authentic_and_comes_back_plain(impl: ModuleType, op: Op) -> None:
    headers, width, payloads, sky = packets(op)
    time_us = NOW_US if sky == 8 else 0
    signed = impl.sign_packets(headers, width, sky, KEYS[9], 9, time_us)
    assert signed == backend.sign_packets(headers, width, sky, KEYS[9], 9, time_us)
    covered = bytearray(signed[:width])
    covered[sky + 20 : sky + 24] = covered[sky + 40 : sky + 44] = bytes(4)
    expected = hmac.new(KEYS[9], (time_us >> 32).to_bytes(4, "big") + covered, hashlib.sha256).digest()[:16]
    assert signed[width : width + 16] == expected
    run, segment = joined(signed, width + 16, payloads), width + 16 + len(payloads[0])
    assert impl.verify_segments(run, segment) == bytes(len(payloads))
    assert impl.check_macs(run, segment, sky, KEYS, NOW_US + 5, SKEW_US) == [time_us] * len(payloads)
    plain = bytearray(joined(headers, width, payloads))
    if sky == 8:  # the time of signing stays
        low = (NOW_US & 0xFFFFFFFF).to_bytes(4, "big")
        rows = bytearray(headers)
        for at in range(0, len(rows), width):
            rows[at + 32 : at + 36] = low
        impl.seal_headers(rows, width, sky)
        plain = bytearray(joined(rows, width, payloads))
    assert impl.strip_macs(run, segment, sky, b"\1" * len(payloads)) == plain
    assert impl.strip_macs(run, segment, sky, bytes(len(payloads))) == b""


def test_a_time_far_off_another_key_or_any_changed_byte_is_not_authentic(impl: ModuleType) -> None:
    headers, width, _, sky = packets(Op.EVICT)
    signed = bytes(impl.sign_packets(headers, width, sky, KEYS[1], 1, NOW_US))

    def check(packet: bytes, now_us: int = NOW_US, keys: dict[int, bytes] = KEYS) -> list[int | None]:
        found: list[int | None] = impl.check_macs(packet, len(packet), sky, keys, now_us, SKEW_US)
        return found

    for ahead_us in (-SKEW_US, SKEW_US):
        assert check(signed, NOW_US - ahead_us) == [NOW_US]
        assert check(signed, NOW_US - ahead_us - (1 if ahead_us > 0 else -1)) == [None]
    assert check(signed, NOW_US + (1 << 32)) == [None], "the high half is not sent, and covered"
    assert check(signed, keys={1: KEYS[9]}) == check(signed, keys={}) == check(signed[:40]) == [None]
    forwarders, crc = set(range(28, 32)), set(range(48, 52))
    for at in range(len(signed)):
        changed = signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :]
        assert check(changed) == [NOW_US if at in forwarders else None], at
        if at not in forwarders | crc:  # with the CRC that belongs to it: the MAC alone is wrong
            sealed = bytearray(changed)
            impl.seal_headers(sealed, len(sealed), sky)
            assert check(bytes(sealed)) == [None], at


COVERING = {1: random.Random(1).randbytes(32 + 1040), 9: random.Random(9).randbytes(32 + 1040)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.integers(0, 2100), st.integers(0, 65_359)),
    st.integers(0, 63),
    st.sampled_from([Op.SET, Op.MIGRATE]),
    st.randoms(use_true_random=False),
)
def test_payloads_are_covered_alike_wherever_they_lie(
    fast: ModuleType, length: int, offset: int, op: Op, dice: random.Random
) -> None:
    payload = memoryview(dice.randbytes(offset + length))[offset:]
    headers, width, _, sky = packets(op, 1)
    signed = [impl.sign_packets(headers, width, sky, COVERING[9], 9, NOW_US, [payload]) for impl in (backend, fast)]
    assert signed[0] == signed[1]
    plain = backend.sign_packets(headers, width, sky, COVERING[9][:32], 9, NOW_US)
    assert (plain == signed[0]) == (not length)


@pytest.mark.parametrize("op", [Op.SET, Op.MIGRATE, Op.DATA, Op.EVICT, Op.PONG])
def test_of_a_run_any_changed_byte_of_a_covered_payload_is_seen(impl: ModuleType, op: Op) -> None:
    headers, width, payloads, sky = packets(op)
    time_us, covers = NOW_US if sky == 8 else 0, op in (Op.SET, Op.MIGRATE)
    signed = impl.sign_packets(headers, width, sky, COVERING[9], 9, time_us, payloads if covers else None)
    run, segment = joined(signed, width + 16, payloads), width + 16 + len(payloads[0])
    assert impl.check_macs(run, segment, sky, COVERING, NOW_US + 5, SKEW_US) == [time_us] * len(payloads)
    plain_keys = {key_id: key[:32] for key_id, key in COVERING.items()}
    plain = impl.check_macs(run, segment, sky, plain_keys, NOW_US, SKEW_US)
    assert plain == [None if covers else time_us] * len(payloads)
    for number, payload in enumerate(payloads):
        for at in range(len(payload) if op in (Op.SET, Op.MIGRATE, Op.DATA) else 0):
            changed = bytearray(run)
            changed[number * segment + width + 16 + at] ^= 0x80
            expected: list[int | None] = [time_us] * len(payloads)
            expected[number] = None if covers else time_us
            assert impl.check_macs(changed, segment, sky, COVERING, NOW_US, SKEW_US) == expected


def test_payloads_that_a_mac_covers_must_be_given(impl: ModuleType) -> None:
    headers, width, payloads, sky = packets(Op.SET)
    key = COVERING[1]
    for its_key, its_payloads in ((key, None), (key, payloads[:-1]), (key, [*payloads, b""]), (key[:-1], payloads)):
        with pytest.raises(ValueError, match=r"payloads|key"):
            impl.sign_packets(headers, width, sky, its_key, 1, NOW_US, its_payloads)
    with pytest.raises(ValueError, match="no room"):
        impl.sign_packets(headers[:width], width, sky, key, 1, NOW_US, [bytes(65_507)])
    with pytest.raises(TypeError):
        impl.sign_packets(headers, width, sky, key, 1, NOW_US, [*payloads[:-1], "text"])
    signed = impl.sign_packets(headers, width, sky, key, 1, NOW_US, payloads)
    with pytest.raises(TypeError, match="32 or 1072 bytes"):
        impl.check_macs(joined(signed, width + 16, payloads), width + 66, sky, {1: key[:-1]}, NOW_US, SKEW_US)


def test_clocks_at_the_end_of_all_numbers_are_compared_alike(impl: ModuleType) -> None:
    headers, width, _, _ = packets(Op.EVICT)
    signed = impl.sign_packets(headers, width, 8, KEYS[1], 1, 5)
    least, last = -(2**63), 2**63 - 1
    for now_us in (least, least + 7, -1, 0, 5, last - 7, last):
        for skew_us in (least, -1, 0, 5, 2**31, last):
            found = impl.check_macs(signed, len(signed), 8, KEYS, now_us, skew_us)
            assert found == backend.check_macs(signed, len(signed), 8, KEYS, now_us, skew_us), (now_us, skew_us)
    assert impl.check_macs(signed, len(signed), 8, KEYS, 5, least) == [None]
    assert impl.check_macs(signed, len(signed), 8, KEYS, 5, last) == [5]


def test_a_packet_without_room_for_a_mac_is_said_to_be_so(impl: ModuleType) -> None:
    headers, width, _, sky = packets(Op.EVICT)
    long = headers[:4] + (65_507 - 7 - 15).to_bytes(2, "big") + headers[6:]
    with pytest.raises(ValueError, match="no room"):
        impl.sign_packets(long, width, sky, KEYS[1], 1, NOW_US)
    key = KEYS[1]
    for rows, row_bytes, offset, secret, key_id in (
        (headers[:-1], width, sky, key, 1),
        (headers, 20, sky, key, 1),
        (headers, width, 9, key, 1),
        (headers, width, sky, b"", 1),
        (headers, width, sky, key, 0),
        (headers, width, sky, key, 65_536),
    ):
        with pytest.raises(ValueError, match=r"rows|SKY header"):
            impl.sign_packets(rows, row_bytes, offset, secret, key_id, NOW_US)
    with pytest.raises(ValueError, match="without a MAC"):
        impl.strip_macs(headers, width, sky, b"\1")
    with pytest.raises(ValueError, match="kept or not"):
        impl.strip_macs(headers, width, sky, b"\1\1")


@given(st.data())
def test_hostile_runs_are_judged_alike(data: st.DataObject) -> None:
    fast = pytest.importorskip("skymemory.native._fast")
    op = data.draw(st.sampled_from([Op.SET, Op.DATA, Op.EVICT, Op.ACK]))
    headers, width, payloads, sky = packets(op)
    run = bytearray(joined(backend.sign_packets(headers, width, sky, KEYS[1], 1, NOW_US), width + 16, payloads))
    for _ in range(data.draw(st.integers(0, 3))):
        run[data.draw(st.integers(0, len(run) - 1))] = data.draw(st.integers(0, 255))
    run = run[: data.draw(st.integers(0, len(run)))]
    segment = data.draw(st.sampled_from([width + 16 + len(payloads[0]), 60, len(run) or 1]))
    sky = data.draw(st.sampled_from([8, 16]))
    now_us = NOW_US + data.draw(st.sampled_from([0, SKEW_US, -SKEW_US - 1, 1 << 31, -(1 << 33)]))
    found = backend.check_macs(run, segment, sky, KEYS, now_us, SKEW_US)
    assert fast.check_macs(run, segment, sky, KEYS, now_us, SKEW_US) == found
    keep = bytes(sent_us is not None for sent_us in found)
    assert fast.strip_macs(run, segment, sky, keep) == backend.strip_macs(run, segment, sky, keep)


def test_without_a_library_the_twin_serves(fast: ModuleType) -> None:
    """A computer may have no libcrypto: then native.sign_packets and its kin are the standard library's."""
    assert not fast.sha_select(False)
    try:
        with pytest.raises(RuntimeError, match="libcrypto"):
            fast.check_macs(b"", 1, 8, KEYS, 0, 0)
    finally:
        fast.sha_select(True)
    code = (
        "from skymemory.native import _fast; _fast.sha_select(False); import importlib, skymemory.native;"
        "n = importlib.reload(skymemory.native); print(n.NATIVE, n.check_macs.__module__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "skymemory.native.twin.segments"]
