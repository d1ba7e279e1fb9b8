"""Keyed hash of payloads that MACs cover: 16 bytes for each block of 1,024. It authenticates only within the HMAC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

PAYLOAD_BLOCK_BYTES: Final = 1024
PAYLOAD_KEY_BYTES: Final = PAYLOAD_BLOCK_BYTES + 16
_WORDS = 8
_GROUPS = PAYLOAD_BLOCK_BYTES // (4 * _WORDS)


def payload_hash(key: bytes, payload: Buffer) -> bytes:
    """Return the NH of UMAC (RFC 4418, 5.2.2) of each block in two Toeplitz passes, little-endian, zero-padded to
    groups of 32 bytes. Payloads of equal length collide for at most 2^-64 of all keys.
    """
    data = bytes(payload)
    groups = np.frombuffer(data + bytes(-len(data) % (4 * _WORDS)), "<u4").reshape(-1, _WORDS)
    if not len(groups):
        return b""
    words = np.frombuffer(key, "<u4")
    places = np.arange(len(groups))[:, None] % _GROUPS * _WORDS + np.arange(_WORDS)
    hashes = np.empty((-(-len(groups) // _GROUPS), 2), "<u8")
    for turn in range(2):
        sums = (groups + words[places + 4 * turn]).astype(np.uint64)
        products = (sums[:, :4] * sums[:, 4:]).sum(axis=1, dtype=np.uint64)
        hashes[:, turn] = np.add.reduceat(products, range(0, len(groups), _GROUPS))
    return hashes.tobytes()
