"""The hot loops: in C where the helper was compiled, in Python (the twin) everywhere else.

``NATIVE`` says which one serves. ``SKYMEMORY_PURE_PYTHON=1`` in the environment forces the twin.
"""

from __future__ import annotations

from skymemory.native.twin import (
    crc32,
    crc32_chunks,
    crc32_combine,
    crc32_join,
    place_segments,
    recv_batch,
    seal_headers,
    send_batch,
    verify_segments,
)
from skymemory.native.twin_udp import SLOT_BYTES, Arrival

NATIVE = False

__all__ = [
    "NATIVE",
    "SLOT_BYTES",
    "Arrival",
    "crc32",
    "crc32_chunks",
    "crc32_combine",
    "crc32_join",
    "place_segments",
    "recv_batch",
    "seal_headers",
    "send_batch",
    "verify_segments",
]
