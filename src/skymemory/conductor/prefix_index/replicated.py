"""Approximate prefix index that survives restarts (snapshots) and is shared between routers (deltas).

A snapshot, little-endian::

    0 magic "SKYPREFX"   8 version 4   12 servers 4   16 CRC-32 4 (of everything, this field zero)   20 zero 4
    24 length of the kind 4, kind in UTF-8
    then per server: length of the name 4, name in UTF-8, capacity 8, blocks 8, per block hash 8 and parent 4

The *kind* names the unit and size of blocks. A parent is the position, from 0, of a block of the same server. Blocks
are in order of last use, the latest first.

A delta, little-endian (it names the server, as each replica has its own slots)::

    0 kind 1 (1 learnt, 2 dropped)   1 length of the name 2   3 number of blocks 4   7 name, UTF-8   then 8 per block

Replicas publish only what they learnt, not what they absorbed, and no removal of servers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from skymemory import native
from skymemory.conductor.change_log import ChangeLog
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex, Blocks
from skymemory.errors import InvalidInput, LaterFile
from skymemory.metrics import Counters

SNAPSHOT_VERSION = 1
_MAGIC = b"SKYPREFX"
_HEAD = struct.Struct("<8sIIII")
_LENGTH = struct.Struct("<I")
_SERVER = struct.Struct("<QQ")
_STORED_ROW = np.dtype([("hash", "<u8"), ("parent", "<u4")])
_TABLE_ROW = np.dtype([("hash", "=u8"), ("parent", "=u4"), ("zero", "=u4")])
_MAX_NAME_BYTES = 4096
MAX_DELTAS = 8192
"""Replicas that fall further behind miss the oldest deltas."""
MAX_BLOCKS = 1 << 20
_DELTA_HEAD = struct.Struct("<BHI")
_LEARNT, _DROPPED = 1, 2


@dataclass(frozen=True, slots=True)
class Held:
    """Capacity and blocks of a server; ``dump`` is in the format of ``native.PrefixTable``."""

    capacity: int
    dump: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Blocks by server; ``kind`` names the unit and size of blocks."""

    kind: str
    servers: Mapping[str, Held] = field(default_factory=dict)


def rows_of(dump: bytes) -> NDArray[np.void]:
    """Return the blocks of a dump: ``hash``, and ``parent``, the position of another row (all bits set: none)."""
    return np.frombuffer(dump, dtype=_TABLE_ROW)


def take_snapshot(index: ApproximatePrefixIndex, kind: str, slots: Mapping[str, int]) -> Snapshot:
    return Snapshot(kind, {name: Held(index.capacity_of(slot), index.dump(slot)) for name, slot in slots.items()})


def restore(index: ApproximatePrefixIndex, snapshot: Snapshot, kind: str, slots: Mapping[str, int]) -> int:
    """Load the blocks of the snapshot's servers that have a slot; return their number.

    Raises:
        InvalidInput: another kind of blocks, or invalid rows. The index is then empty.
    """
    # Hashes of blocks of another size would never match, but would fill the table up to each server's capacity.
    if snapshot.kind != kind:
        raise InvalidInput(f"a snapshot of blocks of kind {snapshot.kind!r}; this router's are {kind!r}")
    restored = 0
    try:
        for name, entry in snapshot.servers.items():
            slot = slots.get(name)
            if slot is not None:
                index.set_capacity(slot, entry.capacity)
                index.load(slot, entry.dump)
                restored += index.blocks_of(slot)
    except ValueError as error:
        # All or nothing: a partial snapshot would look like servers with cold caches.
        for slot in slots.values():
            index.forget(slot)
        raise InvalidInput(f"an invalid snapshot: {error}") from None
    return restored


def pack_snapshot(snapshot: Snapshot) -> bytes:
    parts = [_text(snapshot.kind)]
    for name, entry in snapshot.servers.items():
        rows = rows_of(entry.dump)
        stored = np.empty(len(rows), dtype=_STORED_ROW)
        stored["hash"], stored["parent"] = rows["hash"], rows["parent"]
        parts += [_text(name), _SERVER.pack(entry.capacity, len(rows)), stored.tobytes()]
    body = b"".join(parts)
    return _head(len(snapshot.servers), _crc(len(snapshot.servers), body)) + body


