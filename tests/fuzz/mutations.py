"""Damage with a seed: bytes flipped, cut, spliced, fields set to awkward numbers; and checksums made right again.

A mutant whose checksums are recomputed gets past the first check, so that what lies behind it is tried too.
"""

from __future__ import annotations

import random
import struct
import zlib

from skymemory import native
from skymemory.protocol.wire import CHUNK_REF_BYTES, COMMAND_BYTES, SKY_BYTES, TELEMETRY_BYTES, Op

AWKWARD = (
    0,
    1,
    2,
    7,
    8,
    9,
    63,
    64,
    127,
    128,
    255,
    256,
    300,
    2500,
    4095,
    4096,
    0x7FFF,
    0x8000,
    0xFFFF,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)
_CHUNK_LENGTH_AT, _CHUNK_CRC_AT = 40, 44
_BULK = (Op.SET, Op.MIGRATE, Op.DATA)


def mutate(dice: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """One to four changes."""
    made = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        _change(dice, made, others)
    return bytes(made)


def _change(dice: random.Random, made: bytearray, others: list[bytes]) -> None:
    kind = dice.randrange(8)
    size = len(made)
    if not size or kind == 0:
        made[dice.randint(0, size) : dice.randint(0, size)] = dice.randbytes(dice.randint(0, 12))
    elif kind == 1:
        del made[dice.randrange(size) :]
    elif kind == 2:
        other = dice.choice(others)
        at = dice.randint(0, min(size, len(other)))
        made[at:] = other[at:]
    elif kind == 3 and size >= 8:
        at = dice.randrange(size - 7)
        made[at : at + 8] = struct.pack(dice.choice(("<Q", ">Q")), dice.choice(AWKWARD))
    elif kind <= 5 and size >= 4:
        width, code = dice.choice(((1, "B"), (2, "H"), (4, "I")))
        at = dice.randrange(size - 3)
        number = dice.choice(AWKWARD) & ((1 << 8 * width) - 1)
        made[at : at + width] = struct.pack(dice.choice("<>") + code, number)
    else:
        made[dice.randrange(size)] ^= 1 << dice.randrange(8)


def resealed(packet: bytes) -> bytes:
    """The packet with lengths and checksums that agree with its bytes; as it is where it is too short for that."""
    start = COMMAND_BYTES if packet[:1] and packet[0] & 0x10 else TELEMETRY_BYTES
    body_at = start + SKY_BYTES
    if len(packet) < body_at:
        return packet
    made = bytearray(packet)
    struct.pack_into(">H", made, 4, (len(made) - 7) & 0xFFFF)
    end = len(made)
    payload_at = body_at + CHUNK_REF_BYTES
    if made[start + 1] in _BULK and end >= payload_at:
        struct.pack_into(">I", made, body_at + _CHUNK_LENGTH_AT, end - payload_at)
        struct.pack_into(">I", made, body_at + _CHUNK_CRC_AT, zlib.crc32(made[payload_at:]))
        end = payload_at
    front = bytearray(made[:end])
    native.seal_headers(front, len(front), start)
    return bytes(front + made[end:])
