"""CRC-32 by every loop this processor has, with zlib as the oracle."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skymemory import native
from skymemory.native.twin import backend

_quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=["tables", "pclmul", "vpclmul"])
def loop(request: pytest.FixtureRequest, fast: ModuleType) -> Iterator[ModuleType]:
    if not fast.crc_select(request.param):
        pytest.skip(f"this processor has no {request.param}")
    assert fast.crc_kind() == request.param
    yield fast
    assert fast.crc_select("best")


def test_every_length_and_alignment_agrees_with_zlib(loop: ModuleType) -> None:
    dice = random.Random(1)
    pool = memoryview(dice.randbytes(70_000))
    lengths = [*range(700), 1023, 1024, 1025, 4096, 6144, 6276, 65_507]
    for length in lengths:
        start = dice.randrange(64)
        data = pool[start : start + length]
        value = dice.getrandbits(32)
        assert loop.crc32(data) == zlib.crc32(data), length
        assert loop.crc32(data, value) == zlib.crc32(data, value), length


@_quick
@given(st.binary(max_size=600), st.binary(max_size=600), st.integers(0, 2**32 - 1))
def test_combination_needs_no_bytes(impl: ModuleType, a: bytes, b: bytes, start: int) -> None:
    assert impl.crc32(b, impl.crc32(a, start)) == zlib.crc32(a + b, start)
    assert impl.crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_combination_over_lengths_no_memory_holds(fast: ModuleType) -> None:
    dice = random.Random(2)
    for bits in range(62):
        length = dice.getrandbits(bits) if bits else 0
        first, second = dice.getrandbits(32), dice.getrandbits(32)
        assert fast.crc32_combine(first, second, length) == backend.crc32_combine(first, second, length)


@_quick
@given(st.binary(max_size=700), st.integers(1, 400))
def test_the_chunks_sums_join_to_the_values(impl: ModuleType, value: bytes, chunk_bytes: int) -> None:
    sums = np.frombuffer(impl.crc32_chunks(value, chunk_bytes), dtype=np.uint32)
    assert sums.tolist() == [zlib.crc32(value[at : at + chunk_bytes]) for at in range(0, len(value), chunk_bytes)]
    assert impl.crc32_join(sums, chunk_bytes, len(value)) == zlib.crc32(value)


def test_a_block_of_the_usual_size(impl: ModuleType) -> None:
    value = random.Random(3).randbytes(480 * 6144 - 11)
    sums = np.frombuffer(impl.crc32_chunks(value, 6144), dtype=np.uint32)
    assert len(sums) == 480
    assert impl.crc32_join(sums, 6144, len(value)) == zlib.crc32(value)


def test_what_the_package_offers_is_an_array() -> None:
    sums = native.crc32_chunks(b"abc", 2)
    assert isinstance(sums, np.ndarray) and sums.dtype == np.uint32
    assert sums.tolist() == [zlib.crc32(b"ab"), zlib.crc32(b"c")]
    assert native.crc32_chunks(b"", 2).tolist() == []


def test_arguments_without_sense_are_refused(impl: ModuleType) -> None:
    sums = np.zeros(2, dtype=np.uint32)
    for chunk_bytes in (0, -1):
        with pytest.raises(ValueError):
            impl.crc32_chunks(b"abc", chunk_bytes)
        with pytest.raises(ValueError):
            impl.crc32_join(sums, chunk_bytes, 3)
    for value_bytes in (-1, 0, 2, 5):
        with pytest.raises(ValueError):
            impl.crc32_join(sums, 2, value_bytes)
    with pytest.raises(ValueError):
        impl.crc32_combine(1, 2, -1)
    with pytest.raises(TypeError):
        impl.crc32("text")
