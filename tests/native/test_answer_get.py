"""A plain GET answered in one call: what the machine itself would say, alike in both implementations, or nothing."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skymemory.native.twin import backend
from skymemory.protocol import messages
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import Address, ChunkRef, Op, PlacementTag, SkyHeader, Status, build_packet, bulk_batch

KEY, OTHER = bytes(range(32)), bytes(32)
MOVES, CREDIT, NOW_S, SEQUENCE = (5, -2), 1024, 12.5, 0x3FFE
GET = SkyHeader(Op.GET, Address(1, 2), Address(1, 2, 0xFF), 7, 9, timestamp_us=77, slot_moves=3, credit=5)


def share(indices: range) -> dict[int, tuple[bytes, bytes]]:
    chunks = {}
    for index in indices:
        payload = bytes([index]) * (40 if index < 20 else 17)
        tag = PlacementTag(3, 3, index % 3, 0, 0)
        ref = ChunkRef(KEY, index, 21, len(payload), backend.crc32(payload), 20 * 40 + 17, 99, tag)
        chunks[index] = (ref.pack(), payload)
    return chunks


SHARES = {KEY: share(range(21)), OTHER: {}}


def packet(indices: list[int], stride: int = 1, key: bytes = KEY, header: SkyHeader = GET) -> bytes:
    return build_packet(header, Selection.of(key, indices, stride).pack(), 3, 1.0)


def call(impl: ModuleType, data: bytes) -> object:
    return impl.answer_get(data, SHARES, (*MOVES, CREDIT, 12, 32768, SEQUENCE))


@pytest.mark.parametrize(("indices", "stride"), [([0], 1), ([2, 5, 8, 11, 14, 17, 20], 3), ([1, 4, 19], 1), ([20], 7)])
def test_it_is_what_the_protocol_builds(impl: ModuleType, indices: list[int], stride: int) -> None:
    key, headers, payloads = call(impl, packet(indices, stride))  # type: ignore[misc]
    answer = SkyHeader(
        Op.DATA,
        GET.source,
        GET.destination,
        7,
        9,
        Status.OK,
        timestamp_us=77,
        slot_moves=5,
        plane_moves=-2,
        credit=CREDIT,
    )
    chunks = [SHARES[KEY][index] for index in indices]
    refs = b"".join(ref for ref, _ in chunks)
    wanted = bulk_batch(answer, refs, [payload for _, payload in chunks], SEQUENCE, NOW_S)
    assert key == KEY and isinstance(headers, bytearray)
    assert bytes(headers) == bytes(wanted.headers)
    assert payloads == [payload for _, payload in chunks]
    whole = [headers[at : at + 132] + body for at, body in zip(range(0, len(headers), 132), payloads, strict=True)]
    assert all(backend.verify_segments(data, len(data)) == b"\0" for data in whole)


def test_what_is_not_plain_is_left_alone(impl: ModuleType) -> None:
    sound = packet([0, 3], 3)
    for data in (
        b"",
        sound[:20],
        sound[:-1],
        sound + b"\0",
        packet([0, 21]),
        packet([0], key=OTHER),
        packet([0], key=b"?" * 32),
        build_packet(GET._replace(op=Op.HAS), messages.pack_keys([KEY]), 3, 1.0),
        build_packet(GET._replace(status=Status.FULL), Selection.of(KEY, [0]).pack(), 3, 1.0),
        build_packet(GET, KEY + bytes(12) + b"\1", 3, 1.0),
        build_packet(GET, KEY + (1).to_bytes(4, "big") * 2 + (1 << 17).to_bytes(4, "big") + b"\1", 3, 1.0),
        build_packet(GET, KEY + (1).to_bytes(4, "big") * 3 + b"\0", 3, 1.0),
    ):
        assert call(impl, data) is None, data
    for at in range(len(sound)):
        if not 28 <= at < 32:  # what forwarders change does not matter
            assert call(impl, sound[:at] + bytes([sound[at] ^ 0x40]) + sound[at + 1 :]) is None, at
    assert call(impl, sound) is not None


@pytest.mark.parametrize(
    "chunk", [(b"short", b""), (bytes(72), bytearray(3)), (bytes(72), bytes(66_000)), [bytes(72), b""]]
)
def test_a_share_that_is_not_as_stored_is_left_alone(fast: ModuleType, chunk: object) -> None:
    assert fast.answer_get(packet([0]), {KEY: {0: chunk}}, (0, 0, 0, 0, 0, 0)) is None
    assert fast.answer_get(packet([0]), {KEY: "no share"}, (0, 0, 0, 0, 0, 0)) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(
    first=st.integers(0, 2**32 - 1),
    stride=st.integers(0, 2**32 - 1),
    count=st.integers(0, 1 << 17),
    bitmap=st.binary(max_size=40),
    small=st.booleans(),
)
def test_any_selection_is_judged_alike(
    fast: ModuleType, first: int, stride: int, count: int, bitmap: bytes, small: bool
) -> None:
    if small:
        first, stride, count = first % 12, stride % 4, count % (8 * len(bitmap) + 1)
        bitmap = bitmap[: (count + 7) // 8]
    body = KEY + first.to_bytes(4, "big") + stride.to_bytes(4, "big") + count.to_bytes(4, "big") + bitmap
    data = build_packet(GET, body, 3, 1.0)
    assert call(fast, data) == call(backend, data)
