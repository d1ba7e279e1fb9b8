"""The checksums of a value's chunks, and the value's own, which follows from them."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skymemory import native


@given(st.binary(min_size=1, max_size=300), st.integers(1, 70))
def test_the_values_checksum_follows_from_the_chunks(value: bytes, chunk_bytes: int) -> None:
    checksums = native.crc32_chunks(value, chunk_bytes)
    assert checksums.dtype == np.uint32
    parts = [value[start : start + chunk_bytes] for start in range(0, len(value), chunk_bytes)]
    assert checksums.tolist() == [zlib.crc32(part) for part in parts]
    assert native.crc32_join(checksums.data, chunk_bytes, len(value)) == zlib.crc32(value)


def test_typed_buffers_count_in_bytes() -> None:
    value = np.arange(5, dtype=np.uint32)
    checksums = native.crc32_chunks(value.data, 8)
    assert len(checksums) == 3
    assert native.crc32_join(checksums.data, 8, 20) == zlib.crc32(value.tobytes())
