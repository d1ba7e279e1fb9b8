"""Records of changes to an index, for an append-only journal that can be replayed; and a whole index as bytes.

One record, little-endian::

    0 marker 0x5B    1 op    2 version 2    4 body_bytes 4    8 CRC-32 of the record with this field zero 4    12 body

    ADD             start 4 | blocks 4 | groups 4 | parent 32 (zero: none) | groups | hashes 32 n | rows 36 n
                    (version 2: its groups say how large chunks are; written where they are not of the default size)
    REMOVE          hashes 32 n
    REMOVE_CONTEXT  the context's digest
    CLEAR           nothing
    BORN            nothing
    LOST            nothing
    PROBED          keys asked for 4 | values adopted 4

The frame of 12 bytes stays in all versions. A record of a later version, or of an unknown operation, is skipped: it
may have added blocks, so blocks that the journal does not name may be present (``JournalState``).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from skymemory import native
from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket
from skymemory.index.block_info import ROW_BYTES, BlockInfo, InfoTable, pack_groups, sized, unpack_groups
from skymemory.kv.block import HASH_BYTES, MAX_DEPTH
from skymemory.kv.chunk import Buffer

JOURNAL_VERSION = 1
_SIZED_VERSION = 2
"""Of an ADD whose groups give the size of chunks; no other record has it."""
_MARKER = 0x5B
_FRAME = struct.Struct("<BBHII")
_ADD = struct.Struct(f"<III{HASH_BYTES}s")
_PROBED = struct.Struct("<II")
_NO_PARENT = bytes(HASH_BYTES)


class RecordOp(enum.IntEnum):
    ADD = 1
    REMOVE = 2
    REMOVE_CONTEXT = 3
    CLEAR = 4
    BORN = 5
    """The constellation is empty as this is written: blocks that the journal does not name are absent."""
    LOST = 6
    """Records before this one are lost: blocks that the journal does not name may be present."""
    UNKNOWN = 0
    """Never written: a record of a later release is read as this."""
    PROBED = 7
    """Satellites were probed, and values adopted that the journal did not name."""


_KNOWN = frozenset(RecordOp) - {RecordOp.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Record:
    """One change. ``infos``, ``start`` and ``parent`` belong to ADD, ``context`` to REMOVE_CONTEXT, ``probed`` (keys
    asked for, values adopted) to PROBED.
    """

    op: RecordOp
    hashes: tuple[bytes, ...] = ()
    infos: tuple[BlockInfo, ...] = ()
    start: int = 0
    parent: bytes | None = None
    context: bytes = b""
    probed: tuple[int, int] = (0, 0)


def encode_record(
    op: RecordOp,
    hashes: Sequence[bytes] = (),
    infos: Sequence[BlockInfo] = (),
    *,
    start: int = 0,
    parent: bytes | None = None,
    context: bytes = b"",
    probed: tuple[int, int] = (0, 0),
) -> bytes:
    """The bytes to append. About 68 per block added, 32 per block removed, and 12 to 100 around them."""
    version = JOURNAL_VERSION
    if op is RecordOp.ADD:
        body = _add_body(hashes, infos, start, parent)
        version = _SIZED_VERSION if any(info.chunk_bytes for info in infos) else JOURNAL_VERSION
    elif op is RecordOp.REMOVE:
        check_chain(hashes, 0, None)
        body = b"".join(hashes)
    elif op is RecordOp.REMOVE_CONTEXT:
        body = context
    elif op is RecordOp.PROBED:
        body = _PROBED.pack(*(min(count, 0xFFFFFFFF) for count in probed))
    else:
        body = b""
    blank = _FRAME.pack(_MARKER, op, version, len(body), 0)
    return blank[:8] + native.crc32(blank + body).to_bytes(4, "little") + body


def decode_records(data: Buffer) -> tuple[list[Record], int]:
    """The records in ``data`` up to the first that is incomplete or damaged, and the bytes they take.

    A crash may tear the journal's tail: cut off what follows the returned count before appending. An intact record
    of a later release is UNKNOWN, one that contradicts itself :class:`MalformedPacket`.
    """
    view = memoryview(data).cast("B")
    records: list[Record] = []
    at = 0
    while at + _FRAME.size <= len(view):
        marker, op, version, body_bytes, crc = _FRAME.unpack_from(view, at)
        end = at + _FRAME.size + body_bytes
        if marker != _MARKER or end > len(view):
            break
        blank = _FRAME.pack(marker, op, version, body_bytes, 0)
        body = view[at + _FRAME.size : end]
        if native.crc32(body, native.crc32(blank)) != crc:
            break
        with_sizes = version == _SIZED_VERSION and op == RecordOp.ADD
        # Skipped, not an error: a later release may share this journal.
        known = with_sizes or (version == JOURNAL_VERSION and op in _KNOWN)
        records.append(_decode_body(op, body, with_sizes) if known else Record(RecordOp.UNKNOWN))
        at = end
    return records, at


def _add_body(hashes: Sequence[bytes], infos: Sequence[BlockInfo], start: int, parent: bytes | None) -> bytes:
    if len(hashes) != len(infos):
        raise InvalidInput(f"{len(hashes)} hashes and {len(infos)} infos: one info per hash is expected")
    check_chain(hashes, start, parent)
    table = InfoTable()
    rows = [table.pack(info) for info in infos]
    head = _ADD.pack(start, len(hashes), len(table.groups), parent or _NO_PARENT)
    return b"".join([head, pack_groups(table.groups), *hashes, *rows])


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
    groups, taken = unpack_groups(body[_ADD.size :], group_count, with_sizes)
    rest = body[_ADD.size + taken :]
    if len(rest) != blocks * (HASH_BYTES + ROW_BYTES):
        raise MalformedPacket(f"an ADD record of {blocks} blocks with {len(rest)} bytes for them")
    if (start == 0 and parent != _NO_PARENT) or start + blocks > MAX_DEPTH:
        raise MalformedPacket(f"an ADD record of {blocks} blocks at an impossible depth {start}")
    table = InfoTable(groups, bytes(rest[blocks * HASH_BYTES :]))
    table.check()
    infos = tuple(table.get(at) for at in range(blocks))
    hashes = split_hashes(rest[: blocks * HASH_BYTES])
    return Record(RecordOp.ADD, hashes, infos, start, parent if start else None)


# A snapshot: runs, hashes and rows in columns, with one checksum. Little-endian::
#
#     0 magic "SKYINDEX"   8 version 4   12 groups 4   16 runs 4   20 blocks 4
#     24 CRC-32 4 (of everything, this field zero)     28 zero 4   32 groups
#     then runs x (start 4 | blocks 4 | parent 32, zero: none), blocks x hash 32, blocks x row 36
#
# Version 2, whose groups give the size of chunks, is written where some are not of the default size.

SNAPSHOT_VERSION = 1
_MAGIC = b"SKYINDEX"
_HEAD = struct.Struct("<8sIIIIII")
_RUN = struct.Struct(f"<II{HASH_BYTES}s")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``runs`` are (start, parent, number of blocks); ``hashes`` and ``infos`` hold their blocks, run by run."""

    runs: list[tuple[int, bytes | None, int]]
    hashes: bytes
    infos: InfoTable


