"""RadixIndex: block hash → BlockInfo, and the longest prefix of a prompt that is present (paper §3.10).

Below: entries (``BlockInfo``), the groups of what they share, and the index.

Because hashes are chained, one hash names its whole prefix, so no edge labels are compared: a block is found by one
lookup and knows the block before it (``native.twin.blocks``). A prefix is looked up from its first block to the first
that is absent: a hole stops it, however much is present behind.
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

# An entry as a Python object takes about 300 bytes, and an index has millions of them: they are kept packed, in rows of
# 36 bytes, in the form in which the journal has them. What blocks set together share (strategy, servers, context) is
# kept once, as a group whose number ends the row.
_ROW = struct.Struct("<IQIdiiI")
ROW_BYTES = _ROW.size


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What finds and rebuilds a block: its size, and where its chunks were stored (spec §1, radix index)."""

    chunks: int
    value_bytes: int
    value_crc: int
    """CRC-32 of the whole stored value."""
    set_at_s: float
    """When it was set, seconds since the Unix epoch."""
    slot_moves: int
    """Slot moves of the anchor between the epoch and the setting, from which the chunks' present places follow."""
    plane_moves: int
    strategy: str
    """Name of the placement strategy, such as ``rotation_hop``."""
    servers: int
    context: bytes = b""
    """Digest of the cache context, so that a whole context can be cleared."""
    chunk_bytes: int = 0
    """Size of its chunks where that is not the default; 0: the default, or unknown."""


Group = tuple[str, int, bytes, int]
"""Fields that blocks set together share: (strategy, servers, context, size of chunks or 0)."""


class Groups:
    """What blocks share, by number; packs entries into rows that name a group, little-endian."""

    __slots__ = ("_numbers", "listed")

    def __init__(self, listed: Iterable[Group] = ()) -> None:
        self.listed: list[Group] = list(listed)
        self._numbers = {group: number for number, group in enumerate(self.listed)}

    def number(self, group: Group) -> int:
        """A group's number; a new one if it has none. InvalidInput for one that cannot be recorded."""
        number = self._numbers.get(group)
        if number is None:
            _check_group(group)
            number = self._numbers[group] = len(self.listed)
            self.listed.append(group)
        return number

    def pack(self, info: BlockInfo) -> bytes:
        """The row of ``info``; its group is kept. A number that does not fit is :class:`InvalidInput`."""
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
        """The entry of a row; IndexError where its group is not there."""
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


