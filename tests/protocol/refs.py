"""References of any chunks, by NumPy: the oracle of ``native.value_refs``, and for tests that need some of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skymemory.protocol.wire import CHUNK_REF_BYTES

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
