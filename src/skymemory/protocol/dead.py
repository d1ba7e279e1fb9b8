"""Which values are dead: a key and the setting of it that lost a chunk, so that a later setting of the key lives on.

A value that is set again after the box has moved leaves chunks of the earlier setting where the new one has none.
They are the first to be evicted; what is said of them must not cost the value that is there now.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol.chunk_store import ChunkStore
from skymemory.protocol.ledger import Cause
from skymemory.protocol.messages import KEY_BYTES, Buffer

Dead = tuple[bytes, bytes]
"""Key and setting."""
SETTING_BYTES = 12
DEAD_BYTES = KEY_BYTES + SETTING_BYTES
MAX_DEAD_PER_PACKET = 130
"""Of one NOTICE or GONE: their packet stays as small as one with a chunk of the default size."""
_COUNT = struct.Struct(">HH")
_SETTING = struct.Struct(">Iii")


def setting_of(ref: bytes) -> bytes:
    """Of a packed chunk reference: CRC of the value, slot moves and plane moves, as they stand there."""
    return ref[52:56] + ref[64:72]


def pack_setting(value_crc: int, slot_moves: int, plane_moves: int) -> bytes:
    """The same from numbers."""
    return _SETTING.pack(value_crc, slot_moves, plane_moves)


def drop(store: ChunkStore, dead: Iterable[Dead], cause: Cause = "evicted") -> int:
    """Remove the chunks of these settings; how many there were."""
    dropped = 0
    for key, setting in dead:
        indices = [index for index, (ref, _) in store.shares.get(key, {}).items() if setting_of(ref) == setting]
        dropped += sum(store.remove((key, index), cause) for index in indices)
    return dropped


def pack_dead(dead: Sequence[Dead]) -> bytes:
    """Body of GONE."""
    if not 1 <= len(dead) <= MAX_DEAD_PER_PACKET:
        raise InvalidInput(f"{len(dead)} dead values in one packet: expected 1 to {MAX_DEAD_PER_PACKET}")
    return _COUNT.pack(len(dead), 0) + join_dead(dead)


def pack_forget(dead: Sequence[Dead], since_s: float) -> bytes:
    """Body of FORGET: these, but what was stored in the last ``since_s`` (65 s at most, in whole ms)."""
    since_ms = math.ceil(since_s * 1000)
    if not 1 <= len(dead) <= MAX_DEAD_PER_PACKET or not 0 <= since_ms <= 0xFFFF:
        raise InvalidInput(
            f"{len(dead)} values to forget of {since_s} s ago: expected 1 to {MAX_DEAD_PER_PACKET}, and 0 to 65.5 s"
        )
    return _COUNT.pack(len(dead), since_ms) + join_dead(dead)


def unpack_forget(body: Buffer) -> tuple[list[Dead], float]:
    """Inverse of ``pack_forget``."""
    if len(body) < _COUNT.size:
        raise MalformedPacket("FORGET without its count")
    count, since_ms = _COUNT.unpack_from(body)
    return split_dead(body[_COUNT.size :], count), since_ms / 1000


def unpack_dead(body: Buffer) -> list[Dead]:
    if len(body) < _COUNT.size:
        raise MalformedPacket("list of dead values without its count")
    return split_dead(body[_COUNT.size :], _COUNT.unpack_from(body)[0])


def join_dead(dead: Sequence[Dead]) -> bytes:
    return b"".join(key + setting for key, setting in dead)


def split_dead(body: Buffer, count: int) -> list[Dead]:
    """Inverse of ``join_dead`` for ``count`` of them; ``MalformedPacket`` where they are not so many bytes."""
    if not 1 <= count <= MAX_DEAD_PER_PACKET or len(body) != count * DEAD_BYTES:
        raise MalformedPacket(f"{count} dead values in {len(body)} bytes")
    return [
        (bytes(body[at : at + KEY_BYTES]), bytes(body[at + KEY_BYTES : at + DEAD_BYTES]))
        for at in range(0, len(body), DEAD_BYTES)
    ]
