"""The header of stored values: everything comes back, and garbage is never taken for a value."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket, ValueTooLarge
from skymemory.kv.block import KVLayout
from skymemory.kv.value import (
    HEADER_BYTES,
    MAX_NAME_BYTES,
    MAX_RAW_BYTES,
    PAYLOAD_AT,
    ForeignBlock,
    ValueHeader,
    block_header,
    check_placed_block,
    open_block,
    unpack_value,
)

SMALL = st.integers(1, 4)
LAYOUTS = st.builds(KVLayout, SMALL, SMALL, SMALL, SMALL, st.sampled_from(["float32", "float16", "bfloat16"]))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@st.composite
def values(draw: st.DrawFn) -> tuple[ValueHeader, bytes]:
    payload = draw(st.binary(max_size=100))
    layout = draw(st.none() | LAYOUTS)
    raw_bytes = layout.block_bytes if layout else draw(st.integers(0, MAX_RAW_BYTES))
    return ValueHeader(draw(st.integers(0, 255)), raw_bytes, len(payload), layout, draw(NAMES)), payload


@given(values())
def test_round_trip(value: tuple[ValueHeader, bytes]) -> None:
    header, payload = value
    packed = header.pack()
    assert len(packed) == header.header_bytes
    assert unpack_value(packed + payload) == (header, payload)
    assert unpack_value(bytearray(packed + payload))[1].obj is not None, "a view, not a copy"


@given(values(), st.data())
def test_a_damaged_or_cut_header_is_never_read(value: tuple[ValueHeader, bytes], data: st.DataObject) -> None:
    header, payload = value
    stored = bytearray(header.pack() + payload)
    bit = data.draw(st.integers(0, header.header_bytes * 8 - 1))
    stored[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedPacket):
        unpack_value(stored)
    stored[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.integers(0, len(stored) - 1))
    with pytest.raises(MalformedPacket):
        unpack_value(stored[:cut])
    with pytest.raises(MalformedPacket):
        unpack_value(bytes(stored) + b"\0")


@given(st.binary(max_size=200))
@example(b"SKYV" + bytes(60))
@example(b"SKYV\x01" + bytes(59))
def test_garbage_is_malformed(garbage: bytes) -> None:
    with pytest.raises(MalformedPacket):
        unpack_value(garbage)


def forged(**fields: int | bytes) -> bytes:
    """A header with a valid checksum and whatever a hostile sender puts in it."""
    known: dict[str, int | bytes] = {
        "magic": b"SKYV",
        "version": 1,
        "codec": 0,
        "dtype": 0,
        "zero": 0,
        "raw": 0,
        "payload": 0,
        "layers": 0,
        "heads": 0,
        "dim": 0,
        "tokens": 0,
        "name_bytes": 0,
        "reserved": bytes(18),
    }
    name = fields.pop("name", b"")
    assert isinstance(name, bytes)
    front = struct.pack("<4sBBBBQQIIIIH18s", *(known | {"name_bytes": len(name)} | fields).values())
    return front + struct.pack("<I", zlib.crc32(front + bytes(4) + name)) + name


def test_forged_is_a_header_when_nothing_is_wrong() -> None:
    assert unpack_value(forged())[0] == ValueHeader(0, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"dtype": 4},
        {"dtype": 255},
        {"zero": 1},
        {"reserved": bytes(17) + b"\1"},
        {"raw": MAX_RAW_BYTES + 1},
        {"raw": 2**64 - 1, "payload": 0},
        {"payload": 1},
        {"payload": 2**64 - 1},
        {"layers": 1},
        {"dtype": 3, "raw": 8},
        {"dtype": 3, "layers": 1, "heads": 1, "dim": 1, "tokens": 1, "raw": 5},
        {"dtype": 3, "layers": 2**32 - 1, "heads": 2**32 - 1, "dim": 2**32 - 1, "tokens": 2**32 - 1, "raw": 8},
        {"name_bytes": 1},
        {"name": b"\xff"},
        {"name": b"n" * (MAX_NAME_BYTES + 1)},
    ],
)
def test_forged_headers_are_malformed(fields: dict[str, int | bytes]) -> None:
    with pytest.raises(MalformedPacket):
        unpack_value(forged(**fields))


def test_headers_that_cannot_be_are_refused() -> None:
    layout = KVLayout(1, 1, 1, 1, "float32")
    with pytest.raises(InvalidInput, match="not the layout's"):
        ValueHeader(0, 7, 7, layout)
    for codec_id, raw_bytes, payload_bytes in ((256, 0, 0), (-1, 0, 0), (0, -1, 0), (0, 0, -1)):
        with pytest.raises(InvalidInput):
            ValueHeader(codec_id, raw_bytes, payload_bytes)
    with pytest.raises(ValueTooLarge, match="limit"):
        ValueHeader(0, MAX_RAW_BYTES + 1, 0)
    with pytest.raises(ValueTooLarge, match="limit"):
        ValueHeader(0, 0, 0, name="n" * (MAX_NAME_BYTES + 1))
    with pytest.raises(InvalidInput, match="UTF-8"):
        ValueHeader(0, 0, 0, name="\ud800")


def test_the_payload_of_a_block_is_aligned() -> None:
    layout = KVLayout(1, 1, 1, 1, "float32")
    assert ValueHeader(0, layout.block_bytes, 0, layout).header_bytes == HEADER_BYTES == 64


BLOCK = KVLayout(2, 1, 4, 2, "float32")
BLOCK_HASH = bytes(range(32))


def opened(value: bytes, placed: bool, layout: KVLayout = BLOCK, block_hash: bytes = BLOCK_HASH) -> object:
    """The codec of a stored block, or the error, with all of it at hand or only its header and its CRC."""
    view = memoryview(value)
    try:
        if placed:
            return check_placed_block(view[:PAYLOAD_AT], len(value), zlib.crc32(value), block_hash, layout)
        return open_block(view, block_hash, layout)[0]
    except MalformedPacket as error:
        return type(error)


@given(st.integers(0, 255), st.binary(min_size=1, max_size=80), st.data())
def test_a_block_whose_payload_is_elsewhere_passes_the_same_checks(
    codec: int, payload: bytes, data: st.DataObject
) -> None:
    value = block_header(BLOCK_HASH, BLOCK, codec, payload) + payload
    assert opened(value, True) == opened(value, False) == codec
    for bit in (
        data.draw(st.integers(0, 8 * PAYLOAD_AT - 1)),
        data.draw(st.integers(8 * PAYLOAD_AT, 8 * len(value) - 1)),
    ):
        spoiled = bytearray(value)
        spoiled[bit // 8] ^= 1 << bit % 8
        error = opened(bytes(spoiled), True)
        assert error == opened(bytes(spoiled), False) and error in (MalformedPacket, LaterVersion)
    for other in (value[:-1], value + b"x"):
        assert opened(other, True) == opened(other, False) == MalformedPacket
    wider = KVLayout(2, 1, 4, 4, "float32")
    assert opened(value, True, wider) == opened(value, False, wider) == ForeignBlock
    assert opened(value, True, BLOCK, bytes(32)) == opened(value, False, BLOCK, bytes(32)) == ForeignBlock
