"""Chunks: cut, joined and checksummed without a byte lost."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.errors import InvalidInput
from skymemory.kv.chunk import ValueShape, chunk_checksums, join, split, value_checksum


@given(st.binary(max_size=300), st.integers(1, 70))
def test_split_and_join_are_inverse_and_agree_with_the_shape(value: bytes, chunk_bytes: int) -> None:
    shape = ValueShape(len(value), chunk_bytes)
    parts = split(value, chunk_bytes)
    assert join(parts, shape) == value
    assert len(parts) == shape.chunks >= 1
    assert [part.nbytes for part in parts] == [shape.length_of(n) for n in range(shape.chunks)]
    assert [value[slice(*shape.span(n))] for n in range(shape.chunks)] == parts
    assert sum(part.nbytes for part in parts) == len(value)


@given(st.binary(max_size=300), st.integers(1, 70))
def test_the_values_checksum_follows_from_the_chunks(value: bytes, chunk_bytes: int) -> None:
    checksums = chunk_checksums(value, chunk_bytes)
    assert checksums.dtype == np.uint32
    assert checksums.tolist() == [zlib.crc32(part) for part in split(value, chunk_bytes)]
    assert value_checksum(checksums, ValueShape(len(value), chunk_bytes)) == zlib.crc32(value)


def test_split_copies_nothing() -> None:
    value = bytearray(10)
    parts = split(value, 4)
    value[5] = 7
    assert parts[1][1] == 7


def test_typed_buffers_count_in_bytes() -> None:
    value = np.arange(5, dtype=np.uint32)
    assert [part.nbytes for part in split(value.data, 8)] == [8, 8, 4]
    assert value_checksum(chunk_checksums(value.data, 8), ValueShape(20, 8)) == zlib.crc32(value.tobytes())


def test_checksums_in_any_memory_layout() -> None:
    value = bytes(range(200))
    spread = np.repeat(chunk_checksums(value, 50), 2)[::2]
    assert value_checksum(spread, ValueShape(200, 50)) == zlib.crc32(value)


def test_wrong_parts_are_refused() -> None:
    shape = ValueShape(10, 4)
    with pytest.raises(InvalidInput, match="2 chunks given for a value of 3"):
        join([b"1234", b"5678"], shape)
    with pytest.raises(InvalidInput, match="chunk 2 has 3 bytes, expected 2"):
        join([b"1234", b"5678", b"90a"], shape)
    with pytest.raises(InvalidInput, match="checksums"):
        value_checksum(np.zeros(2, dtype=np.uint32), shape)
    for index in (-1, 3):
        with pytest.raises(InvalidInput):
            shape.span(index)


@pytest.mark.parametrize(("value_bytes", "chunk_bytes"), [(-1, 4), (4, 0), (4, -1)])
def test_impossible_shapes_are_refused(value_bytes: int, chunk_bytes: int) -> None:
    with pytest.raises(InvalidInput):
        ValueShape(value_bytes, chunk_bytes)