def pack_snapshot(snapshot: Snapshot) -> bytes:
    runs, infos = snapshot.runs, snapshot.infos
    body = b"".join(
        [
            pack_groups(infos.groups),
            *(_RUN.pack(start, blocks, parent or _NO_PARENT) for start, parent, blocks in runs),
            snapshot.hashes,
            infos.rows,
        ]
    )
    version = _SIZED_VERSION if sized(infos.groups) else SNAPSHOT_VERSION
    counts = (version, len(infos.groups), len(runs), len(infos))
    crc = native.crc32(body, native.crc32(_HEAD.pack(_MAGIC, *counts, 0, 0)))
    return _HEAD.pack(_MAGIC, *counts, crc, 0) + body


def unpack_snapshot(data: Buffer) -> Snapshot:
    """Checked before anything is built: magic, version, sizes, checksum. Else :class:`MalformedPacket`."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise MalformedPacket(f"an index snapshot has at least {_HEAD.size} bytes, got {len(view)}")
    magic, version, group_count, run_count, blocks, crc, zero = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise MalformedPacket(f"not an index snapshot: it begins with {bytes(magic).hex()}")
    if version > _SIZED_VERSION:
        raise LaterVersion(f"index snapshot of version {version}, this release reads versions 1 and {_SIZED_VERSION}")
    if version < SNAPSHOT_VERSION:
        raise MalformedPacket(f"index snapshot of version {version}, this release reads 1 and {_SIZED_VERSION}")
    blank = _HEAD.pack(magic, version, group_count, run_count, blocks, 0, zero)
    if native.crc32(view[_HEAD.size :], native.crc32(blank)) != crc:
        raise MalformedPacket("an index snapshot is truncated or damaged: its checksum differs")
    groups, taken = unpack_groups(view[_HEAD.size :], group_count, version == _SIZED_VERSION)
    runs_at = _HEAD.size + taken
    hashes_at = runs_at + run_count * _RUN.size
    rows_at = hashes_at + blocks * HASH_BYTES
    if rows_at + blocks * ROW_BYTES != len(view):
        raise MalformedPacket(
            f"an index snapshot of {len(view)} bytes whose header gives {rows_at + blocks * ROW_BYTES}"
        )
    runs: list[tuple[int, bytes | None, int]] = []
    for start, length, parent in _RUN.iter_unpack(view[runs_at:hashes_at]):
        if (start == 0 and parent != _NO_PARENT) or not 1 <= length <= MAX_DEPTH - start:
            raise MalformedPacket(f"an index snapshot with a run of {length} blocks at an impossible depth {start}")
        runs.append((start, None if start == 0 else parent, length))
    if sum(length for _, _, length in runs) != blocks:
        raise MalformedPacket(f"an index snapshot whose runs do not add up to its {blocks} blocks")
    infos = InfoTable(groups, bytes(view[rows_at:]))
    infos.check()
    return Snapshot(runs, bytes(view[hashes_at:rows_at]), infos)


class JournalState:
    """Whether blocks that a journal does not name are absent (``complete``): it began with its constellation, and no
    record was lost since.

    A journal that begins without BORN was created for a constellation that may have held values already: its index was
    deleted, or clients on another computer write there. Nothing makes it complete again: however much was probed, such
    a client may have stored more.
    """

    __slots__ = ("complete", "keys_probed", "unknown_records", "values_adopted")

    def __init__(self, complete: bool = False) -> None:
        self.complete = complete
        self.keys_probed = 0
        self.values_adopted = 0
        self.unknown_records = 0
        """Records of a later release, which may be about any block."""

    def apply(self, record: Record) -> None:
        """Apply a record about the journal; records about blocks change nothing."""
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


def check_chain(hashes: Sequence[bytes], start: int, parent: bytes | None) -> None:
    """Raises :class:`InvalidInput` unless ``hashes`` can be at depths ``start``, … behind ``parent``, which is None
    exactly when ``start`` is 0. No block comes twice: its hash names all before it.
    """
    if not 0 <= start <= MAX_DEPTH - len(hashes) or (start == 0) != (parent is None):
        raise InvalidInput(
            f"a chain of {len(hashes)} blocks at depth {start} with {'no' if parent is None else 'a'} parent: "
            "depth 0 has none, every other has one"
        )
    chain = hashes if parent is None else [parent, *hashes]
    for key in chain:
        if not isinstance(key, bytes) or len(key) != HASH_BYTES:
            raise InvalidInput(f"a block hash must be {HASH_BYTES} bytes, got {key!r}")
    if len(set(chain)) != len(chain):
        raise InvalidInput("a chain with the same block twice: a block's hash names all before it")


def split_hashes(data: Buffer) -> tuple[bytes, ...]:
    """The hashes in a concatenation."""
    raw = bytes(data)
    if len(raw) % HASH_BYTES:
        raise MalformedPacket(f"{len(raw)} bytes are not a whole number of {HASH_BYTES}-byte hashes")
    return tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES))
