"""What a write keeps of its value: chunks cut where they are looked at, acknowledged however they are named."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.client.transfer import Burst, Striping, WaitingBursts, WriteTransfer
from skymemory.protocol.congestion import Window
from skymemory.protocol.wire import ChunkRef, Slices

KEY = bytes(range(32))


def write_of(value: bytes, chunk_bytes: int, servers: int) -> WriteTransfer:
    satellites = tuple(SatelliteId(3, slot) for slot in range(servers))
    return WriteTransfer.of(KEY, value, Striping(chunk_bytes, 1, servers), (4, -1), lambda moves: satellites)


@given(st.binary(max_size=300), st.integers(1, 40), st.integers(1, 12))
def test_the_bursts_of_a_write_are_its_value(value: bytes, chunk_bytes: int, servers: int) -> None:
    write = write_of(value, chunk_bytes, servers)
    found: dict[int, bytes] = {}
    for burst in write.pending:
        assert {index % servers for index in burst.indices} == {burst.satellite.slot}
        assert write.refs_and_payloads_of(burst.indices)[0] == write.refs_and_payloads_of(list(burst.indices))[0]
        refs, payloads = write.refs_and_payloads_of(burst.indices)
        assert list(payloads) == list(write.refs_and_payloads_of(list(burst.indices))[1])
        for at, (index, payload) in enumerate(zip(burst.indices, payloads, strict=True)):
            ref = ChunkRef.unpack(refs[72 * at : 72 * at + 72])
            assert (ref.key, ref.index, ref.crc, ref.length_bytes) == (KEY, index, zlib.crc32(payload), len(payload))
            assert (ref.value_crc, ref.tag.slot_moves) == (zlib.crc32(value), 4)
            found[index] = bytes(payload)
    assert sorted(found) == list(range(write.info.chunks)) and b"".join(found[n] for n in sorted(found)) == value


@given(
    st.integers(1, 60),
    st.lists(
        st.tuples(st.integers(0, 70), st.integers(1, 20), st.integers(1, 70)),
        max_size=6,
    ),
)
def test_a_range_is_acknowledged_as_its_list_is(chunks: int, said: list[tuple[int, int, int]]) -> None:
    one, other = write_of(bytes(chunks), 1, 3), write_of(bytes(chunks), 1, 3)
    for first, stride, count in said:
        indices = range(first, first + stride * count, stride)
        assert one.acknowledge(indices) == other.acknowledge(list(indices))
        assert (one.acknowledged, one.missing) == (other.acknowledged, other.missing)
    assert one.missing == one.acknowledged.count(0) and len(one.acknowledged) == chunks


def test_slices_are_a_sequence_of_views() -> None:
    value = memoryview(bytes(range(25)))
    slices = Slices(value, 10, range(3))
    assert [bytes(part) for part in slices] == [bytes(value[:10]), bytes(value[10:20]), bytes(value[20:])]
    assert slices[-1] == value[20:] and list(slices[1:]) == list(slices)[1:] and isinstance(slices[::2], Slices)
    assert len(slices[5:]) == 0
    with pytest.raises(IndexError):
        slices[3]


def test_bursts_wait_by_satellite_until_their_window_changes() -> None:
    one, other = SatelliteId(0, 1), SatelliteId(0, 2)
    bursts = [Burst(one, range(4)), Burst(other, range(4, 8)), Burst(one, range(8, 12))]
    waiting, window = WaitingBursts(bursts), Window(1000, 10)
    assert list(waiting) == bursts
    window.sent(900)
    waiting.drop(3)
    assert waiting.first() == Burst(one, range(3, 4)), "the rest of a burst keeps its place"
    waiting.put_aside(window)
    assert waiting.first() == bursts[1]
    waiting.drop(4)
    assert waiting and waiting.first() is None
    waiting.resume(False)
    assert waiting.first() is None, "nothing has changed"
    window.answered(100)
    waiting.resume(False)
    assert waiting.first() == Burst(one, range(3, 4))
    waiting.drop(1)
    waiting.put_aside(window)
    waiting.resume(True)
    assert waiting.first() == bursts[2]
    waiting.drop(4)
    assert not waiting
