"""Payloads exchanged for others of the same CRC-32, as an attacker on the way would."""

from __future__ import annotations

import zlib

_CRC_POLYNOMIAL = (1 | 0xEDB88320 << 1).to_bytes(5, "little")
"""All 33 coefficients: a CRC does not see a multiple of its polynomial."""


def exchanged(payload: bytes, at: int = 0) -> bytes:
    """Other bytes of the same length and CRC-32; they differ in five, from ``at`` on."""
    changed = bytearray(payload)
    for offset, byte in enumerate(_CRC_POLYNOMIAL, at):
        changed[offset] ^= byte
    assert changed != payload and zlib.crc32(changed) == zlib.crc32(payload)
    return bytes(changed)
