"""XXH64 and SHA-256 over blocks, judged by their libraries; what a chained hash stands for; tokens as bytes."""

from __future__ import annotations

import hashlib
import struct
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.conftest import IMPLEMENTATIONS

from skymemory import native
from skymemory.native.twin import backend

xxhash = pytest.importorskip("xxhash")
U64 = st.integers(0, 2**64 - 1)


def _as_list(hashes: object) -> list[int]:
    """The compiled helper gives bytes, and the native floor makes numbers of them."""
    raw = hashes if isinstance(hashes, bytes) else np.asarray(hashes).tobytes()
    return list(struct.unpack(f"={len(raw) // 8}Q", raw))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(1, 130), U64)
def test_both_agree_with_the_library(data: bytes, block_bytes: int, seed: int) -> None:
    blocks = [data[at : at + block_bytes] for at in range(0, len(data) - block_bytes + 1, block_bytes)]
    pieces = [xxhash.xxh64_intdigest(block, seed) for block in blocks]
    chained, previous = [], seed
    for block in blocks:
        previous = xxhash.xxh64_intdigest(block + previous.to_bytes(8, "little"))
        chained.append(previous)
    assert backend.xxh64(data, seed) == xxhash.xxh64_intdigest(data, seed)
    for module in IMPLEMENTATIONS:
        assert _as_list(module.piece_hashes(data, block_bytes, seed)) == pieces
        assert _as_list(module.chain_hashes(data, block_bytes, seed)) == chained


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("block_bytes", range(1, 140))
def test_every_size_of_block(block_bytes: int) -> None:
    """Where the stripes of 32 bytes end, with the eight of the hash before and without."""
    data = bytes((7 * at + block_bytes) % 256 for at in range(3 * block_bytes))
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    first = xxhash.xxh64_intdigest(blocks[0] + bytes(8))
    second = xxhash.xxh64_intdigest(blocks[1] + first.to_bytes(8, "little"))
    for module in IMPLEMENTATIONS:
        assert _as_list(module.chain_hashes(data, block_bytes, 0))[:2] == [first, second]
        assert _as_list(module.piece_hashes(data, block_bytes, 3)) == [xxhash.xxh64_intdigest(b, 3) for b in blocks]


def test_without_the_library_the_twin_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(250)) * 3
    with_it = backend.chain_hashes(data, 64, 9).tolist(), backend.piece_hashes(data, 37, 9).tolist()
    monkeypatch.setattr(backend, "_hash", backend.xxh64)
    assert (backend.chain_hashes(data, 64, 9).tolist(), backend.piece_hashes(data, 37, 9).tolist()) == with_it


def test_a_chain_goes_on_from_its_last_hash() -> None:
    data = bytes(range(256)) * 80  # over the size from which the interpreter's lock is let go
    whole = native.chain_hashes(data, 64, 5)
    assert whole.dtype == np.uint64 and len(whole) == 320 == len(set(whole.tolist()))
    rest = native.chain_hashes(memoryview(data)[64 * 100 :], 64, int(whole[99]))
    assert rest.tolist() == whole[100:].tolist()
    other = bytearray(data)
    other[64 * 100] ^= 1
    changed = native.chain_hashes(other, 64, 5)
    assert (changed[:100] == whole[:100]).all() and not (changed[100:] == whole[100:]).any()
    assert not (native.chain_hashes(data, 64, 6) == whole).any()


def test_pieces_do_not_know_of_each_other(impl: ModuleType) -> None:
    assert len(set(_as_list(impl.piece_hashes(bytes(64) * 9 + b"rest", 64, 1)))) == 1
    assert _as_list(impl.piece_hashes(b"", 64, 1)) == _as_list(impl.chain_hashes(b"short", 64, 1)) == []
    assert _as_list(impl.piece_hashes(b"x" * 9, 9, 2**64 + 3)) == _as_list(impl.piece_hashes(b"x" * 9, 9, 3))


def test_what_cannot_be_hashed(impl: ModuleType) -> None:
    for call in (impl.chain_hashes, impl.piece_hashes):
        with pytest.raises(ValueError, match="blocks of 0 bytes: expected 1 or more"):
            call(b"abc", 0, 1)
        with pytest.raises(TypeError):
            call("text", 4, 1)
        with pytest.raises(TypeError):
            call(b"abc", 1, "seed")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=700), st.integers(1, 140), st.binary(min_size=32, max_size=32))
def test_a_chain_of_sha256(data: bytes, block_bytes: int, seed: bytes) -> None:
    expected, previous = [], seed
    for at in range(0, len(data) - block_bytes + 1, block_bytes):
        expected.append(previous := hashlib.sha256(previous + data[at : at + block_bytes]).digest())
    for module in IMPLEMENTATIONS:
        assert module.chain_sha256(data, block_bytes, seed) == expected
        assert module.chain_sha256(memoryview(bytearray(data)), block_bytes, seed) == expected


def test_long_chains_of_sha256_at_the_same_time(impl: ModuleType) -> None:
    """Over the size from which the interpreter's lock is let go."""
    data = [bytes([number]) * 40_000 for number in range(4)]
    alone = [impl.chain_sha256(each, 64, bytes(32)) for each in data]
    assert [len(each) for each in alone] == [625] * 4 and len({each[-1] for each in alone}) == 4
    found: dict[int, list[list[bytes]]] = {number: [] for number in range(4)}

    def hash_often(number: int) -> None:
        for _ in range(20):
            found[number].append(impl.chain_sha256(data[number], 64, bytes(32)))

    threads = [threading.Thread(target=hash_often, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == alone[number] for number, its in found.items() for one in its)


def test_what_is_no_chain_of_sha256(impl: ModuleType) -> None:
    with pytest.raises(ValueError, match="blocks of 0 bytes: expected 1 or more"):
        impl.chain_sha256(b"abc", 0, bytes(32))
    for seed in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match=f"a seed of {len(seed)} bytes: expected 32"):
            impl.chain_sha256(b"abc", 1, seed)
    with pytest.raises(TypeError):
        impl.chain_sha256("text", 4, bytes(32))


def test_without_libcrypto_the_twin_makes_chains(fast: ModuleType) -> None:
    if not fast.sha_ready():
        pytest.skip("no libcrypto here")
    fast.sha_select(False)
    try:
        with pytest.raises(RuntimeError, match="no libcrypto"):
            fast.chain_sha256(b"abc", 1, bytes(32))
    finally:
        fast.sha_select(True)


class _Subclass(int):
    pass


EDGES = st.sampled_from([0, 1, 2**15, 2**30 - 1, 2**30, 2**31, 2**32 - 1])
ODD = st.sampled_from([-1, 2**32, 2**63, 2**64, -(2**70), True, 1.0, "1", None, _Subclass(3), np.int64(3)])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1) | EDGES, max_size=40))
def test_packed_tokens(tokens: list[int]) -> None:
    packed = np.array(tokens, dtype="<u4").tobytes()
    for module in IMPLEMENTATIONS:
        assert module.pack_tokens(tokens) == module.pack_tokens(tuple(tokens)) == packed


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=9), ODD, st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_one_that_is_no_token_packs_none(before: list[int], odd: Any, after: list[int]) -> None:
    for module in IMPLEMENTATIONS:
        assert module.pack_tokens([*before, odd, *after]) is None
        assert module.pack_tokens((*before, odd, *after)) is None


def test_only_lists_and_tuples_are_packed(impl: ModuleType) -> None:
    for tokens in (np.array([1]), range(3), "12", b"12", {1: 2}, None, 5, iter([1])):
        assert impl.pack_tokens(tokens) is None
