"""Where chains of blocks begin: what two prompts must have in common, beside their text, to share a cache."""

from __future__ import annotations

import hashlib
import struct

_TAG = b"skymemory prefix seed, version 1"
_LENGTH = struct.Struct("<I")


def seed(model: str, adapter: str, salt: str) -> int:
    """64 bits for ``native.chain_hashes``: different where model, adapter or salt differ.

    The first eight bytes, little-endian, of the SHA-256 of a tag and of each word as UTF-8 behind its length (four
    bytes): words cannot run into each other. Lone surrogates, which JSON may bring, are taken as they are.
    """
    message = bytearray(_TAG)
    for word in (model, adapter, salt):
        raw = word.encode("utf-8", "surrogatepass")
        message += _LENGTH.pack(len(raw)) + raw
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")
