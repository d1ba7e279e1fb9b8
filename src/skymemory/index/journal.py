"""Records of changes to an index, for an append-only journal that can be replayed.

A record, little-endian::

    0 marker 0x5B    1 op    2 version 2    4 body_bytes 4    8 CRC-32 of the record with this field zero 4    12 body

    ADD             start 4 | blocks 4 | groups 4 | parent 32 (zero: none) | groups | hashes 32 n | rows 36 n
                    (version 2: its groups have the size of chunks; only written if it is not the default)
    REMOVE          hashes 32 n
    REMOVE_CONTEXT  the context's digest
    CLEAR, BORN, LOST
    PROBED          keys asked for 4 | values adopted 4

All versions share the frame of 12 bytes. A record of a later version or an unknown operation is skipped.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from skymemory import native
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.index.radix import ROW_BYTES, BlockInfo, Group, Groups, RadixIndex, check_chain
from skymemory.kv.block import HASH_BYTES, MAX_DEPTH, Buffer

JOURNAL_VERSION = 1
_SIZED_VERSION = 2
_MARKER = 0x5B
_FRAME = struct.Struct("<BBHII")
_ADD = struct.Struct(f"<III{HASH_BYTES}s")
_PROBED = struct.Struct("<II")
_NO_PARENT = bytes(HASH_BYTES)
_GROUP_HEAD = struct.Struct("<BHI")
_GROUP_HEAD_SIZED = struct.Struct("<BHII")


class RecordOp(enum.IntEnum):
    ADD = 1
    REMOVE = 2
    REMOVE_CONTEXT = 3
    CLEAR = 4
    BORN = 5
    """The constellation is empty: blocks not in the journal are absent."""
    LOST = 6
    """Earlier records are lost: blocks not in the journal may be present."""
    UNKNOWN = 0
    """Record of a later release; never written."""
    PROBED = 7
    """Satellites were probed, and values adopted that the journal lacked."""


_KNOWN = frozenset(RecordOp) - {RecordOp.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Record:
    """Change. ADD uses ``infos``, ``start``, ``parent``; REMOVE_CONTEXT ``context``; PROBED ``probed`` (keys asked for,
    values adopted).
    """

    op: RecordOp
    hashes: Sequence[bytes] = ()
    infos: Sequence[BlockInfo] = ()
    start: int = 0
    parent: bytes | None = None
    context: bytes = b""
    probed: tuple[int, int] = (0, 0)


def encode_record(record: Record) -> bytes:
    """Return the bytes to append: about 68 per block added, 32 per block removed."""
    # Use the oldest version that suffices: an earlier release can then read as much as possible.
    version = JOURNAL_VERSION
    if record.op is RecordOp.ADD:
        body, version = _add_body(record.hashes, record.infos, record.start, record.parent)
    elif record.op is RecordOp.REMOVE:
        check_chain(record.hashes, 0, None)
        body = b"".join(record.hashes)
    elif record.op is RecordOp.REMOVE_CONTEXT:
        body = record.context
    elif record.op is RecordOp.PROBED:
        body = _PROBED.pack(*(min(count, 0xFFFFFFFF) for count in record.probed))
    else:
        body = b""
    return _framed(record.op, version, body)


def _framed(op: RecordOp, version: int, body: bytes) -> bytes:
    blank = _FRAME.pack(_MARKER, op, version, len(body), 0)
    return blank[:8] + native.crc32(blank + body).to_bytes(4, "little") + body


def decode_records(data: Buffer) -> tuple[list[Record], int]:
    """Return the records up to the first incomplete or damaged, and their bytes: cut off the rest before appending.
    MalformedPacket for a self-contradiction.
    """
    view = memoryview(data).cast("B")
    records: list[Record] = []
    at = 0
    while (record_and_end := _record_at(view, at)) is not None:
        record, at = record_and_end
        records.append(record)
    return records, at


def _record_at(view: memoryview, at: int) -> tuple[Record, int] | None:
    """Return the record at an offset and its end; None if incomplete or damaged."""
    if at + _FRAME.size > len(view):
        return None
    marker, op, version, body_bytes, crc = _FRAME.unpack_from(view, at)
    end = at + _FRAME.size + body_bytes
    if marker != _MARKER or end > len(view):
        return None
    blank = _FRAME.pack(marker, op, version, body_bytes, 0)
    body = view[at + _FRAME.size : end]
    if native.crc32(body, native.crc32(blank)) != crc:
        return None
    with_sizes = version == _SIZED_VERSION and op == RecordOp.ADD
    # An unknown record is skipped, not an error: a later release may share this journal.
    known = with_sizes or (version == JOURNAL_VERSION and op in _KNOWN)
    return (_decode_body(op, body, with_sizes) if known else Record(RecordOp.UNKNOWN)), end


def _add_body(
    hashes: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None
) -> tuple[bytes, int]:
    if len(hashes) != len(infos):
        raise InvalidInput(f"{len(hashes)} hashes and {len(infos)} infos: one info per hash is expected")
    check_chain(hashes, start, parent)
    groups = Groups()
    rows = [groups.pack(info) for info in infos]
    return _joined_add(start, parent, b"".join(hashes), b"".join(rows), groups.listed)


def _joined_add(
    start: int, parent: bytes | None, hashes: bytes, rows: bytes, groups: Sequence[Group]
) -> tuple[bytes, int]:
    head = _ADD.pack(start, len(hashes) // HASH_BYTES, len(groups), parent or _NO_PARENT)
    packed, version = _packed_groups(tuple(groups))
    return b"".join([head, packed, hashes, rows]), version


@lru_cache(maxsize=64)
def _packed_groups(groups: tuple[Group, ...]) -> tuple[bytes, int]:
    return pack_groups(groups), _SIZED_VERSION if sized(groups) else JOURNAL_VERSION


def _decode_body(op: int, body: memoryview, with_sizes: bool) -> Record:
    if op == RecordOp.ADD:
        return _decode_add(body, with_sizes)
    if op == RecordOp.REMOVE:
        return Record(RecordOp.REMOVE, split_hashes(body))
    if op == RecordOp.REMOVE_CONTEXT:
        return Record(RecordOp.REMOVE_CONTEXT, context=bytes(body))
    if op == RecordOp.PROBED:
        if len(body) != _PROBED.size:
            raise MalformedPacket(f"a PROBED record of {len(body)} bytes, {_PROBED.size} are expected")
        return Record(RecordOp.PROBED, probed=_PROBED.unpack(body))
    if op in (RecordOp.CLEAR, RecordOp.BORN, RecordOp.LOST):
        return Record(RecordOp(op))
    raise MalformedPacket(f"an index journal record with operation {op}, known are 1 to {max(RecordOp)}")


def _decode_add(body: memoryview, with_sizes: bool) -> Record:
    if len(body) < _ADD.size:
        raise MalformedPacket(f"an ADD record of {len(body)} bytes, at least {_ADD.size} are expected")
    start, blocks, group_count, parent = _ADD.unpack_from(body)
    groups, groups_bytes = unpack_groups(body[_ADD.size :], group_count, with_sizes)
    blocks_data = body[_ADD.size + groups_bytes :]
    if len(blocks_data) != blocks * (HASH_BYTES + ROW_BYTES):
        raise MalformedPacket(f"an ADD record of {blocks} blocks with {len(blocks_data)} bytes for them")
    if (start == 0 and parent != _NO_PARENT) or start + blocks > MAX_DEPTH:
        raise MalformedPacket(f"an ADD record of {blocks} blocks at an impossible depth {start}")
    shared, rows = Groups(groups), blocks_data[blocks * HASH_BYTES :]
    try:
        infos = tuple(shared.unpack(rows[at : at + ROW_BYTES]) for at in range(0, len(rows), ROW_BYTES))
    except IndexError:
        raise MalformedPacket(f"a row of an ADD record names a group beyond the {len(groups)} of the record") from None
    hashes = split_hashes(blocks_data[: blocks * HASH_BYTES])
    return Record(RecordOp.ADD, hashes, infos, start, parent if start else None)


def split_hashes(data: Buffer) -> tuple[bytes, ...]:
    raw = bytes(data)
    if len(raw) % HASH_BYTES:
        raise MalformedPacket(f"{len(raw)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    return tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES))


def sized(groups: Iterable[Group]) -> bool:
    return any(chunk_bytes for _, _, _, chunk_bytes in groups)


def pack_groups(groups: Sequence[Group]) -> bytes:
    """Pack each group: length of the strategy 1, length of the context 2, servers 4, [size of chunks 4, if ``sized``],
    strategy, context.
    """
    parts = []
    head = _GROUP_HEAD_SIZED if sized(groups) else _GROUP_HEAD
    for strategy, servers, context, chunk_bytes in groups:
        numbers = (servers, chunk_bytes) if head is _GROUP_HEAD_SIZED else (servers,)
        parts += [head.pack(len(strategy), len(context), *numbers), strategy.encode(), context]
    return b"".join(parts)


def unpack_groups(view: memoryview, count: int, with_sizes: bool = False) -> tuple[list[Group], int]:
    groups: list[Group] = []
    head, at = _GROUP_HEAD_SIZED if with_sizes else _GROUP_HEAD, 0
    for _ in range(count):
        if at + head.size > len(view):
            raise MalformedPacket(f"the table of {count} groups ends after {len(groups)}")
        strategy_bytes, context_bytes, servers, *sizes = head.unpack_from(view, at)
        middle = at + head.size + strategy_bytes
        end = middle + context_bytes
        if end > len(view):
            raise MalformedPacket(f"the table of {count} groups ends within group {len(groups)}")
        try:
            strategy = bytes(view[at + head.size : middle]).decode("ascii")
        except UnicodeDecodeError as error:
            raise MalformedPacket(f"group {len(groups)} has no readable strategy: {error}") from None
        groups.append((strategy, servers, bytes(view[middle:end]), sizes[0] if sizes else 0))
        at = end
    return groups, at


def replay(record: Record, index: RadixIndex) -> None:
    """Apply a change; records about the journal itself change no block."""
    if record.op is RecordOp.ADD:
        index.add(record.hashes, record.infos, record.start, record.parent)
    elif record.op is RecordOp.REMOVE:
        for block_hash in record.hashes:
            index.remove(block_hash)
    elif record.op is RecordOp.REMOVE_CONTEXT:
        index.remove_context(record.context)
    elif record.op is RecordOp.CLEAR:
        index.clear()


def replay_all(data: Buffer, index: RadixIndex, state: JournalState) -> int:
    """Replay records, also into ``state``; return their bytes. InvalidInput for a contradiction."""
    view = memoryview(data).cast("B")
    at = 0
    while True:
        at = index.replay(view, at, _groups_of)
        record_and_end = _record_at(view, at)
        if record_and_end is None:
            return at
        record, at = record_and_end
        replay(record, index)
        state.apply(record)


def _groups_of(packed: bytes, count: int, sized: bool) -> Sequence[Group]:
    try:
        groups, groups_bytes = unpack_groups(memoryview(packed), count, sized)
    except MalformedPacket:
        return ()
    return groups if groups_bytes == len(packed) else ()


def write_records(index: RadixIndex, write: Callable[[bytes], object]) -> None:

    def write_run(start: int, parent: bytes | None, hashes: bytes, rows: bytes, groups: Sequence[Group]) -> None:
        body, version = _joined_add(start, parent, hashes, rows, groups)
        write(_framed(RecordOp.ADD, version, body))

    index.runs(write_run)


class JournalState:
    """State of a journal. ``complete``: blocks that it does not name are absent. That needs a journal that began with
    its constellation (BORN) and lost no record; clients elsewhere may store more than probing finds.
    """

    __slots__ = ("complete", "keys_probed", "unknown_records", "values_adopted")

    def __init__(self, complete: bool = False) -> None:
        self.complete = complete
        self.keys_probed = 0
        self.values_adopted = 0
        self.unknown_records = 0

    def apply(self, record: Record) -> None:
        if record.op is RecordOp.BORN:
            self.complete = True
        elif record.op is RecordOp.LOST:
            self.complete = False
        elif record.op is RecordOp.UNKNOWN:
            self.complete = False
            self.unknown_records += 1
        elif record.op is RecordOp.PROBED:
            self.keys_probed += record.probed[0]
            self.values_adopted += record.probed[1]
