"""Batches of packets: headers as rows of one array, payloads left where they are.

A ``SegmentBatch`` is what a machine hands to its transport: ``n`` packets for one destination. The UDP transport
gathers headers and payloads into segmentation-offload sends without a copy; the simulated one joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from skymemory import native
from skymemory.protocol.messages import Buffer, bulk_prefix
from skymemory.protocol.wire import CHUNK_REF_BYTES, SKY_BYTES, SkyHeader

_REF_ROWS = np.dtype(
    [
        ("key", "V32"),
        ("number", ">u4"),
        ("chunks", ">u4"),
        ("length", ">u4"),
        ("crc", ">u4"),
        ("value_bytes", ">u4"),
        ("value_crc", ">u4"),
        ("servers", ">u2"),
        ("server", ">u2"),
        ("strategy", "u1"),
        ("flags", "u1"),
        ("spare", ">u2"),
        ("slot_moves", ">i4"),
        ("plane_moves", ">i4"),
    ]
)


class Slices(Sequence[memoryview]):
    """Chunks ``indices`` of a value as payloads, sliced only when accessed."""

    __slots__ = ("chunk_bytes", "indices", "value")

    def __init__(self, value: memoryview, chunk_bytes: int, indices: range) -> None:
        self.value = value
        self.chunk_bytes = chunk_bytes
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> Slices: ...
    def __getitem__(self, at: int | slice) -> memoryview | Slices:
        if isinstance(at, slice):
            return Slices(self.value, self.chunk_bytes, self.indices[at])
        start = self.indices[at] * self.chunk_bytes
        return self.value[start : start + self.chunk_bytes]


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """``n`` packets: packet ``i`` is ``headers[i·header_bytes : (i+1)·header_bytes] + payloads[i]``.

    With ``payloads`` None, ``headers`` is a run of whole packets of ``header_bytes`` each; the last may be shorter.
    """

    headers: bytes | bytearray
    header_bytes: int
    payloads: Sequence[Buffer] | None = None

    @property
    def count(self) -> int:
        return -(-len(self.headers) // self.header_bytes)

    @property
    def is_one_packet(self) -> bool:
        """Whether ``headers`` is one whole packet and nothing else."""
        return self.payloads is None and len(self.headers) <= self.header_bytes

    @property
    def total_bytes(self) -> int:
        return len(self.headers) + (sum(map(len, self.payloads)) if self.payloads is not None else 0)

    def datagrams(self) -> list[bytes]:
        """Each packet as bytes."""
        step = self.header_bytes
        rows = [bytes(self.headers[at : at + step]) for at in range(0, len(self.headers), step)]
        if self.payloads is None:
            return rows
        return [row + payload for row, payload in zip(rows, self.payloads, strict=True)]


def single(packet: bytes) -> SegmentBatch:
    return SegmentBatch(packet, len(packet))


def pack_refs(
    key: bytes,
    indices: Sequence[int],
    chunk_crcs: np.ndarray,
    chunk_bytes: int,
    value_bytes: int,
    value_crc: int,
    servers: int,
    strategy: int,
    moves: tuple[int, int],
) -> np.ndarray:
    """Chunk references of ``indices`` as rows of ``CHUNK_REF_BYTES`` bytes (``uint8``, ``(n, 72)``)."""
    if isinstance(indices, range):
        ids = np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    else:
        ids = np.asarray(indices, dtype=np.int64)
    chunks = len(chunk_crcs)
    refs = np.zeros(len(ids), dtype=_REF_ROWS)
    refs["key"] = np.frombuffer(key, dtype="V32")[0]
    refs["number"] = ids + 1
    refs["chunks"] = chunks
    refs["length"] = np.minimum(chunk_bytes, value_bytes - ids * chunk_bytes)
    refs["crc"] = chunk_crcs[ids]
    refs["value_bytes"] = value_bytes
    refs["value_crc"] = value_crc
    refs["servers"] = servers
    refs["server"] = ids % servers + 1
    refs["strategy"] = strategy
    refs["slot_moves"], refs["plane_moves"] = moves
    return refs.view(np.uint8).reshape(len(ids), CHUNK_REF_BYTES)


def bulk_batch(
    header: SkyHeader, refs: bytes | np.ndarray, payloads: Sequence[Buffer], sequence_count: int, now_s: float
) -> SegmentBatch:
    """One SET, MIGRATE or DATA packet per reference (``CHUNK_REF_BYTES`` each) and payload, sealed; sequence counts
    from ``sequence_count``.
    """
    bodies = refs if isinstance(refs, bytes) else refs.tobytes()
    return prefixed_batch(bulk_prefix(header, now_s), bodies, payloads, sequence_count)


def prefixed_batch(prefix: bytes, refs: bytes, payloads: Sequence[Buffer], sequence_count: int) -> SegmentBatch:
    """``bulk_batch`` from headers that are packed already, up to the end of the SKY header."""
    headers = native.bulk_headers(prefix, refs, sequence_count, len(prefix) - SKY_BYTES)
    return SegmentBatch(headers, len(prefix) + CHUNK_REF_BYTES, payloads)
