"""XXH64 over the blocks of a prompt: the twin, with the xxhash library where it is installed, else in Python.

A *chained* hash names a block and all before it: ``h_i = XXH64(block_i || h_{i-1} as 8 bytes, little-endian)``, and
``h_{-1}`` is the seed. So a chain is continued by giving its last hash as the seed of what follows. XXH64 is fast and
not cryptographic: who wants two prompts with equal hashes can make them. A router that believes them sends a request
to a server that does not hold its prefix, which costs time; what an engine serves does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_PRIME_1 = 0x9E3779B185EBCA87
_PRIME_2 = 0xC2B2AE3D27D4EB4F
_PRIME_3 = 0x165667B19E3779F9
_PRIME_4 = 0x85EBCA77C2B2AE63
_PRIME_5 = 0x27D4EB2F165667C5
_STRIPE_BYTES = 32


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _mixed(lane: int, word: int) -> int:
    return _rotate(lane + word * _PRIME_2 & _MASK, 31) * _PRIME_1 & _MASK


def xxh64(data: bytes, seed: int = 0) -> int:
    """XXH64 of ``data``, by its specification."""
    at, size = 0, len(data)
    if size >= _STRIPE_BYTES:
        lanes = [seed + _PRIME_1 + _PRIME_2 & _MASK, seed + _PRIME_2 & _MASK, seed, seed - _PRIME_1 & _MASK]
        while size - at >= _STRIPE_BYTES:
            words = (int.from_bytes(data[at + 8 * lane : at + 8 * lane + 8], "little") for lane in range(4))
            lanes = [_mixed(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += _STRIPE_BYTES
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            value = (value ^ _mixed(0, lane)) * _PRIME_1 + _PRIME_4 & _MASK
    else:
        value = seed + _PRIME_5 & _MASK
    value = value + size & _MASK
    while size - at >= 8:
        value = (
            _rotate(value ^ _mixed(0, int.from_bytes(data[at : at + 8], "little")), 27) * _PRIME_1 + _PRIME_4 & _MASK
        )
        at += 8
    if size - at >= 4:
        word = int.from_bytes(data[at : at + 4], "little")
        value = _rotate(value ^ word * _PRIME_1 & _MASK, 23) * _PRIME_2 + _PRIME_3 & _MASK
        at += 4
    for byte in data[at:]:
        value = _rotate(value ^ byte * _PRIME_5 & _MASK, 11) * _PRIME_1 & _MASK
    value = (value ^ value >> 33) * _PRIME_2 & _MASK
    value = (value ^ value >> 29) * _PRIME_3 & _MASK
    return value ^ value >> 32


_hash: Callable[[bytes, int], int] = xxh64
try:
    import xxhash

    _hash = xxhash.xxh64_intdigest
except ImportError:  # ours is slower, and right
    pass


def _blocks(data: Buffer, block_bytes: int) -> list[bytes]:
    if block_bytes < 1:
        raise ValueError(f"blocks of {block_bytes} bytes: expected 1 or more")
    whole = bytes(memoryview(data).cast("B"))
    return [whole[at : at + block_bytes] for at in range(0, len(whole) - block_bytes + 1, block_bytes)]


def chain_hashes(data: Buffer, block_bytes: int, seed: int) -> Hashes:
    """Chained hashes of the whole blocks of ``data`` (uint64, maybe read-only); a rest is left out.

    ``seed`` (its lower 64 bits) stands for all that comes before the first block: see the head of this file.
    """
    previous, found = seed & _MASK, []
    for block in _blocks(data, block_bytes):
        previous = _hash(block + previous.to_bytes(8, "little"), 0)
        found.append(previous)
    return np.array(found, dtype=np.uint64)


def piece_hashes(data: Buffer, block_bytes: int, seed: int) -> Hashes:
    """XXH64 of each whole block of ``data`` by itself, seeded (uint64, maybe read-only); a rest is left out."""
    return np.array([_hash(block, seed & _MASK) for block in _blocks(data, block_bytes)], dtype=np.uint64)
