"""RadixIndex: block hash → BlockInfo, and the longest prefix of a prompt that is present (paper §3.10).

Below: entries (``BlockInfo``) the table that holds them, and the index, a forest of runs.

Blocks are kept as path-compressed *runs*: maximal chains without a branch inside and without a hole. Because
hashes are chained, one hash names its whole prefix, so no edge labels are compared: a block is found by one
lookup, and a run knows the hash it hangs under. A run is *closed* when the chain of runs above it reaches a
first block without a gap. "Closed" is monotone along a prompt, holes or not: block k can only be closed if
block k-1 is. So the longest prefix is a binary search over "is it closed", always correct, 10 lookups for
1,000 blocks. Hashes that form no chain are detected by comparing them with those of the runs passed.

Whether a run is closed is cached until a hole opens or closes anywhere (an epoch number); then the runs above it
are walked once. Opening or closing a hole changes one run, whatever hangs below.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.kv.block import HASH_BYTES, MAX_DEPTH

# An entry as a Python object takes about 300 bytes, and an index has a million of them: they are kept packed, in rows
# of 36 bytes, in the form in which the journal has them. What blocks set together share (strategy, servers, context) is
# kept once, as a group whose number ends the row.
_ROW = struct.Struct("<IQIdiiI")
ROW_BYTES = _ROW.size
_FEW_ROWS = 8
"""Of so few rows a loop is faster than NumPy."""
_VALUE_BYTES_AND_GROUP = struct.Struct("<4xQ20xI")
_GROUP_COLUMN = np.dtype({"names": ["group"], "formats": ["<u4"], "offsets": [ROW_BYTES - 4], "itemsize": ROW_BYTES})


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

    def size_and_group(self, at: int) -> tuple[int, int]:
        """The value's bytes at position ``at``, and the number of its group."""
        size_bytes, number = _VALUE_BYTES_AND_GROUP.unpack_from(self.rows, at * ROW_BYTES)
        return size_bytes, number

    def rows_of_context(self, context: bytes) -> npt.NDArray[np.bool_]:
        """Per row, whether its block belongs to ``context``."""
        numbers = [number for number, group in enumerate(self.groups) if group[2] == context]
        return np.isin(np.frombuffer(self.rows, dtype=_GROUP_COLUMN)["group"], numbers)

    def check(self) -> None:
        """Raises :class:`MalformedPacket` when a row names a missing group."""
        if len(self) <= _FEW_ROWS:
            last = max((self.size_and_group(at)[1] for at in range(len(self))), default=-1)
        else:
            last = int(np.frombuffer(self.rows, dtype=_GROUP_COLUMN)["group"].max())
        if last >= len(self.groups):
            raise MalformedPacket(f"a row names group {last} of {len(self.groups)}")

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


class Run:
    """``keys`` are at depths ``start``, ``start + 1``, …; ``keys[0]`` follows ``parent`` (None at depth 0)."""

    __slots__ = ("closed", "epoch", "keys", "parent", "start")

    def __init__(self, start: int, parent: bytes | None, keys: list[bytes]) -> None:
        self.start = start
        self.parent = parent
        self.keys = keys
        self.closed = False
        self.epoch = -1
        """The index's epoch for which ``closed`` holds."""


