"""Whole runs: opened and given headers alike by both implementations, and never otherwise than one by one."""

from __future__ import annotations

import struct
import zlib
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.protocol.refs import pack_refs

from skymemory.native.twin import backend
from skymemory.protocol import wire
from skymemory.protocol.wire import Address, Op, SkyHeader, bulk_batch, bulk_prefix

KEY = bytes(range(32))
CHUNK, CHUNKS, SERVERS, VALUE_BYTES = 48, 11, 3, 48 * 10 + 17
VALUE = bytes(n * 7 % 251 for n in range(VALUE_BYTES))
VALUE_CRC = zlib.crc32(VALUE)
SET_BYTES, DATA_BYTES = 8 + 44 + 72 + CHUNK, 16 + 44 + 72 + CHUNK
_settings = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=250)


def packets(op: Op, indices: list[int], request_id: int = 9, timestamp_us: int = 5) -> list[bytes]:
    """What the protocol itself builds."""
    header = SkyHeader(op, Address(1, 2), Address(3, 4), 7, request_id, timestamp_us=timestamp_us)
    refs = pack_refs(
        KEY, indices, backend.crc32_chunks(VALUE, CHUNK), CHUNK, VALUE_BYTES, VALUE_CRC, SERVERS, 1, (5, -2)
    )
    payloads = [VALUE[index * CHUNK : (index + 1) * CHUNK] for index in indices]
    return bulk_batch(header, refs, payloads, 0x3FFE, 12.5).datagrams()


def resealed(packet: bytes, changes: dict[int, bytes]) -> bytes:
    """The packet with bytes of its headers changed and its checksum made right again."""
    changed = bytearray(packet)
    for at, new in changes.items():
        changed[at : at + len(new)] = new
    sky = 8 if changed[0] & 0x10 else 16
    head = changed[: sky + 116]
    backend.seal_headers(head, len(head), sky)
    return bytes(head + changed[sky + 116 :])


@pytest.mark.parametrize(("op", "sky"), [(Op.SET, 8), (Op.DATA, 16)])
def test_headers_of_a_burst_are_those_of_its_packets(impl: ModuleType, op: Op, sky: int) -> None:
    header = SkyHeader(op, Address(1, 2), Address(3, 4), 7, 9, timestamp_us=5)
    refs = pack_refs(
        KEY, range(CHUNKS), backend.crc32_chunks(VALUE, CHUNK), CHUNK, VALUE_BYTES, VALUE_CRC, 3, 1, (5, -2)
    )
    headers = impl.bulk_headers(bulk_prefix(header, 12.5), refs.tobytes(), 0x3FFE, sky)
    assert isinstance(headers, bytearray)
    width = sky + 44 + 72
    for index in range(CHUNKS):
        packet = headers[index * width : (index + 1) * width] + VALUE[index * CHUNK : (index + 1) * CHUNK]
        assert backend.verify_segments(packet, len(packet)) == b"\0"
        word, count, length = struct.unpack_from(">HHH", packet)
        assert (word >> 12 & 1, count >> 14, count & 0x3FFF) == (op is Op.SET, 3, (0x3FFE + index) & 0x3FFF)
        assert length + 7 == len(packet)
    assert impl.bulk_headers(bytes(60), b"", 0, 16) == bytearray()


@pytest.mark.parametrize(
    ("prefix", "refs", "sequence", "sky"),
    [(60, 71, 0, 16), (59, 72, 0, 16), (60, 72, -1, 16), (60, 72, 0, -1), (60, 72, 0, 2**62), (43, 72, 0, 0)],
)
def test_headers_that_cannot_be_are_refused(impl: ModuleType, prefix: int, refs: int, sequence: int, sky: int) -> None:
    with pytest.raises(ValueError, match="references"):
        impl.bulk_headers(bytes(prefix), bytes(refs), sequence, sky)
    with pytest.raises(ValueError, match="no packet carries"):
        impl.bulk_headers(bytes(60), b"\xff" * 72, 0, 16)


def one_run(impl: ModuleType, data: bytes, segment_bytes: int = SET_BYTES) -> object:
    return impl.open_runs([(memoryview(data), segment_bytes)], 0)


@pytest.mark.parametrize("op", [Op.SET, Op.MIGRATE])
def test_runs_are_opened(impl: ModuleType, op: Op) -> None:
    packets_of = packets(op, [1, 4, 7, 10])
    for cuts in ([4], [1, 3], [2, 2], [1, 1, 1, 1]):
        rest, runs = list(packets_of), [(memoryview(b"another"), 7)]
        for count in cuts:
            runs.append((memoryview(b"".join(rest[:count])), SET_BYTES))
            del rest[:count]
        indices, chunks, size_bytes, taken = impl.open_runs([*runs, (memoryview(b"rest"), 4)], 1)
        assert indices == [1, 4, 7, 10] and taken == len(cuts)
        assert [ref for ref, _ in chunks] == [packet[52:124] for packet in packets_of]
        assert [payload for _, payload in chunks] == [packet[124:] for packet in packets_of]
        assert size_bytes == sum(len(packet) - 52 for packet in packets_of)
        assert all(type(part) is bytes for chunk in chunks for part in chunk)


