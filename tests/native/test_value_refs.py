"""The references of a value's chunks: compiled, twin and NumPy alike."""

from __future__ import annotations

import random
import zlib
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.native.conftest import IMPLEMENTATIONS
from tests.protocol.refs import pack_refs

KEY = bytes(range(32))


@given(
    st.one_of(st.integers(0, 40), st.sampled_from([6143, 6144, 6145, 3 * 6144, 100_000])),
    st.sampled_from([1, 2, 7, 6144]),
    st.integers(1, 65_535),
    st.integers(0, 255),
    st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1)),
)
def test_all_implementations_agree_with_numpy(
    size: int, chunk_bytes: int, servers: int, strategy: int, moves: tuple[int, int]
) -> None:
    value = random.Random(size).randbytes(min(size, 400 * chunk_bytes))
    chunks = [value[at : at + chunk_bytes] for at in range(0, len(value), chunk_bytes)] or [b""]
    crcs = np.array([zlib.crc32(chunk) for chunk in chunks], dtype=np.uint32)
    value_crc = zlib.crc32(value)
    expected = pack_refs(
        KEY, range(len(chunks)), crcs, chunk_bytes, len(value), value_crc, servers, strategy, moves
    ).tobytes()
    for module in IMPLEMENTATIONS:
        refs, crc = module.value_refs(memoryview(value), KEY, chunk_bytes, servers, strategy, moves)
        assert (bytes(refs), crc) == (expected, value_crc)


@pytest.mark.parametrize("module", IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("wrong", [{"key": b"short"}, {"chunk_bytes": 0}, {"servers": 0}, {"servers": 65_536}])
@pytest.mark.parametrize("strategy", [-1, 3, 256])
def test_what_a_reference_has_no_room_for_is_refused(
    module: ModuleType, wrong: dict[str, object], strategy: int
) -> None:
    how = {"key": KEY, "chunk_bytes": 10, "servers": 3, **wrong}
    with pytest.raises(ValueError, match="no room"):
        module.value_refs(b"value", how["key"], how["chunk_bytes"], how["servers"], strategy, (0, 0))
