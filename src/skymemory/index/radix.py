"""RadixIndex: ``BlockInfo`` by block hash, and the longest present prefix of a prompt (paper §3.10).

A hash names its complete prefix, so no edge labels are compared: one lookup finds a block, which knows its predecessor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from skymemory import native
from skymemory.errors import InvalidInput
from skymemory.kv.block import HASH_BYTES, MAX_DEPTH, Buffer

_KEPT_PACKED = 256

# An entry as a Python object takes about 300 bytes, and an index has millions of them. So entries are kept packed, in
# rows of 36 bytes, in the format of the journal. What blocks set together share (strategy, servers, context) is kept
# once, as a group whose number ends the row.
_ROW = struct.Struct("<IQIdiiI")
ROW_BYTES = _ROW.size


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """Entry of a stored KV block: how its value is divided and placed."""

    chunks: int
    value_bytes: int
    value_crc: int
    """CRC-32 of the complete stored value."""
    set_at_s: float
    """Unix time."""
    slot_moves: int
    """Slot moves from the epoch to the setting, which determine the current places."""
    plane_moves: int
    strategy: str
    servers: int
    context: bytes = b""
    """Digest of the cache context."""
    chunk_bytes: int = 0
    """Size of its chunks; 0: the default, or unknown."""


Group = tuple[str, int, bytes, int]
"""Fields that blocks set together share: (strategy, servers, context, chunk_bytes)."""


class Groups:
    """Groups by number; packs entries into little-endian rows that name a group."""

    __slots__ = ("_numbers", "listed")

    def __init__(self, listed: Iterable[Group] = ()) -> None:
        self.listed: list[Group] = list(listed)
        self._numbers = {group: number for number, group in enumerate(self.listed)}

    def number(self, group: Group) -> int:
        number = self._numbers.get(group)
        if number is None:
            _check_group(group)
            number = self._numbers[group] = len(self.listed)
            self.listed.append(group)
        return number

    def pack(self, info: BlockInfo) -> bytes:
        """Return the row of ``info``; InvalidInput if a number does not fit."""
        if not math.isfinite(info.set_at_s):
            raise InvalidInput(f"set_at_s must be finite, got {info.set_at_s}")
        numbers = info.chunks, info.value_bytes, info.value_crc, info.set_at_s, info.slot_moves, info.plane_moves
        try:
            row = _ROW.pack(*numbers, 0)
        except struct.error as error:
            raise InvalidInput(
                f"{info} does not fit ({error}): chunks and value_crc have 32 bits, value_bytes 64, moves 31 and a sign"
            ) from None
        number = self.number((info.strategy, info.servers, info.context, info.chunk_bytes))
        return _ROW.pack(*numbers, number) if number else row

    def unpack(self, row: Buffer) -> BlockInfo:
        *numbers, number = _ROW.unpack(row)
        return BlockInfo(*numbers, *self.listed[number])


def _check_group(group: Group) -> None:
    strategy, servers, context, chunk_bytes = group
    if not isinstance(chunk_bytes, int) or not 0 <= chunk_bytes < 2**32:
        raise InvalidInput(f"chunk_bytes must be in 0..2^32-1, got {chunk_bytes!r}")
    if not isinstance(strategy, str) or not strategy.isascii() or len(strategy) > 255:
        raise InvalidInput(f"strategy must be an ASCII name of at most 255 letters, got {strategy!r}")
    if not isinstance(servers, int) or not 0 <= servers < 2**32:
        raise InvalidInput(f"servers must be in 0..2^32-1, got {servers!r}")
    if not isinstance(context, bytes) or len(context) > 0xFFFF:
        raise InvalidInput("context must be bytes, at most 65535 of them")


def check_chain(hashes: Sequence[bytes], start: int, parent: bytes | None) -> None:
    """Raise InvalidInput unless a chain at depths ``start``, … after ``parent`` (None exactly at depth 0) is
    possible.
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


