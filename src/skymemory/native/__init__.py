"""The hot loops: in C where the helper was compiled, in Python (the twin) everywhere else.

``NATIVE`` says which one serves. ``SKYMEMORY_PURE_PYTHON=1`` in the environment forces the twin, whose files
(``twin``, ``twin_segments``, ``twin_macs``, ``twin_runs``, ``twin_landing``, ``twin_packets``, ``twin_udp``,
``twin_serve``, ``twin_take``, ``twin_hashes``, ``twin_prefix``, ``twin_holders``) say what each function does. The
helper takes SHA-256 from libcrypto; where there is none, the twin makes and checks MACs, with the standard library's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from skymemory.native import twin, twin_hashes
from skymemory.native.twin_landing import Landing, Tally
from skymemory.native.twin_packets import Ack
from skymemory.native.twin_runs import AnswerTerms, Run
from skymemory.native.twin_serve import Served
from skymemory.native.twin_take import Guard
from skymemory.native.twin_udp import SLOT_BYTES, Arrival

if TYPE_CHECKING:
    from typing_extensions import Buffer

try:
    if os.environ.get("SKYMEMORY_PURE_PYTHON", "0") not in ("", "0"):
        raise ImportError("SKYMEMORY_PURE_PYTHON asks for the twin")
    from skymemory.native import _fast
    from skymemory.native._fast import (
        HolderTable,
        PrefixTable,
        answer_get,
        bulk_headers,
        command_packets,
        crc32,
        crc32_combine,
        crc32_join,
        open_ack,
        open_runs,
        place_runs,
        place_segments,
        recv_batch,
        recv_runs,
        seal_headers,
        send_batch,
        send_each,
        send_slices,
        serve,
        verify_segments,
    )

    NATIVE = True
except ImportError:
    from skymemory.native.twin import (  # type: ignore[assignment]
        HolderTable,
        PrefixTable,
        answer_get,
        bulk_headers,
        command_packets,
        crc32,
        crc32_combine,
        crc32_join,
        open_ack,
        open_runs,
        place_runs,
        place_segments,
        recv_batch,
        recv_runs,
        seal_headers,
        send_batch,
        send_each,
        send_slices,
        serve,
        verify_segments,
    )

    NATIVE = False

if NATIVE and _fast.sha_ready():
    from skymemory.native._fast import check_macs, sign_packets, strip_macs
else:
    from skymemory.native.twin import check_macs, sign_packets, strip_macs

__all__ = [
    "NATIVE",
    "SLOT_BYTES",
    "Ack",
    "AnswerTerms",
    "Arrival",
    "Guard",
    "HolderTable",
    "Landing",
    "PrefixTable",
    "Run",
    "Served",
    "Tally",
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


def crc32_chunks(value: Buffer, chunk_bytes: int) -> twin.Crcs:
    """CRC-32 of each ``chunk_bytes`` of ``value`` in turn, the last maybe shorter (uint32, maybe read-only)."""
    if NATIVE:
        return np.frombuffer(_fast.crc32_chunks(value, chunk_bytes), dtype=np.uint32)
    return twin.crc32_chunks(value, chunk_bytes)


def chain_hashes(data: Buffer, block_bytes: int, seed: int) -> twin_hashes.Hashes:
    """Chained XXH64 of the whole blocks of ``data`` (uint64, maybe read-only): ``twin_hashes`` says of what."""
    if NATIVE:
        return np.frombuffer(_fast.chain_hashes(data, block_bytes, seed), dtype=np.uint64)
    return twin.chain_hashes(data, block_bytes, seed)


def piece_hashes(data: Buffer, block_bytes: int, seed: int) -> twin_hashes.Hashes:
    """Seeded XXH64 of each whole block of ``data`` by itself (uint64, maybe read-only)."""
    if NATIVE:
        return np.frombuffer(_fast.piece_hashes(data, block_bytes, seed), dtype=np.uint64)
    return twin.piece_hashes(data, block_bytes, seed)
