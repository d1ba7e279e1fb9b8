"""``BlockTable``: the blocks of a radix index by hash, each with a packed row and the previous block.

A block named as a parent but absent has no row; it is forgotten with its last child. Rows are those of
``skymemory.index.radix``, records those of ``skymemory.index.journal``.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HASH_BYTES, _ROW_BYTES = 32, 36
_SIZE_AND_GROUP = struct.Struct("<4xQ20xI")
_GROUP = struct.Struct("<I")
_MOST_GROUPS = 1 << 24
_MOST_DEPTH = 0xFFFFFFFF
_FRAME = struct.Struct("<BBHII")
_ADD_HEAD = struct.Struct("<III32s")
_MARKER, _ADD, _REMOVE = 0x5B, 1, 2

NumbersOf = Callable[[bytes, int, bool], Sequence[int]]
"""Callback for a record's group numbers: their bytes, count, True if with chunk sizes."""
Visit = Callable[[int, "bytes | None", bytes, bytes, list[int]], object]


class _Block:
    """Block at ``depth`` of a chain; ``row`` is None if it is absent but named as parent by its ``children``."""

    __slots__ = ("children", "depth", "parent", "row")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.parent: bytes | None = None
        self.children = 0
        self.row: bytes | None = None


class BlockTable:
    """Table of blocks. Not thread-safe. Only ``bytes`` of length 32 are found."""

    def __init__(self) -> None:
        self.capacity_bytes = math.inf
        self._changes = 0
        self.clear()

    def clear(self) -> None:
        self._changes += 1
        self._blocks: dict[bytes, _Block] = {}
        self._present = 0
        self._held: list[float] = []

    def __len__(self) -> int:
        return self._present

    def enter(self, hashes: Buffer, rows: Buffer, start: int, parent: bytes | None) -> int | None:
        """Enter a chain, in rows with this table's group numbers, at depth ``start`` after ``parent``, replacing rows.
        Return the number of new blocks; None, unchanged, on a contradiction.
        """
        keys, packed = _split(hashes, _HASH_BYTES, "hashes"), _split(rows, _ROW_BYTES, "rows")
        if len(keys) != len(packed):
            raise ValueError(f"{len(keys)} hashes and {len(packed)} rows: one row for each is expected")
        if parent is not None and (not isinstance(parent, bytes) or len(parent) != _HASH_BYTES):
            raise ValueError(f"a parent must be None or {_HASH_BYTES} bytes")
        if any(_SIZE_AND_GROUP.unpack(row)[1] >= _MOST_GROUPS for row in packed):
            raise ValueError(f"a row names a group beyond {_MOST_GROUPS - 1}")
        if not 0 <= start <= _MOST_DEPTH - len(keys) or (start == 0) != (parent is None):
            return None
        if not keys:
            return 0
        depths: dict[bytes, int] = {}
        previous = parent
        for depth, key in enumerate([*([] if parent is None else [parent]), *keys], start - (parent is not None)):
            block = self._blocks.get(key)
            if depth != (depths.setdefault(key, depth) if block is None else block.depth):
                return None
            if depth >= start:
                if block is not None and block.row is not None and block.parent != previous:
                    return None
                previous = key
        self._changes += 1
        before, previous = self._present, parent
        for depth, (key, row) in enumerate(zip(keys, packed, strict=True), start):
            block = self._blocks.setdefault(key, _Block(depth))
            if block.row is None:
                self._present += 1
                block.parent = previous
                if previous is not None:
                    self._blocks.setdefault(previous, _Block(depth - 1)).children += 1
            else:
                self._count(block.row, -1)
            block.row = row
            self._count(row, 1)
            previous = key
        return self._present - before

    def remove(self, key: bytes) -> bool:
        block = self._block(key)
        if block is None or block.row is None:
            return False
        self._changes += 1
        self._count(block.row, -1)
        self._present -= 1
        parent, block.row, block.parent = block.parent, None, None
        if not block.children:
            del self._blocks[key]
        if parent is not None:
            above = self._blocks[parent]
            above.children -= 1
            if above.row is None and not above.children:
                del self._blocks[parent]
        return True

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        blocks = [self._block(key) for key in keys]
        return [None if block is None else block.row for block in blocks]

    def leading(self, keys: Sequence[bytes]) -> int:
        for at, key in enumerate(keys):
            block = self._block(key)
            if block is None or block.row is None:
                return at
        return len(keys)

    def place(self, key: bytes) -> tuple[int, bytes | None] | None:
        block = self._block(key)
        return None if block is None or block.row is None else (block.depth, block.parent)

    def below(self, key: bytes) -> int | None:
        """Return the depth of an absent block's children; None if it has none, or is present."""
        block = self._block(key)
        return None if block is None or block.row is not None else block.depth + 1

    def group_bytes(self) -> list[float]:
        """Return the values' bytes by group number, fading exponentially, by ``capacity_bytes`` of later values."""
        return list(self._held)

    def items(self) -> list[tuple[bytes, int, int]]:
        return [(key, self._blocks[key].depth, _SIZE_AND_GROUP.unpack(row)[1]) for key, row in self._there()]

    def runs(self, visit: Visit) -> None:
        """Call ``visit(start, parent, hashes, rows, groups)`` for every unbranched run of blocks. Rows name groups by
        position.

        Raises:
            RuntimeError: ``visit`` changed the table.
        """
        follows: dict[bytes, bytes] = {}
        heads = []
        for key, _ in self._there():
            parent = self._blocks[key].parent
            above = None if parent is None else self._blocks[parent]
            if parent is None or above is None or above.row is None or parent in follows:
                heads.append(key)
            else:
                follows[parent] = key
        changes = self._changes
        for head in heads:
            hashes, rows, groups = list[bytes](), list[bytes](), dict[int, int]()
            at: bytes | None = head
            while at is not None:
                row = self._blocks[at].row or b""
                number = _SIZE_AND_GROUP.unpack(row)[1]
                hashes.append(at)
                rows.append(row[:-4] + _GROUP.pack(groups.setdefault(number, len(groups))))
                at = follows.get(at)
            first = self._blocks[head]
            visit(first.depth, first.parent, b"".join(hashes), b"".join(rows), list(groups))
            if self._changes != changes:
                raise RuntimeError("the table was changed while its runs were visited")

    def replay(self, data: Buffer, at: int, numbers_of: NumbersOf) -> int:
        """Apply additions and removals from ``at``, up to the first incomplete, damaged, other or contradictory record;
        return its offset.
        """
        view = memoryview(data).cast("B")
        if not 0 <= at <= len(view):
            raise ValueError(f"records from byte {at} on, of {len(view)}")
        while at + _FRAME.size <= len(view):
            marker, op, version, body_bytes, crc = _FRAME.unpack_from(view, at)
            end = at + _FRAME.size + body_bytes
            if marker != _MARKER or end > len(view):
                break
            body = view[at + _FRAME.size : end]
            if zlib.crc32(body, zlib.crc32(_FRAME.pack(marker, op, version, body_bytes, 0))) != crc:
                break
            if not self._apply(op, version, body, numbers_of):
                break
            at = end
        return at

    def _apply(self, op: int, version: int, body: memoryview, numbers_of: NumbersOf) -> bool:
        """Apply a record; return False, without change, if it is of another kind or contradictory."""
        if op == _REMOVE and version == 1 and not len(body) % _HASH_BYTES:
            for key in _split(body, _HASH_BYTES, "hashes"):
                self.remove(key)
            return True
        if op != _ADD or version not in (1, 2) or len(body) < _ADD_HEAD.size:
            return False
        start, count, groups, named = _ADD_HEAD.unpack_from(body)
        ends_at = len(body) - count * (_HASH_BYTES + _ROW_BYTES)
        if ends_at < _ADD_HEAD.size or (start == 0 and any(named)):
            return False
        numbers = numbers_of(bytes(body[_ADD_HEAD.size : ends_at]), groups, version == 2)
        rows = []
        for row in _split(body[ends_at + count * _HASH_BYTES :], _ROW_BYTES, "rows"):
            place = _SIZE_AND_GROUP.unpack(row)[1]
            if place >= len(numbers):
                return False
            rows.append(row[:-4] + _GROUP.pack(numbers[place]))
        hashes = body[ends_at : ends_at + count * _HASH_BYTES]
        return self.enter(hashes, b"".join(rows), start, named if start else None) is not None

    def _block(self, key: object) -> _Block | None:
        return self._blocks.get(key) if isinstance(key, bytes) else None

    def _there(self) -> Iterator[tuple[bytes, bytes]]:
        for key, block in self._blocks.items():
            if block.row is not None:
                yield key, block.row

    def _count(self, row: bytes, sign: int) -> None:
        """Add a value to its group's fading bytes, or with ``sign`` -1 remove it."""
        size_bytes, number = _SIZE_AND_GROUP.unpack(row)
        if sign > 0 and self.capacity_bytes < math.inf:
            fade = math.exp(-size_bytes / self.capacity_bytes)
            self._held = [group_bytes * fade for group_bytes in self._held]
        self._held += [0.0] * (number + 1 - len(self._held))
        self._held[number] = max(0.0, self._held[number] + sign * size_bytes)


def _split(data: Buffer, piece_bytes: int, what: str) -> list[bytes]:
    raw = bytes(data)
    if len(raw) % piece_bytes:
        raise ValueError(f"{len(raw)} bytes of {what}: expected a multiple of {piece_bytes}")
    return [raw[at : at + piece_bytes] for at in range(0, len(raw), piece_bytes)]
