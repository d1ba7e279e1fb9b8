"""Messages between a client of a host arena and its owner: one packet each on a Unix socket (SOCK_SEQPACKET).

A request is an operation (one byte) and its body; an answer a status (one byte) and its body, or an error in words.
Values are not sent. Numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

from skymemory.kv.block import Place
from skymemory.store.base import KEY_BYTES

VERSION = 3
MOST_ITEMS = 512
"""Values or keys in one message: a packet of a Unix socket is at most as long as its send buffer."""
MAX_BYTES = 128 << 10


@enum.unique
class HostOp(enum.IntEnum):
    HELLO = 1
    """Version; client's number and arena's instance, if connected before (else 0)."""
    RESERVE = 2
    COMMIT = 3
    TOUCH = 4
    PIN = 5
    DELETE = 6
    EXPIRE = 7
    LEFT = 8
    STATS = 9
    # On a connection of their own, since they may wait for farther tiers:
    BELOW = 10
    """Version: begins such a connection."""
    LOOKUP = 11
    SIZES = 12
    FETCH = 13
    """Copy what farther tiers have into the arena."""
    PUT = 14
    """Client's number and a COMMIT's body: store those values in all tiers, as the owner's own."""
    ESTIMATE = 15
    # On the first connection again:
    POSTED = 16
    """Values wait in slots. The owner does not answer."""


class HostStatus(enum.IntEnum):
    OK = 0
    INVALID = 1
    TOO_LARGE = 2


HELLO = struct.Struct("<BIQ16s")
WELCOME = struct.Struct("<Q16sQB")
"""Client's number, arena's instance, bytes of its values, and 1 if there are farther tiers."""
BELOW = struct.Struct("<BI")
_COUNT = struct.Struct("<I")
_SECONDS = struct.Struct("<d")
_NUMBER = struct.Struct("<Q")
_ITEM = struct.Struct(f"<{KEY_BYTES}sQBI{KEY_BYTES}s")
"""Key, bytes, kind of place, depth, parent."""
_NO_PLACE, _FIRST, _AFTER = 0, 1, 2
_REFUSED = (1 << 64) - 1


class Malformed(ValueError):
    """Message of another protocol."""


def pack_keys(op: HostOp, keys: Sequence[bytes], seconds: float | None = None) -> bytes:
    return bytes([op]) + (b"" if seconds is None else _SECONDS.pack(seconds)) + b"".join(keys)


def unpack_keys(body: memoryview) -> list[bytes]:
    if len(body) % KEY_BYTES:
        raise Malformed("keys of another size")
    data = bytes(body)
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def unpack_seconds(body: memoryview) -> tuple[float, list[bytes]]:
    if len(body) < _SECONDS.size:
        raise Malformed("no time")
    (seconds,) = _SECONDS.unpack_from(body)
    return seconds, unpack_keys(body[_SECONDS.size :])


def pack_reserve(items: Sequence[tuple[bytes, int]], places: Sequence[Place | None]) -> bytes:
    rows = [bytes([HostOp.RESERVE])]
    for (key, size_bytes), place in zip(items, places, strict=True):
        kind, depth, parent = words_of(place)
        rows.append(_ITEM.pack(key, size_bytes, kind, depth, parent or b""))
    return b"".join(rows)


def words_of(place: Place | None) -> tuple[int, int, bytes | None]:
    """Return a place's kind, depth and parent, as messages and slots have them."""
    if place is None:
        return _NO_PLACE, 0, None
    return (_FIRST if place.parent is None else _AFTER), place.depth, place.parent


def place_of(kind: int, depth: int, parent: bytes) -> Place | None:
    if kind > _AFTER:
        raise Malformed("a place of another kind")
    return None if kind == _NO_PLACE else Place(depth, parent if kind == _AFTER else None)


def unpack_reserve(body: memoryview) -> tuple[list[tuple[bytes, int]], list[Place | None]]:
    if not len(body) or len(body) % _ITEM.size:
        raise Malformed("items of another size")
    items: list[tuple[bytes, int]] = []
    places: list[Place | None] = []
    for key, size_bytes, kind, depth, parent in _ITEM.iter_unpack(body):
        items.append((key, size_bytes))
        places.append(place_of(kind, depth, parent))
    return items, places


def pack_reserved(number: int, offsets: Sequence[int | None]) -> bytes:
    return _NUMBER.pack(number) + pack_sizes(offsets)


def pack_sizes(sizes: Sequence[int | None]) -> bytes:
    return struct.pack(f"<{len(sizes)}Q", *[_REFUSED if size is None else size for size in sizes])


def unpack_sizes(body: memoryview) -> list[int | None]:
    return [None if size == _REFUSED else size for size in struct.unpack(f"<{len(body) // 8}Q", body)]


def unpack_reserved(body: memoryview) -> tuple[int, list[int | None]]:
    (number,) = _NUMBER.unpack_from(body)
    return number, unpack_sizes(body[_NUMBER.size :])


def pack_commit(number: int, crcs: Sequence[int | None]) -> bytes:
    return bytes([HostOp.COMMIT]) + pack_reserved(number, crcs)


def pack_put(client: int, number: int, crcs: Sequence[int | None]) -> bytes:
    return bytes([HostOp.PUT]) + _NUMBER.pack(client) + pack_reserved(number, crcs)


def unpack_put(body: memoryview) -> tuple[int, int, list[int | None]]:
    if len(body) < _NUMBER.size:
        raise Malformed("no client's number")
    return *_NUMBER.unpack_from(body), *unpack_commit(body[_NUMBER.size :])


def unpack_commit(body: memoryview) -> tuple[int, list[int | None]]:
    if len(body) < _NUMBER.size or len(body) % 8:
        raise Malformed("checksums of another size")
    number, crcs = unpack_reserved(body)
    if any(crc is not None and crc >> 32 for crc in crcs):
        raise Malformed("a checksum of more than 32 bits")
    return number, crcs


def pack_seconds(seconds: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(seconds)}d", *seconds)


def unpack_answer_seconds(body: memoryview) -> list[float]:
    return list(struct.unpack(f"<{len(body) // 8}d", body))


def pack_verdicts(verdicts: Sequence[bool | None]) -> bytes:
    return bytes([2 if verdict is None else int(verdict) for verdict in verdicts])


def unpack_verdicts(body: memoryview) -> list[bool | None]:
    return [None if verdict == 2 else verdict == 1 for verdict in body]
