"""Bodies of the messages, packed and parsed."""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol.wire import MAX_MOVES, VERSION, Buffer, Op, PlacementTag

KEY_BYTES = 32
MAX_KEYS_PER_PACKET = 180
"""Limit that keeps a packet no larger than a chunk's."""

_KEYS = struct.Struct(">HH")
_PRESENCE = struct.Struct(">IIIIIHHBBHii")
_LIST = struct.Struct(">32sHH")
_MOVES = struct.Struct(">ii")
_COUNT = struct.Struct(">I")

HOUSEKEEPING_FIELDS = (
    "memory_used_bytes",
    "memory_limit_bytes",
    "chunks_held",
    "receive_credit_bytes",
    "packets_received",
    "packets_malformed",
    "packets_forwarded",
    "packets_unroutable",
    "chunks_set",
    "chunks_replaced",
    "chunks_refused",
    "chunks_served",
    "chunks_missed",
    "chunks_evicted",
    "chunks_deleted",
    "chunks_migrated_in",
    "chunks_migrated_out",
    "migrations_retransmitted",
    "faults_injected",
    "delay_error_p99_us",
    "pushed_slot_moves",
    "pushed_plane_moves",
    "bytes_set",
    "bytes_migrated_in",
    "bytes_replaced",
    "bytes_evicted",
    "bytes_deleted",
    "bytes_migrated_out",
    "bytes_lost",
    "chunks_purged",
    "chunks_expired",
    "notices_sent",
    "pinned_bytes",
    "packets_refused",
    "packets_replayed",
    "copies_mended",
    "protocol_versions",
    "operations",
    "codecs",
    "packets_unsupported",
    "packets_shed",
    "late_us",
    "link_up_lost",
    "link_down_lost",
    "link_isl_lost",
    "link_up_queued_bytes",
    "link_down_queued_bytes",
    "link_isl_queued_bytes",
    "pools_full",
)
"""Fields of a PONG, in order. New fields are appended; readers ignore unknown fields."""


@dataclass(frozen=True, slots=True)
class ChunkPresence:
    """Chunks of a key on a satellite: ``held`` is their number, ``index`` the lowest; the rest describes the value."""

    index: int
    chunks: int
    length_bytes: int
    value_bytes: int
    value_crc: int
    held: int
    tag: PlacementTag

    def pack(self) -> bytes:
        tag, held_count = self.tag, min(self.held, 0xFFFF)
        value = self.index + 1, self.chunks, self.length_bytes, self.value_bytes, self.value_crc
        placement = tag.servers, tag.server + 1, tag.strategy, 0, held_count, tag.slot_moves, tag.plane_moves
        return _PRESENCE.pack(*value, *placement)

    @classmethod
    def unpack(cls, record: Buffer) -> ChunkPresence | None:
        number, chunks, length, value_bytes, value_crc, *placement = _PRESENCE.unpack_from(record)
        servers, server, strategy, _, held_count, slot_moves, plane_moves = placement
        if number == 0:
            return None
        if not (number <= chunks and 1 <= server <= servers):
            raise MalformedPacket(f"presence of chunk {number} of {chunks} on server {server} of {servers}")
        tag = PlacementTag(strategy, servers, server - 1, slot_moves, plane_moves)
        return cls(number - 1, chunks, length, value_bytes, value_crc, held_count, tag)


_ABSENT = bytes(_PRESENCE.size)


def pack_keys(keys: Sequence[bytes]) -> bytes:
    if not 1 <= len(keys) <= MAX_KEYS_PER_PACKET:
        raise InvalidInput(f"{len(keys)} keys in one packet: expected 1 to {MAX_KEYS_PER_PACKET}")
    return _KEYS.pack(len(keys), 0) + b"".join(keys)


def unpack_keys(body: Buffer) -> list[bytes]:
    if len(body) < _KEYS.size:
        raise MalformedPacket("key list without its count")
    count, _ = _KEYS.unpack_from(body)
    if not 1 <= count <= MAX_KEYS_PER_PACKET or len(body) != _KEYS.size + count * KEY_BYTES:
        raise MalformedPacket(f"key list of {count} keys in {len(body)} bytes")
    return [bytes(body[at : at + KEY_BYTES]) for at in range(_KEYS.size, len(body), KEY_BYTES)]