def unpack_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot in ``data``.

    Raises:
        InvalidInput: no sound snapshot; LaterFile for a later version.
    """
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        raise InvalidInput(f"not a snapshot of a prefix index: it begins with {data[:8].hex() or 'nothing'}")
    _, version, servers, crc, zero = _HEAD.unpack_from(data)
    if version > SNAPSHOT_VERSION:
        raise LaterFile(f"a snapshot of version {version}: this release reads version {SNAPSHOT_VERSION}")
    if version != SNAPSHOT_VERSION:
        raise InvalidInput(f"a snapshot of version {version}: this release reads version {SNAPSHOT_VERSION}")
    if zero or _crc(servers, data[_HEAD.size :]) != crc:
        raise InvalidInput("a truncated or damaged snapshot: the checksum differs")
    try:
        kind, at = _read_text(data, _HEAD.size)
        entries: dict[str, Held] = {}
        for _ in range(servers):
            name, at = _read_text(data, at)
            capacity, blocks = _SERVER.unpack_from(data, at)
            at += _SERVER.size
            stored = np.frombuffer(data, dtype=_STORED_ROW, count=blocks, offset=at)
            at += stored.nbytes
            rows = np.zeros(blocks, dtype=_TABLE_ROW)
            rows["hash"], rows["parent"] = stored["hash"], stored["parent"]
            entries[name] = Held(capacity, rows.tobytes())
    except (struct.error, ValueError) as error:
        raise InvalidInput(f"an unreadable snapshot: {error}") from None
    if at != len(data):
        raise InvalidInput(f"a snapshot with {len(data) - at} extra bytes")
    return Snapshot(kind, entries)


def _head(servers: int, crc: int) -> bytes:
    return _HEAD.pack(_MAGIC, SNAPSHOT_VERSION, servers, crc, 0)


def _crc(servers: int, body: bytes) -> int:
    return native.crc32(body, native.crc32(_head(servers, 0)))


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) > _MAX_NAME_BYTES:
        raise InvalidInput(f"a name of {len(raw)} bytes: expected at most {_MAX_NAME_BYTES}")
    return _LENGTH.pack(len(raw)) + raw


def _read_text(data: bytes, at: int) -> tuple[str, int]:
    (size,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    if size > _MAX_NAME_BYTES or at + size > len(data):
        raise ValueError(f"a name of {size} bytes")
    return data[at : at + size].decode("utf-8", "surrogatepass"), at + size


@dataclass(frozen=True, slots=True, eq=False)
class Learnt:
    server: str
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Dropped:
    """A server lacks this block and its successors."""

    server: str
    block: int


Delta = Learnt | Dropped


class SharedPrefixIndex(ApproximatePrefixIndex):
    """Approximate index with a log of its changes (deltas) for other replicas of the router.

    ``log_end`` is the number of the next delta.
    """

    def __init__(
        self,
        name_of: Callable[[int], str | None],
        slot_of: Callable[[str], int | None],
        blocks_per_server: int,
        max_match: int | None = None,
        secret: int | None = None,
    ) -> None:
        super().__init__(blocks_per_server, max_match, secret)
        self.counters = Counters()
        # Replicas number servers differently, so deltas name them.
        self._name_of, self._slot_of = name_of, slot_of
        self._log: ChangeLog[Delta] = ChangeLog(MAX_DELTAS)

    def learn(self, slot: int, blocks: Blocks) -> None:
        super().learn(slot, blocks)
        if len(blocks):
            self._append(slot, lambda name: Learnt(name, self._chain(blocks)))

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        dropped = super().correct(slot, blocks, cached_blocks)
        if dropped:
            self._append(slot, lambda name: Dropped(name, int(blocks[cached_blocks])))
        return dropped

    def _append(self, slot: int, delta: Callable[[str], Delta]) -> None:
        name = self._name_of(slot)
        if name is not None:
            self._log.append(delta(name))

    @property
    def log_start(self) -> int:
        return self._log.start

    @property
    def log_end(self) -> int:
        return self._log.end

    def since(self, number: int, most: int | None = None) -> list[Delta] | None:
        """Return up to ``most`` deltas from ``number`` on; None if some are no longer logged."""
        # The log is bounded: a publisher that was disconnected for long counts the lost deltas and continues.
        return self._log.since(number, most)

    def absorb(self, deltas: Iterable[Delta]) -> None:
        """Apply deltas of other replicas; skip unknown servers."""
        for delta in deltas:
            slot = self._slot_of(delta.server)
            if slot is None:
                self.counters.add("deltas_of_unknown_servers")
            elif isinstance(delta, Learnt):
                super().learn(slot, delta.blocks)
                self.counters.add("deltas_absorbed")
            else:
                super().correct(slot, np.array([delta.block], dtype=np.uint64), 0)
                self.counters.add("deltas_absorbed")


def pack_delta(delta: Delta) -> bytes:
    name = delta.server.encode("utf-8", "surrogatepass")
    if isinstance(delta, Learnt):
        hashes = np.ascontiguousarray(delta.blocks, dtype="<u8")
        return _DELTA_HEAD.pack(_LEARNT, len(name), len(hashes)) + name + hashes.tobytes()
    return _DELTA_HEAD.pack(_DROPPED, len(name), 1) + name + delta.block.to_bytes(8, "little")


def unpack_deltas(data: bytes) -> Iterator[Delta]:
    """Yield the deltas in ``data``.

    Raises:
        InvalidInput: invalid bytes, after the deltas before them.
    """
    at = 0
    while at < len(data):
        if len(data) - at < _DELTA_HEAD.size:
            raise InvalidInput("a truncated delta")
        kind, name_bytes, count = _DELTA_HEAD.unpack_from(data, at)
        at += _DELTA_HEAD.size
        end = at + name_bytes + 8 * count
        if (
            kind not in (_LEARNT, _DROPPED)
            or count > MAX_BLOCKS
            or (kind == _DROPPED and count != 1)
            or end > len(data)
        ):
            raise InvalidInput(f"an invalid delta: kind {kind}, {count} blocks, {len(data) - at} bytes left")
        try:
            server = data[at : at + name_bytes].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"a delta with an invalid server name: {error}") from None
        hashes = np.frombuffer(data, dtype="<u8", count=count, offset=at + name_bytes).astype(np.uint64)
        yield Learnt(server, hashes) if kind == _LEARNT else Dropped(server, int(hashes[0]))
        at = end