def test_runs_that_do_not_follow_each_other_stay_apart(impl: ModuleType) -> None:
    one, four, seven = packets(Op.SET, [1, 4, 7])
    other = packets(Op.SET, [7], request_id=10)[0]
    for second in (other, one, packets(Op.MIGRATE, [7])[0], packets(Op.SET, [8])[0], seven[:-1], b""):
        opened = impl.open_runs([(memoryview(one + four), SET_BYTES), (memoryview(second), SET_BYTES)], 0)
        assert (opened[0], opened[3]) == ([1, 4], 1), second
    with pytest.raises(ValueError, match="first run -1"):
        impl.open_runs([], -1)
    assert impl.open_runs([], 0) is None


def test_whatever_is_not_one_run_is_left_alone(impl: ModuleType) -> None:
    one, four, seven = packets(Op.SET, [1, 4, 7])
    other = packets(Op.SET, [7], request_id=10)[0]
    last = packets(Op.SET, [10])[0]
    for run in (
        b"",
        one[:40],
        one[:-1],
        one + one,
        four + one,
        one + four[:-1],
        one + other,
        packets(Op.DATA, [1])[0],
        one + packets(Op.MIGRATE, [4])[0],
        one + packets(Op.SET, [5])[0],
        last + seven,
        one + four[:-1] + bytes([four[-1] ^ 1]),
        one[:20] + b"\x99" + one[21:],
    ):
        assert one_run(impl, run) is None, run
    assert one_run(impl, one + last) is not None
    forwarded = four[:28] + b"\x3e\x02\x00\x07" + four[32:]
    assert one_run(impl, one + forwarded) is not None, "what forwarders change does not matter"
    for at, new in ((32, 0), (32, 12), (36, 0), (48, 3), (56, 0), (58, 1)):
        size = 2 if at >= 56 else 4
        damaged = resealed(one, {52 + at: new.to_bytes(size, "big")})
        assert one_run(impl, damaged) is None, (at, new)
    assert one_run(impl, one, 0) is None


@st.composite
def hostile(draw: st.DrawFn) -> tuple[memoryview, int]:
    """A run in which some packets are of another operation or request, damaged, cut, or wrong and well sealed."""
    op = draw(st.sampled_from([Op.SET, Op.MIGRATE, Op.DATA]))
    indices = draw(st.lists(st.sampled_from([1, 4, 7, 10]), min_size=1, max_size=4))
    if draw(st.booleans()):
        indices = sorted(set(indices))
    run = packets(op, indices, draw(st.sampled_from([8, 9])))
    sky = 8 if op.is_command else 16
    if draw(st.integers(0, 3)) == 0:
        which = draw(st.integers(0, len(run) - 1))
        at = draw(st.sampled_from([32, 36, 40, 44, 48, 52, 56, 58, 60, 64, 68]))
        word = draw(st.sampled_from([0, 1, 2, 3, 48, 2**31, 2**32 - 1])).to_bytes(4, "big")
        run[which] = resealed(run[which], {sky + 44 + at: word[-2:] if at in (56, 58) else word})
    if draw(st.integers(0, 3)) == 0:
        run.insert(draw(st.integers(0, len(run))), packets(draw(st.sampled_from([Op.SET, Op.DATA])), [10], 8)[0])
    data = bytearray(b"".join(run))
    if draw(st.integers(0, 2)) == 0:
        data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    if draw(st.integers(0, 3)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    segment = draw(st.sampled_from([sky + 116 + CHUNK, SET_BYTES, DATA_BYTES, 60, 1, 2**40]))
    return memoryview(bytes(data)), segment


@_settings
@given(st.lists(hostile(), min_size=1, max_size=3))
def test_hostile_runs_are_judged_alike(fast: ModuleType, runs: list[tuple[memoryview, int]]) -> None:
    opened = fast.open_runs(runs, 0)
    assert opened == backend.open_runs(runs, 0)
    for data, segment in runs:
        opened = fast.open_runs([(data, segment)], 0)
        assert opened == backend.open_runs([(data, segment)], 0)
        if opened is not None:
            assert set(backend.verify_segments(data, segment)) == {0}
            for index, (ref, payload) in zip(*opened[:2], strict=True):
                found = wire.ChunkRef.unpack(ref)
                assert (found.index, found.length_bytes, found.crc) == (index, len(payload), zlib.crc32(payload))