class RadixIndex:
    """Entries of the present blocks. Not thread-safe; no I/O.

    Depth is the number of blocks before a block. No prefix reaches a block after a hole.
    """

    def __init__(self) -> None:
        self._table = native.BlockTable()
        self._groups = Groups()
        self._packed_groups: dict[tuple[bytes, bool], Sequence[int]] = {}

    @property
    def capacity_bytes(self) -> float:
        return self._table.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, size_bytes: float) -> None:
        self._table.capacity_bytes = size_bytes

    def clear(self) -> None:
        self._table.clear()
        self._groups = Groups()
        self._packed_groups.clear()

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, block_hash: bytes) -> bool:
        return self._table.place(block_hash) is not None

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _, _ in self._table.items())

    def add(
        self, hashes: Sequence[bytes], infos: Sequence[BlockInfo], start: int = 0, parent: bytes | None = None
    ) -> int:
        """Add a chain, or replace its infos; return the number of new blocks. ``start``: depth of the first;
        ``parent``: hash before it, present or not. InvalidInput, with no change, if the chain contradicts itself or
        known entries.
        """
        if len(hashes) != len(infos):
            raise InvalidInput(f"{len(hashes)} hashes and {len(infos)} infos: one info per hash is expected")
        check_chain(hashes, start, parent)
        rows = [self._groups.pack(info) for info in infos]
        new = self._table.enter(b"".join(hashes), b"".join(rows), start, parent)
        if new is None:
            raise self._contradiction(hashes, start, parent)
        return new

    def replay(self, data: Buffer, at: int, groups_of: Callable[[bytes, int, bool], Sequence[Group]]) -> int:
        """Apply additions and removals from ``at`` up to the first other, incomplete, damaged or contradictory record;
        return its position. ``groups_of`` parses a record's groups; none: a contradiction.
        """

        def numbers_of(packed: bytes, count: int, sized: bool) -> Sequence[int]:
            numbers = self._packed_groups.get((packed, sized))
            if numbers is None or len(numbers) != count:
                numbers = [self._groups.number(group) for group in groups_of(packed, count, sized)]
                if len(self._packed_groups) >= _KEPT_PACKED:
                    self._packed_groups.clear()
                self._packed_groups[packed, sized] = numbers
            return numbers

        return self._table.replay(data, at, numbers_of)

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        return self._table.leading(hashes)

    def get(self, block_hash: bytes) -> BlockInfo | None:
        return self.infos([block_hash])[0]

    def infos(self, hashes: Sequence[bytes]) -> list[BlockInfo | None]:
        return [None if row is None else self._groups.unpack(row) for row in self._table.find(hashes)]

    def bytes_by_servers(self) -> dict[int, float]:
        """Return the present values' bytes by number of servers. Most evictions are never reported, so weights decay
        exponentially with bytes set later.
        """
        bytes_by_servers: dict[int, float] = {}
        for group, size_bytes in zip(self._groups.listed, self._table.group_bytes(), strict=False):
            bytes_by_servers[group[1]] = bytes_by_servers.get(group[1], 0.0) + size_bytes
        return bytes_by_servers

    def place_of(self, key: bytes) -> tuple[int, bytes | None] | None:
        return self._table.place(key)

    def free_place(self, block_hash: bytes) -> tuple[int, bytes | None]:
        """Return a possible place for an absent block: depth 0 or, if blocks follow, the depth before them, after a
        made-up hash, so that no prefix reaches it.
        """
        below = self._table.below(block_hash)
        return (0, None) if below is None or below == 1 else (below - 1, bytes(0xFF - byte for byte in block_hash))

    def remove(self, key: bytes) -> bool:
        """Remove a block; False if absent. Its successors stay, unreachable."""
        return self._table.remove(key)

    def remove_context(self, context: bytes) -> list[bytes]:
        """Remove the blocks of a cache context. Return their hashes, the deepest first."""
        numbers = {number for number, group in enumerate(self._groups.listed) if group[2] == context}
        blocks = [(depth, key) for key, depth, number in self._table.items() if number in numbers] if numbers else []
        blocks.sort(reverse=True)
        for _, key in blocks:
            self.remove(key)
        return [key for _, key in blocks]

    def runs(self, visit: Callable[[int, bytes | None, bytes, bytes, Sequence[Group]], object]) -> None:
        """Call ``visit``, which must not change the index, with every run: first depth, hash before it, hashes, rows,
        and the groups that rows name by position.
        """

        def visit_run(start: int, parent: bytes | None, hashes: bytes, rows: bytes, numbers: list[int]) -> None:
            visit(start, parent, hashes, rows, [self._groups.listed[number] for number in numbers])

        self._table.runs(visit_run)

    def _contradiction(self, hashes: Sequence[bytes], start: int, parent: bytes | None) -> InvalidInput:
        previous = None
        for depth, key in enumerate(hashes if parent is None else [parent, *hashes], start - (parent is not None)):
            place, below = self._table.place(key), self._table.below(key)
            if place is not None and (place[0] != depth or (depth >= start and place[1] != previous)):
                return InvalidInput(f"block {key.hex()} is known at depth {place[0]} of another chain, not at {depth}")
            if below is not None and below != depth + 1:
                return InvalidInput(f"the block after {key.hex()} is at another depth than {depth + 1}")
            previous = key
        return InvalidInput(f"a chain of {len(hashes)} blocks at depth {start} contradicts what is known")