class RadixIndex:
    """The blocks that are present, with an entry for each. Not thread-safe; does no I/O.

    Depth is the number of blocks before a block in its prompt. A block may be present while one before it is
    not (a hole): it is kept, but no prefix reaches it until the hole is filled.

    Runs hang under the hash before them, whether that block is present or not, and a branch hangs in the middle of a
    run without splitting it: so opening or closing a hole touches one run, whatever grows above it.
    """

    def __init__(self) -> None:
        self.capacity_bytes = math.inf
        """Of the memory that the blocks are in, for ``bytes_by_servers``."""
        self.clear()

    def clear(self) -> None:
        """Removes everything."""
        self._infos = InfoTable()
        self._held: dict[int, float] = {}
        """``bytes_by_servers``, by the number of their group."""
        self._rows: dict[bytes, int] = {}
        """Hash → row number; rows of removed blocks are used again."""
        self._run_of: list[Run] = []
        self._depths = array("I")
        self._epoch = 0
        """Grows whenever a hole opens or closes above something present."""
        self._free: list[int] = []
        self._hanging: dict[bytes, dict[Run, None]] = {}
        """Hash → the runs that follow it, an ordered set."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._rows

    def __iter__(self) -> Iterator[bytes]:
        """Every block hash present, prefix-closed or not."""
        return iter(self._rows)

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
        self._check(hashes, start, parent)
        # All checks come before the first change: an invalid chain changes nothing.
        packed = [self._infos.pack(info) for info in infos]
        new = 0
        previous = parent
        for depth, (key, row) in enumerate(zip(hashes, packed, strict=True), start):
            at = self._rows.get(key)
            if at is None:
                at = self._insert(key, depth, previous)
                new += 1
            else:
                self._count(at, -1)
            self._infos.put(at, row)
            self._count(at, 1)
            previous = key
        return new

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks of a chain that are all present; the chain starts with its first block, as from
        ``hash_blocks``. For other hashes at most as many as are present: it ends where they leave the stored chain.
        """
        rows, run_of, depths, epoch = self._rows, self._run_of, self._depths, self._epoch
        # Binary search: "closed" is monotone. A hit skips to the end of its run if that equals the prompt there.
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            at = rows.get(hashes[middle])
            if at is not None and depths[at] == middle:
                run = run_of[at]
                if run.closed if run.epoch == epoch else self._is_closed(run):
                    last = min(run.start + len(run.keys), high) - 1
                    low = (last if hashes[last] == run.keys[last - run.start] else middle) + 1
                    continue
            high = middle
        return self._same_chain(hashes, low)

    def _same_chain(self, hashes: Sequence[bytes], count: int) -> int:
        """Up to where the first ``count`` hashes, of which the last is in its place, equal the stored chain."""
        key, end = hashes[count - 1] if count else None, count
        hashes = hashes if type(hashes) is list else list(hashes[:count])
        while key is not None:
            run = self._run_of[self._rows[key]]
            start, mine = run.start, run.keys
            if end - start < len(mine):  # a copy takes as long as the comparison
                mine = mine[: end - start]
            asked = hashes if end - start == len(hashes) else hashes[start:end]
            if mine != asked:
                count = start + next(at for at, pair in enumerate(zip(mine, asked, strict=True)) if pair[0] != pair[1])
            key, end = run.parent, start
        return count

    def get(self, block_hash: bytes) -> BlockInfo | None:
        """The entry of a block; None if it is absent. The blocks before it may be absent, too."""
        at = self._rows.get(block_hash)
        return None if at is None else self._infos.get(at)

    def bytes_by_servers(self) -> dict[int, float]:
        """Bytes of the values present, by the number of servers they were set on. A value counts the less the more has
        been set after it (exponentially, by ``capacity_bytes``): most that is evicted is never reported.
        """
        held: dict[int, float] = {}
        for number, size_bytes in self._held.items():
            servers = self._infos.groups[number][1]
            held[servers] = held.get(servers, 0.0) + size_bytes
        return held

    def _count(self, at: int, sign: int) -> None:
        """The value at a row is there, or is no longer."""
        size_bytes, group = self._infos.size_and_group(at)
        if sign > 0 and self.capacity_bytes < math.inf:
            fade = math.exp(-size_bytes / self.capacity_bytes)
            self._held = {number: its * fade for number, its in self._held.items()}
        self._held[group] = max(0.0, self._held.get(group, 0.0) + sign * size_bytes)

    def place_of(self, key: bytes) -> tuple[int, bytes | None] | None:
        """Depth of a block and the hash before it; None if it is not present."""
        at = self._rows.get(key)
        return None if at is None else (self._depths[at], self._parent_of(at))

    def free_place(self, block_hash: bytes) -> tuple[int, bytes | None]:
        """A place for an absent block whose writer gave none: one that contradicts no entry.

        That is depth 0; or, where blocks are known to follow it, before those and behind a made-up hash, so that no
        prefix reaches it by the index alone.
        """
        below = next((run.start for run in self._hanging.get(block_hash, ())), None)
        return (0, None) if below is None or below == 1 else (below - 1, bytes(0xFF - byte for byte in block_hash))

    def remove(self, key: bytes) -> bool:
        """Removes one block; those behind it become a run hanging under the absent hash, out of reach until it is added
        again. False if absent."""
        at = self._rows.pop(key, None)
        if at is None:
            return False
        self._count(at, -1)
        self._free.append(at)
        run = self._run_of[at]
        offset = self._depths[at] - run.start
        head, tail = run.keys[:offset], run.keys[offset + 1 :]
        # The longer of the two parts keeps the Run object: at most half of the rows are relabelled.
        if not tail:
            run.keys.pop()
            if not head:
                self._unhang(run)
        elif len(head) >= len(tail):
            below = Run(run.start + offset + 1, run.keys[offset], tail)
            run.keys = head
            self._label(tail, below)
            self._hang(below)
        else:
            self._unhang(run)
            if head:
                above = Run(run.start, run.parent, head)
                self._label(head, above)
                self._hang(above)
            run.start, run.parent, run.keys = run.start + offset + 1, run.keys[offset], tail
            self._hang(run)
        if key in self._hanging:
            self._epoch += 1
        return True

    def remove_context(self, context: bytes) -> list[bytes]:
        """Removes every block of a cache context and returns their hashes, deepest first."""
        mine = self._infos.rows_of_context(context)
        found = [(self._depths[at], key) for key, at in self._rows.items() if mine[at]]
        found.sort(reverse=True)
        for _, key in found:
            self.remove(key)
        return [key for _, key in found]

    def orphans(self) -> list[bytes]:
        """Blocks present behind a hole: dead weight until it is filled (lazy eviction, paper §3.9)."""
        return [key for run in self._all_runs() if not self._is_closed(run) for key in run.keys]

    def runs(self) -> Iterator[tuple[int, bytes | None, list[bytes], list[BlockInfo]]]:
        """Every run: the depth of its first block, the hash before it, its blocks and their entries."""
        for run in self._all_runs():
            yield run.start, run.parent, run.keys, [self._infos.get(self._rows[key]) for key in run.keys]

    # --- the forest of runs ---
    #
    # ``_rows``: hash → row; ``_run_of`` and ``_depths``: by row; ``_hanging``: hash → the runs behind it. A row number
    # is also the position of the entry in ``_infos``. Invariants: a run has no hole and at least one block; every run
    # with a parent is in ``_hanging``; ``_epoch`` has grown since any answer of ``_is_closed`` became wrong.

    def _all_runs(self) -> list[Run]:
        """Every run once."""
        return list(dict.fromkeys(self._run_of[at] for at in self._rows.values()))

    def _check(self, hashes: Sequence[bytes], start: int, parent: bytes | None) -> None:
        """Raises :class:`InvalidInput` when a well-formed chain contradicts entries."""
        at = None if parent is None else self._rows.get(parent)
        if at is not None and self._depths[at] != start - 1:
            raise InvalidInput(f"the parent is at depth {self._depths[at]}, not at {start - 1}")
        if parent is not None and any(run.start != start for run in self._hanging.get(parent, ())):
            raise InvalidInput(f"the block after {parent.hex()} is at another depth than {start}")
        previous = parent
        for depth, key in enumerate(hashes, start):
            at = self._rows.get(key)
            if at is None:
                if any(run.start != depth + 1 for run in self._hanging.get(key, ())):
                    raise InvalidInput(f"the block after {key.hex()} is at another depth than {depth + 1}")
            elif self._depths[at] != depth or self._parent_of(at) != previous:
                raise InvalidInput(f"block {key.hex()} is known at depth {self._depths[at]} of another chain")
            previous = key

    def _insert(self, key: bytes, depth: int, previous: bytes | None) -> int:
        """Inserts a block behind ``previous``, at the end of its run or as a new run; returns its row."""
        run = None
        above_at = None if previous is None else self._rows.get(previous)
        if above_at is not None:
            above = self._run_of[above_at]
            previous = above.keys[depth - 1 - above.start]  # the copy that is already held
            if previous is above.keys[-1]:
                run = above
                run.keys.append(key)
        if run is None:
            run = Run(depth, previous, [key])
            self._hang(run)
        if self._free:
            at = self._free.pop()
            self._run_of[at] = run
            self._depths[at] = depth
        else:
            at = len(self._run_of)
            self._run_of.append(run)
            self._depths.append(depth)
        self._rows[key] = at
        hanging = self._hanging.get(key)
        # A block that fills a hole joins the longest run behind it.
        if hanging:
            self._epoch += 1
            self._merge(run, max(hanging, key=lambda below: len(below.keys)))
        return at

    def _is_closed(self, run: Run) -> bool:
        """Whether every block before the run is present; cached for all runs on the way up."""
        # Up to a run whose answer is known for this epoch, to one at depth 0 (closed), or to a hole (not closed).
        asked = []
        while run.epoch != self._epoch:
            asked.append(run)
            at = None if run.parent is None else self._rows.get(run.parent)
            if at is None:
                closed = run.parent is None
                break
            run = self._run_of[at]
        else:
            closed = run.closed
        for one in asked:
            one.closed, one.epoch = closed, self._epoch
        return closed

    def _parent_of(self, at: int) -> bytes | None:
        run = self._run_of[at]
        offset = self._depths[at] - run.start
        return run.keys[offset - 1] if offset else run.parent

    def _merge(self, above: Run, below: Run) -> None:
        """One run of two, ``below`` following the last block of ``above``. Relabels the shorter."""
        self._unhang(below)
        if len(above.keys) >= len(below.keys):
            self._label(below.keys, above)
            above.keys += below.keys
            return
        self._unhang(above)
        self._label(above.keys, below)
        below.start, below.parent, below.keys = above.start, above.parent, above.keys + below.keys
        self._hang(below)

    def _label(self, keys: list[bytes], run: Run) -> None:
        for key in keys:
            self._run_of[self._rows[key]] = run

    def _hang(self, run: Run) -> None:
        if run.parent is not None:
            self._hanging.setdefault(run.parent, {})[run] = None

    def _unhang(self, run: Run) -> None:
        if run.parent is not None:
            hanging = self._hanging[run.parent]
            del hanging[run]
            if not hanging:
                del self._hanging[run.parent]
