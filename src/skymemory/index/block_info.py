"""An index entry of one block, and a table that holds a million of them in 36 bytes each."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory.errors import InvalidInput, MalformedPacket

_ROW = struct.Struct("<IQIdiiI")
ROW_BYTES = _ROW.size
_GROUP_COLUMN = np.dtype({"names": ["group"], "formats": ["<u4"], "offsets": [ROW_BYTES - 4], "itemsize": ROW_BYTES})
_GROUP_HEAD = struct.Struct("<BHI")
_GROUP_HEAD_SIZED = struct.Struct("<BHII")


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


class InfoTable:
    """Rows of :class:`BlockInfo`, packed little-endian; the parts that repeat are kept once, as groups."""

    __slots__ = ("_numbers", "groups", "rows")

    def __init__(self, groups: Iterable[Group] = (), rows: bytes = b"") -> None:
        self.groups: list[Group] = list(groups)
        self.rows = bytearray(rows)
        self._numbers = {group: number for number, group in enumerate(self.groups)}

    def __len__(self) -> int:
        return len(self.rows) // ROW_BYTES

    def pack(self, info: BlockInfo) -> bytes:
        """The row of ``info``; its group is kept. A number that does not fit is :class:`InvalidInput`."""
        if not math.isfinite(info.set_at_s):
            raise InvalidInput(f"set_at_s must be finite, got {info.set_at_s}")
        group = (info.strategy, info.servers, info.context, info.chunk_bytes)
        number = self._numbers.get(group)
        if number is None:
            self._check_group(group)
            number = len(self.groups)
        try:
            row = _ROW.pack(
                info.chunks, info.value_bytes, info.value_crc, info.set_at_s, info.slot_moves, info.plane_moves, number
            )
        except struct.error as error:
            raise InvalidInput(
                f"{info} does not fit ({error}): chunks and value_crc have 32 bits, value_bytes 64, moves 31 and a sign"
            ) from None
        if number == len(self.groups):
            self.groups.append(group)
            self._numbers[group] = number
        return row

    def put(self, at: int, row: bytes) -> None:
        """Writes a packed row at position ``at``, at most one past the end."""
        self.rows[at * ROW_BYTES : (at + 1) * ROW_BYTES] = row

    def get(self, at: int) -> BlockInfo:
        chunks, value_bytes, crc, set_at_s, slot_moves, plane_moves, number = _ROW.unpack_from(
            self.rows, at * ROW_BYTES
        )
        return BlockInfo(chunks, value_bytes, crc, set_at_s, slot_moves, plane_moves, *self.groups[number])

    def select(self, positions: Sequence[int]) -> InfoTable:
        """A table of the rows at ``positions``, in that order, with only the groups they use."""
        rows = np.frombuffer(self.rows, dtype=f"V{ROW_BYTES}")[np.asarray(positions, dtype=np.int64)]
        column = rows.view(_GROUP_COLUMN)["group"]
        used, column[:] = np.unique(column, return_inverse=True)
        return InfoTable([self.groups[number] for number in used], rows.tobytes())

    def rows_of_context(self, context: bytes) -> npt.NDArray[np.bool_]:
        """Per row, whether its block belongs to ``context``."""
        numbers = [number for number, group in enumerate(self.groups) if group[2] == context]
        return np.isin(np.frombuffer(self.rows, dtype=_GROUP_COLUMN)["group"], numbers)

    def check(self) -> None:
        """Raises :class:`MalformedPacket` when a row names a missing group."""
        column = np.frombuffer(self.rows, dtype=_GROUP_COLUMN)["group"]
        if len(column) and int(column.max()) >= len(self.groups):
            raise MalformedPacket(f"a row names group {int(column.max())} of {len(self.groups)}")

    @staticmethod
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


def sized(groups: Iterable[Group]) -> bool:
    """Whether a group gives the size of its chunks: the record or snapshot then has version 2."""
    return any(chunk_bytes for _, _, _, chunk_bytes in groups)


def pack_groups(groups: Sequence[Group]) -> bytes:
    """Every group as: length of the strategy 1, length of the context 2, servers 4, [size of chunks 4], strategy,
    context. All have the size if the groups are ``sized``.
    """
    parts = []
    head = _GROUP_HEAD_SIZED if sized(groups) else _GROUP_HEAD
    for strategy, servers, context, chunk_bytes in groups:
        numbers = (servers, chunk_bytes) if head is _GROUP_HEAD_SIZED else (servers,)
        parts += [head.pack(len(strategy), len(context), *numbers), strategy.encode(), context]
    return b"".join(parts)


def unpack_groups(view: memoryview, count: int, with_sizes: bool = False) -> tuple[list[Group], int]:
    """``count`` groups from the start of ``view``, and their bytes. ``with_sizes``: they are ``sized``."""
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
