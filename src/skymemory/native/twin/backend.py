"""The pure-Python twin of the compiled helper: same signatures, same results, and the judge of the fast one.

CRC-32 is the one of zlib and Ethernet (reflected polynomial 0xEDB88320). Combination follows from
linearity: the CRC of ``a + b`` is the CRC of ``a`` multiplied by ``x**(8*len(b))`` modulo the polynomial,
plus (XOR) that of ``b``. The loops over packets are in ``twin_segments`` and ``twin_runs``, those over
datagrams in ``twin_udp`` and ``twin_serve``, and what a client awaits is placed by ``twin_landing``. Prompts are
hashed by ``twin_hashes``, and ``twin_prefix`` remembers which servers hold which blocks (``twin_holders``: and in
which medium).
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from skymemory.native.twin_hashes import chain_hashes, piece_hashes
from skymemory.native.twin_holders import HolderTable
from skymemory.native.twin_landing import place_runs, recv_runs
from skymemory.native.twin_macs import check_macs, sign_packets, strip_macs
from skymemory.native.twin_packets import command_packets, open_ack, send_each
from skymemory.native.twin_prefix import PrefixTable
from skymemory.native.twin_runs import answer_get, bulk_headers, open_runs
from skymemory.native.twin_segments import place_segments, seal_headers, verify_segments
from skymemory.native.twin_serve import serve
from skymemory.native.twin_udp import recv_batch, send_batch, send_slices

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Crcs = np.ndarray[tuple[int], np.dtype[np.uint32]]

__all__ = [
    "HolderTable",
    "PrefixTable",
    "answer_get",
    "bulk_headers",
    "chain_hashes",
    "check_macs",
    "command_packets",
    "crc32",
    "crc32_chunks",
    "crc32_combine",
    "crc32_join",
    "open_ack",
    "open_runs",
    "piece_hashes",
    "place_runs",
    "place_segments",
    "recv_batch",
    "recv_runs",
    "seal_headers",
    "send_batch",
    "send_each",
    "send_slices",
    "serve",
    "sign_packets",
    "strip_macs",
    "verify_segments",
]

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000
"""The polynomial 1: bit 31 is the coefficient of x**0 in the reflected representation."""


def crc32(data: Buffer, value: int = 0) -> int:
    """CRC-32 of ``data``, continued from ``value``; what ``zlib.crc32`` gives."""
    return zlib.crc32(data, value)


def _multiply(a: int, b: int) -> int:
    """Product of two reflected polynomials modulo the CRC's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _shift_of(length_bytes: int) -> int:
    """``x**(8*length_bytes)`` modulo the polynomial: what appending that many bytes multiplies a CRC by."""
    result, square = _ONE, _ONE >> 8
    while length_bytes:
        if length_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        length_bytes >>= 1
    return result


@lru_cache(maxsize=16)
def _shift_tables(length_bytes: int) -> tuple[tuple[int, ...], ...]:
    """The same multiplication as four tables of 256, one per byte: four look-ups instead of 32 steps."""
    shift = _shift_of(length_bytes)
    return tuple(tuple(_multiply(byte << at, shift) for byte in range(256)) for at in (0, 8, 16, 24))


def crc32_combine(crc1: int, crc2: int, len2: int) -> int:
    """CRC-32 of ``a + b`` from the CRC of ``a``, the CRC of ``b`` and ``len(b)``, without the bytes."""
    if len2 < 0:
        raise ValueError(f"length {len2}: expected 0 or more")
    return _multiply(crc1 & 0xFFFFFFFF, _shift_of(len2)) ^ crc2 & 0xFFFFFFFF


def crc32_chunks(value: Buffer, chunk_bytes: int) -> Crcs:
    """CRC-32 of each ``chunk_bytes`` of ``value`` in turn, the last maybe shorter; none for no bytes."""
    if chunk_bytes < 1:
        raise ValueError(f"chunks of {chunk_bytes} bytes: expected 1 or more")
    view = memoryview(value).cast("B")
    crcs = [zlib.crc32(view[at : at + chunk_bytes]) for at in range(0, len(view), chunk_bytes)]
    return np.array(crcs, dtype=np.uint32)


def crc32_join(crcs: Buffer, chunk_bytes: int, value_bytes: int) -> int:
    """CRC-32 of a value of ``value_bytes`` from the CRCs of its chunks (native-endian uint32, in order)."""
    if chunk_bytes < 1:
        raise ValueError(f"chunks of {chunk_bytes} bytes: expected 1 or more")
    parts = memoryview(crcs).cast("B").cast("I").tolist()
    if value_bytes < 0 or len(parts) != -(-value_bytes // chunk_bytes):
        raise ValueError(f"{len(parts)} CRCs for {value_bytes} bytes in chunks of {chunk_bytes}: the count disagrees")
    if not parts:
        return 0
    whole = parts[0]
    if len(parts) > 2:
        t0, t1, t2, t3 = _shift_tables(chunk_bytes)
        for part in parts[1:-1]:
            whole = t0[whole & 255] ^ t1[whole >> 8 & 255] ^ t2[whole >> 16 & 255] ^ t3[whole >> 24] ^ part
    if len(parts) > 1:
        whole = crc32_combine(whole, parts[-1], value_bytes - (len(parts) - 1) * chunk_bytes)
    return int(whole)
