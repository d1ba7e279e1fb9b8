"""A whole index as bytes: runs, hashes and rows in columns, with one checksum.

Little-endian::

    0 magic "SKYINDEX"   8 version 4   12 groups 4   16 runs 4   20 blocks 4
    24 CRC-32 4 (of everything, this field zero)     28 zero 4   32 groups
    then runs x (start 4 | blocks 4 | parent 32, zero: none), blocks x hash 32, blocks x row 36
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from skymemory import native
from skymemory.errors import LaterVersion, MalformedPacket
from skymemory.index.block_info import ROW_BYTES, InfoTable, pack_groups, sized, unpack_groups
from skymemory.kv.block import HASH_BYTES, MAX_DEPTH
from skymemory.kv.chunk import Buffer

SNAPSHOT_VERSION = 1
_SIZED_VERSION = 2
"""Its groups say how large chunks are: written where some are not of the default size."""
_MAGIC = b"SKYINDEX"
_HEAD = struct.Struct("<8sIIIIII")
_RUN = struct.Struct(f"<II{HASH_BYTES}s")
_NO_PARENT = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``runs`` are (start, parent, number of blocks); ``hashes`` and ``infos`` hold their blocks, run by
    run.
    """

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
        raise MalformedPacket(f"an index snapshot of {len(view)} bytes whose head says {rows_at + blocks * ROW_BYTES}")
    runs: list[tuple[int, bytes | None, int]] = []
    for start, length, parent in _RUN.iter_unpack(view[runs_at:hashes_at]):
        if (start == 0 and parent != _NO_PARENT) or not 1 <= length <= MAX_DEPTH - start:
            raise MalformedPacket(f"an index snapshot with a run of {length} blocks at {start} that cannot be")
        runs.append((start, None if start == 0 else parent, length))
    if sum(length for _, _, length in runs) != blocks:
        raise MalformedPacket(f"an index snapshot whose runs do not add up to its {blocks} blocks")
    infos = InfoTable(groups, bytes(view[rows_at:]))
    infos.check()
    return Snapshot(runs, bytes(view[hashes_at:rows_at]), infos)