def pack_presences(presences: Iterable[ChunkPresence | None]) -> bytes:
    records = [_ABSENT if presence is None else presence.pack() for presence in presences]
    return _KEYS.pack(len(records), 0) + b"".join(records)


def unpack_presences(body: Buffer) -> list[ChunkPresence | None]:
    count = _unpack_list_count(body, _PRESENCE.size)
    start = _KEYS.size
    return [ChunkPresence.unpack(body[start + i * _PRESENCE.size :]) for i in range(count)]


def pack_list(after: bytes, limit: int) -> bytes:
    """Pack a request for keys greater than ``after`` (at first, 32 zero bytes)."""
    return _LIST.pack(after, limit, 0)


def unpack_list(body: Buffer) -> tuple[bytes, int]:
    if len(body) != _LIST.size:
        raise MalformedPacket(f"LIST of {len(body)} bytes: expected {_LIST.size}")
    after, limit, _ = _LIST.unpack_from(body)
    return after, min(limit, MAX_KEYS_PER_PACKET // 2)


def pack_listed(entries: Sequence[tuple[bytes, ChunkPresence]]) -> bytes:
    return _KEYS.pack(len(entries), 0) + b"".join(key + presence.pack() for key, presence in entries)


def unpack_listed(body: Buffer) -> list[tuple[bytes, ChunkPresence]]:
    width = KEY_BYTES + _PRESENCE.size
    entries = []
    for i in range(_unpack_list_count(body, width)):
        at = _KEYS.size + i * width
        presence = ChunkPresence.unpack(body[at + KEY_BYTES :])
        if presence is None:
            raise MalformedPacket("LISTED names a key that is not held")
        entries.append((bytes(body[at : at + KEY_BYTES]), presence))
    return entries


def pack_moves(slot_moves: int, plane_moves: int) -> bytes:
    """Pack total moves (absolute: idempotent)."""
    return _MOVES.pack(slot_moves, plane_moves)


def unpack_moves(body: Buffer) -> tuple[int, int]:
    if len(body) != _MOVES.size:
        raise MalformedPacket(f"ADVANCE of {len(body)} bytes: expected {_MOVES.size}")
    slot_moves, plane_moves = _MOVES.unpack(body)
    if max(abs(slot_moves), abs(plane_moves)) > MAX_MOVES:
        raise MalformedPacket(f"{slot_moves} and {plane_moves} moves: expected {MAX_MOVES} at most")
    return slot_moves, plane_moves


def pack_count(count: int) -> bytes:
    return _COUNT.pack(count)


def unpack_count(body: Buffer) -> int:
    if len(body) != _COUNT.size:
        raise MalformedPacket(f"EVICTED of {len(body)} bytes: expected {_COUNT.size}")
    (count,) = _COUNT.unpack(body)
    return int(count)


def pack_housekeeping(values: dict[str, int]) -> bytes:
    fields = [values.get(name, 0) for name in HOUSEKEEPING_FIELDS]
    return _KEYS.pack(len(fields), 0) + struct.pack(f">{len(fields)}q", *fields)


def unpack_housekeeping(body: Buffer) -> dict[str, int]:
    count = _unpack_list_count(body, 8)
    values = struct.unpack_from(f">{count}q", body, _KEYS.size)
    return dict(zip(HOUSEKEEPING_FIELDS, values, strict=False))


def _unpack_list_count(body: Buffer, width: int) -> int:
    if len(body) < _KEYS.size:
        raise MalformedPacket("list without its count")
    count, _ = _KEYS.unpack_from(body)
    if len(body) != _KEYS.size + count * width:
        raise MalformedPacket(f"list of {count} records of {width} bytes in {len(body)} bytes")
    return int(count)


# --- Selection: which chunks of a key; the body of GET, ACK, MISS and BUSY ---

MAX_SELECTION_BITS = 1 << 16

_SELECTION = struct.Struct(">32sIII")
_STEPS = struct.Struct(">III")


def pack_steps(indices: range) -> bytes:
    count = len(indices)
    if not 1 <= count <= MAX_SELECTION_BITS:
        raise InvalidInput(f"a selection over {count} steps: expected 1 to {MAX_SELECTION_BITS}")
    return _STEPS.pack(indices[0] + 1, indices.step, count) + ((1 << count) - 1).to_bytes((count + 7) // 8, "little")


@dataclass(frozen=True, slots=True)
class Selection:
    """Some chunks of a key: the indices ``first, first + stride, …`` whose bit is set (bit 0 is the lowest of byte
    0).
    """

    key: bytes
    first: int
    stride: int
    count: int
    bitmap: bytes

    @classmethod
    def of(cls, key: bytes, indices: Sequence[int], stride: int = 1) -> Selection:
        """Select exactly ``indices`` (0-based, ascending, congruent modulo ``stride``)."""
        if not indices:
            raise InvalidInput("empty selection: expected at least one chunk")
        first = indices[0]
        count = (indices[-1] - first) // stride + 1
        if count > MAX_SELECTION_BITS:
            raise InvalidInput(f"a selection over {count} steps: expected {MAX_SELECTION_BITS} at most")
        if len(indices) == count and stride > 0 and list(indices) == list(range(first, indices[-1] + 1, stride)):
            return cls(key, first, stride, count, ((1 << count) - 1).to_bytes((count + 7) // 8, "little"))
        bits = bytearray((count + 7) // 8)
        for index in indices:
            step, remainder = divmod(index - first, stride)
            if remainder or not 0 <= step < count:
                raise InvalidInput(f"chunk {index} is not on the grid {first} + {stride}·n")
            bits[step >> 3] |= 1 << (step & 7)
        return cls(key, first, stride, count, bytes(bits))

    @classmethod
    def cover(cls, key: bytes, indices: Iterable[int]) -> list[Selection]:
        """Select exactly ``indices``, in any order: several selections only if very far apart."""
        ordered = list(indices)
        if 1 < len(ordered) <= MAX_SELECTION_BITS and ordered[0] < ordered[1]:
            step = ordered[1] - ordered[0]
            even = range(ordered[0], ordered[0] + step * len(ordered), step)
            if ordered == list(even):  # nearly always
                return [cls.of(key, even, step)]
        ordered = sorted(set(ordered))
        stride = max(1, math.gcd(*(index - ordered[0] for index in ordered))) if ordered else 1
        selections, begin = [], 0
        while begin < len(ordered):
            end = bisect.bisect_left(ordered, ordered[begin] + stride * MAX_SELECTION_BITS)
            selections.append(cls.of(key, ordered[begin:end], stride))
            begin = end
        return selections

    @classmethod
    def pack_cover(cls, key: bytes, indices: Sequence[int]) -> list[bytes]:
        if indices:
            first, count = indices[0], len(indices)
            step = indices[1] - first if count > 1 else 1
            if step > 0 and count <= MAX_SELECTION_BITS:
                even = range(first, first + step * count, step)
                if indices == list(even):  # nearly always
                    return [key + pack_steps(even)]
        return [selection.pack() for selection in cls.cover(key, indices)]

    def indices(self) -> list[int]:
        if self.bitmap.count(0xFF) == self.count >> 3 and int.from_bytes(self.bitmap, "little") + 1 == 1 << self.count:
            return list(range(self.first, self.first + self.stride * self.count, self.stride))
        steps = np.flatnonzero(np.unpackbits(np.frombuffer(self.bitmap, np.uint8), bitorder="little")[: self.count])
        return [self.first + self.stride * step for step in steps.tolist()]

    def pack(self) -> bytes:
        return _SELECTION.pack(self.key, self.first + 1, self.stride, self.count) + self.bitmap

    @classmethod
    def unpack(cls, body: Buffer) -> Selection:
        if len(body) < _SELECTION.size:
            raise MalformedPacket(f"selection of {len(body)} bytes: expected at least {_SELECTION.size}")
        key, first, stride, count = _SELECTION.unpack_from(body)
        bitmap = bytes(body[_SELECTION.size :])
        if first < 1 or stride < 1 or not 1 <= count <= MAX_SELECTION_BITS or len(bitmap) != (count + 7) // 8:
            raise MalformedPacket(f"selection from {first} by {stride}, {count} bits in {len(bitmap)} bytes")
        if first + stride * (count - 1) > 0xFFFFFFFF or not any(bitmap):
            raise MalformedPacket(f"selection from {first} by {stride}, {count} bits: beyond any value, or of nothing")
        return cls(key, first - 1, stride, count, bitmap)


# --- RETAINED and CHECKED: one byte of answer for each question ---

_VERDICTS = struct.Struct(">HH")

Verdict = TypeVar("Verdict", bound=IntEnum)


def pack_verdicts(verdicts: Sequence[IntEnum]) -> bytes:
    return _VERDICTS.pack(len(verdicts), 0) + bytes(verdicts)


def unpack_verdicts(body: Buffer, op: Op, kind: type[Verdict]) -> list[Verdict]:
    """Read a ``kind`` per question."""
    if len(body) < _VERDICTS.size or len(body) != _VERDICTS.size + _VERDICTS.unpack_from(body)[0]:
        raise MalformedPacket(f"{op.name} of {len(body)} bytes: its count does not match")
    codes = bytes(body[_VERDICTS.size :])
    if codes and max(codes) > max(kind):
        raise MalformedPacket(f"{op.name} says {max(codes)}: expected {int(max(kind))} at most")
    return [kind(code) for code in codes]


# --- FORGET, GONE and NOTICE: dead values ---

SETTING_BYTES = 12
Dead = tuple[bytes, bytes]
"""Key and setting (value's CRC and moves at the SET) of a dead value."""
DEAD_BYTES = KEY_BYTES + SETTING_BYTES
MAX_DEAD_PER_PACKET = 130
MOST_SINCE_S = 10.0
_DEAD_COUNT = struct.Struct(">HH")
_SETTING = struct.Struct(">Iii")


def pack_setting(value_crc: int, slot_moves: int, plane_moves: int) -> bytes:
    return _SETTING.pack(value_crc, slot_moves, plane_moves)


def pack_dead(dead: Sequence[Dead]) -> bytes:
    if not 1 <= len(dead) <= MAX_DEAD_PER_PACKET:
        raise InvalidInput(f"{len(dead)} dead values in one packet: expected 1 to {MAX_DEAD_PER_PACKET}")
    return _DEAD_COUNT.pack(len(dead), 0) + join_dead(dead)


def unpack_dead(body: Buffer) -> list[Dead]:
    if len(body) < _DEAD_COUNT.size:
        raise MalformedPacket("list of dead values without its count")
    return split_dead(body[_DEAD_COUNT.size :], _DEAD_COUNT.unpack_from(body)[0])


def pack_forget(dead: Sequence[Dead], since_s: float) -> bytes:
    """Pack values to delete unless stored in the last ``since_s`` (at most 65 s, in ms)."""
    since_ms = math.ceil(since_s * 1000)
    if not 1 <= len(dead) <= MAX_DEAD_PER_PACKET or not 0 <= since_ms <= 0xFFFF:
        raise InvalidInput(
            f"{len(dead)} values to forget of {since_s} s ago: expected 1 to {MAX_DEAD_PER_PACKET}, and 0 to 65.5 s"
        )
    return _DEAD_COUNT.pack(len(dead), since_ms) + join_dead(dead)


def unpack_forget(body: Buffer) -> tuple[list[Dead], float]:
    if len(body) < _DEAD_COUNT.size:
        raise MalformedPacket("FORGET without its count")
    count, since_ms = _DEAD_COUNT.unpack_from(body)
    return split_dead(body[_DEAD_COUNT.size :], count), since_ms / 1000


def join_dead(dead: Sequence[Dead]) -> bytes:
    return b"".join(key + setting for key, setting in dead)


def split_dead(body: Buffer, count: int) -> list[Dead]:
    """Read exactly ``count`` dead values."""
    if not 1 <= count <= MAX_DEAD_PER_PACKET or len(body) != count * DEAD_BYTES:
        raise MalformedPacket(f"{count} dead values in {len(body)} bytes")
    return [
        (bytes(body[at : at + KEY_BYTES]), bytes(body[at + KEY_BYTES : at + DEAD_BYTES]))
        for at in range(0, len(body), DEAD_BYTES)
    ]


# --- RETAIN: pins, leases, expiries ---

WRITING_S = 3.0
"""Seconds for which a key counts as being written."""
_LATEST_S = 1e12
_RETAIN = struct.Struct(">HBBQ")


class Retain(IntEnum):
    """Action requested by a RETAIN; frozen numbers."""

    TOUCH = 0
    """Rank the keys, most recently used first. Not answered."""
    PIN = 1
    """Do not evict until the time; a past time unpins."""
    EXPIRE = 2
    """Delete at the time, pinned or not; 0, or a later SET, means never."""
    LEASE = 3
    """Do not evict until the time, or until the sending host has read the key. Not answered."""
    WRITING = 4
    """Record that the host still stores the key. Not answered."""


class Kept(IntEnum):
    """Result of a PIN or EXPIRE of a key."""

    ABSENT = 0
    DONE = 1
    REFUSED = 2
    """The memory for pins or the list of expiries is full."""


def pack_retain(what: Retain, until_s: float, keys: Sequence[bytes]) -> bytes:
    if not 1 <= len(keys) <= MAX_KEYS_PER_PACKET:
        raise InvalidInput(f"{len(keys)} keys in one RETAIN: expected 1 to {MAX_KEYS_PER_PACKET}")
    until_ms = round(until_s * 1000) if 0 <= until_s <= _LATEST_S else 0 if until_s < 0 else round(_LATEST_S * 1000)
    return _RETAIN.pack(len(keys), what, 0, until_ms) + b"".join(keys)


def unpack_retain(body: Buffer) -> tuple[Retain, float, list[bytes]]:
    if len(body) < _RETAIN.size:
        raise MalformedPacket(f"RETAIN of {len(body)} bytes: expected {_RETAIN.size} and keys")
    count, what, _, until_ms = _RETAIN.unpack_from(body)
    if not 1 <= count <= MAX_KEYS_PER_PACKET or len(body) != _RETAIN.size + count * KEY_BYTES or what > Retain.WRITING:
        raise MalformedPacket(f"RETAIN {what} of {count} keys in {len(body)} bytes")
    keys = [bytes(body[at : at + KEY_BYTES]) for at in range(_RETAIN.size, len(body), KEY_BYTES)]
    return Retain(what), until_ms / 1000, keys


def pack_retained(outcomes: Sequence[Kept]) -> bytes:
    return pack_verdicts(outcomes)


def unpack_retained(body: Buffer) -> list[Kept]:
    return unpack_verdicts(body, Op.RETAINED, Kept)


# --- Capabilities: protocol versions, operations and codecs, as stated in a PONG and in an UNSUPPORTED ---
#
# Different releases meet on the wire. A satellite states which versions it speaks and which operations it serves; a
# satellite that states nothing is of version 1. A client sends only stated operations, remembers for a while what a
# satellite could not do, and never mistakes an unsupported operation for a dead satellite.

ASK_AGAIN_S = 60.0
CODEC_IDS = (0, 8, 9, 10)

_UNSUPPORTED = struct.Struct(">BBBxQQ")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a satellite's release: protocol versions; operations and codecs, as bit masks by number.

    If not ``stated``, some operations may be missing.
    """

    lowest_version: int
    highest_version: int
    operations: int
    codecs: int
    stated: bool = True

    def serves(self, op: Op) -> bool:
        return bool(self.operations >> op & 1)

    def figures(self) -> dict[str, int]:
        versions = self.lowest_version << 8 | self.highest_version
        return {"protocol_versions": versions, "operations": _signed(self.operations), "codecs": _signed(self.codecs)}

    @classmethod
    def of_figures(cls, figures: Mapping[str, int]) -> Capabilities:
        versions = figures.get("protocol_versions", 0)
        if not 0 < versions <= 0xFFFF:
            return UNSTATED
        operations, codecs = (figures.get(name, 0) & (1 << 64) - 1 for name in ("operations", "codecs"))
        return cls(versions >> 8, versions & 0xFF, operations, codecs)

    def pack_unsupported(self, op: int) -> bytes:
        return _UNSUPPORTED.pack(op, self.lowest_version, self.highest_version, self.operations, self.codecs)

    @classmethod
    def unpack_unsupported(cls, body: Buffer) -> tuple[int, Capabilities]:
        if len(body) < _UNSUPPORTED.size:
            raise MalformedPacket(f"UNSUPPORTED of {len(body)} bytes: expected {_UNSUPPORTED.size}")
        op, *stated = _UNSUPPORTED.unpack_from(body)
        return op, cls(*stated)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _bits(numbers: tuple[int, ...]) -> int:
    return sum(1 << number for number in numbers)


OURS = Capabilities(VERSION, VERSION, _bits(tuple(op for op in Op if op.is_command)), _bits(CODEC_IDS))
UNSTATED = Capabilities(1, 1, _bits(tuple(range(Op.SET, Op.CHECK + 1))), 0, stated=False)