class RadixIndex:
    """The blocks that are present, with an entry for each. Not thread-safe; does no I/O.

    Depth is the number of blocks before a block in its prompt. A block may be present while one before it is
    not (a hole): it is kept, but no prefix reaches it until the hole is filled.
    """

    def __init__(self) -> None:
        self._table = native.BlockTable()
        self._groups = Groups()
        self._packed_groups: dict[tuple[bytes, bool], Sequence[int]] = {}
        """Numbers of the groups of records that were replayed, by their bytes."""

    @property
    def capacity_bytes(self) -> float:
        """Of the memory that the blocks are in, for ``bytes_by_servers``."""
        return self._table.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, size_bytes: float) -> None:
        self._table.capacity_bytes = size_bytes

    def clear(self) -> None:
        """Removes everything."""
        self._table.clear()
        self._groups = Groups()
        self._packed_groups.clear()

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, block_hash: bytes) -> bool:
        return self._table.place(block_hash) is not None

    def __iter__(self) -> Iterator[bytes]:
        """Every block hash present, prefix-closed or not, in no order."""
        return (key for key, _, _ in self._table.items())

    def add(
        self, hashes: Sequence[bytes], infos: Sequence[BlockInfo], start: int = 0, parent: bytes | None = None
    ) -> int:
        """Adds a chain (``hashes[i]`` follows ``hashes[i-1]``) and returns how many blocks are new.

        A block that is present gets the new info. ``start`` is the depth of ``hashes[0]`` and ``parent`` the
        hash before it (None exactly when ``start`` is 0); the parent need not be present. Raises
        :class:`InvalidInput` and changes nothing when the chain contradicts itself or what is known.
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
        """Applies the records in ``data`` from ``at`` on that add or remove blocks, up to the first that is incomplete,
        damaged, of another kind, or a contradiction; returns where that begins. ``groups_of``: reads the groups of a
        record (their bytes, how many, whether they give the size of chunks); of none it is a contradiction.
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
        """Number of leading hashes that are all present."""
        return self._table.leading(hashes)

    def get(self, block_hash: bytes) -> BlockInfo | None:
        """The entry of a block; None if it is absent. The blocks before it may be absent, too."""
        return self.infos([block_hash])[0]

    def infos(self, hashes: Sequence[bytes]) -> list[BlockInfo | None]:
        """``get`` of each."""
        return [None if row is None else self._groups.unpack(row) for row in self._table.find(hashes)]

    def bytes_by_servers(self) -> dict[int, float]:
        """Bytes of the values present, by the number of servers they were set on. A value counts the less the more has
        been set after it (exponentially, by ``capacity_bytes``): most that is evicted is never reported.
        """
        held: dict[int, float] = {}
        for group, size_bytes in zip(self._groups.listed, self._table.held(), strict=False):
            held[group[1]] = held.get(group[1], 0.0) + size_bytes
        return held

    def place_of(self, key: bytes) -> tuple[int, bytes | None] | None:
        """Depth of a block and the hash before it; None if it is not present."""
        return self._table.place(key)

    def free_place(self, block_hash: bytes) -> tuple[int, bytes | None]:
        """A place for an absent block whose writer gave none: one that contradicts no entry.

        That is depth 0; or, where blocks are known to follow it, before those and behind a made-up hash, so that no
        prefix reaches it by the index alone.
        """
        below = self._table.below(block_hash)
        return (0, None) if below is None or below == 1 else (below - 1, bytes(0xFF - byte for byte in block_hash))

    def remove(self, key: bytes) -> bool:
        """Removes one block; those behind it stay, out of reach until it is added again. False if absent."""
        return self._table.remove(key)

    def remove_context(self, context: bytes) -> list[bytes]:
        """Removes every block of a cache context and returns their hashes, deepest first."""
        numbers = {number for number, group in enumerate(self._groups.listed) if group[2] == context}
        found = [(depth, key) for key, depth, number in self._table.items() if number in numbers] if numbers else []
        found.sort(reverse=True)
        for _, key in found:
            self.remove(key)
        return [key for _, key in found]

    def runs(self, visit: Callable[[int, bytes | None, bytes, bytes, Sequence[Group]], object]) -> None:
        """Calls ``visit`` with every run, a chain that is as long as can be: the depth of its first block, the hash
        before it, the hashes, their rows, and the groups that these name by their place. It must not change the index.
        """

        def visit_run(start: int, parent: bytes | None, hashes: bytes, rows: bytes, numbers: list[int]) -> None:
            visit(start, parent, hashes, rows, [self._groups.listed[number] for number in numbers])

        self._table.runs(visit_run)

    def _contradiction(self, hashes: Sequence[bytes], start: int, parent: bytes | None) -> InvalidInput:
        """What of a well-formed chain contradicts entries."""
        previous = None
        for depth, key in enumerate(hashes if parent is None else [parent, *hashes], start - (parent is not None)):
            place, below = self._table.place(key), self._table.below(key)
            if place is not None and (place[0] != depth or (depth >= start and place[1] != previous)):
                return InvalidInput(f"block {key.hex()} is known at depth {place[0]} of another chain, not at {depth}")
            if below is not None and below != depth + 1:
                return InvalidInput(f"the block after {key.hex()} is at another depth than {depth + 1}")
            previous = key
        return InvalidInput(f"a chain of {len(hashes)} blocks at depth {start} contradicts what is known")
