"""RadixIndex: block hash → BlockInfo, and the longest prefix of a prompt that is present (paper §3.10).

Blocks are kept as path-compressed *runs*: maximal chains without a branch inside and without a hole. Because
hashes are chained, one hash names its whole prefix, so no edge labels are compared: a block is found by one
look-up, and a run knows the hash it hangs under. A run is *closed* when the chain of runs above it reaches a
first block without a gap. "Closed" is monotone along a prompt, holes or not: block k can only be closed if
block k-1 is. So the longest prefix is a binary search over "is it closed", always correct, 10 look-ups for
1,000 blocks. Hashes that are of no chain are found out by comparing them with those of the runs passed.

Whether a run is closed is remembered until a hole opens or closes somewhere (an epoch number); asking again
walks up the runs above it once. Opening and closing a hole touch one run, whatever hangs below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skymemory.errors import InvalidInput
from skymemory.index.block_info import BlockInfo, InfoTable
from skymemory.index.chain import check_chain, split_hashes
from skymemory.index.forest import Forest
from skymemory.index.journal import Record, RecordOp, encode_record
from skymemory.index.snapshot import Snapshot, pack_snapshot, unpack_snapshot
from skymemory.kv.chunk import Buffer

__all__ = ["BlockInfo", "RadixIndex"]


class RadixIndex:
    """Which blocks are present, with what is known of each. Not thread-safe; does no I/O.

    Depth is the number of blocks before a block in its prompt. A block may be present while one before it is
    not (a hole): it is kept, but no prefix reaches it until the hole is filled again.
    """

    def __init__(self) -> None:
        self._forest = Forest()
        self._infos = InfoTable()

    def __len__(self) -> int:
        return len(self._forest.rows)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._forest.rows

    def __iter__(self) -> Iterator[bytes]:
        """Every block hash present, prefix-closed or not."""
        return iter(self._forest.rows)

    def add(
        self,
        hashes: Sequence[bytes],
        infos: Sequence[BlockInfo],
        start: int = 0,
        parent: bytes | None = None,
    ) -> int:
        """Adds a chain (``hashes[i]`` follows ``hashes[i-1]``) and returns how many blocks are new.

        A block that is present gets the new info. ``start`` is the depth of ``hashes[0]`` and ``parent`` the
        hash before it (None exactly when ``start`` is 0); the parent need not be present. Raises
        :class:`InvalidInput` and changes nothing when the chain contradicts itself or what is known.
        """
        if len(hashes) != len(infos):
            raise InvalidInput(f"{len(hashes)} hashes and {len(infos)} infos: one info per hash is expected")
        check_chain(hashes, start, parent)
        self._forest.check(hashes, start, parent)
        packed = [self._infos.pack(info) for info in infos]
        new = 0
        previous = parent
        for depth, (key, row) in enumerate(zip(hashes, packed, strict=True), start):
            at = self._forest.rows.get(key)
            if at is None:
                at = self._forest.insert(key, depth, previous)
                new += 1
            self._infos.put(at, row)
            previous = key
        return new

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain from its first block, as ``hash_blocks`` gives, are all present. Of other
        hashes no more than are present: it ends where they leave the chain that most of them are of.
        """
        forest = self._forest
        rows, run_of, depths, epoch = forest.rows, forest.run_of, forest.depths, forest.epoch
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            at = rows.get(hashes[middle])
            if at is not None and depths[at] == middle:
                run = run_of[at]
                if run.closed if run.epoch == epoch else forest.is_closed(run):
                    last = min(run.start + len(run.keys), high) - 1
                    low = (last if hashes[last] == run.keys[last - run.start] else middle) + 1
                    continue
            high = middle
        return self._same_chain(hashes, low)

    def _same_chain(self, hashes: Sequence[bytes], count: int) -> int:
        """Up to where the first ``count`` hashes, of which the last is in its place, are what is before that."""
        forest, key, end = self._forest, hashes[count - 1] if count else None, count
        hashes = hashes if type(hashes) is list else list(hashes[:count])
        while key is not None:
            run = forest.run_of[forest.rows[key]]
            start, mine = run.start, run.keys
            if end - start < len(mine):  # a copy takes as long as the comparison
                mine = mine[: end - start]
            asked = hashes if end - start == len(hashes) else hashes[start:end]
            if mine != asked:
                count = start + next(at for at, pair in enumerate(zip(mine, asked, strict=True)) if pair[0] != pair[1])
            key, end = run.parent, start
        return count

    def get(self, block_hash: bytes) -> BlockInfo | None:
        """What is known of a block; None if it is not present. Says nothing about the blocks before it."""
        at = self._forest.rows.get(block_hash)
        return None if at is None else self._infos.get(at)

    def place_of(self, block_hash: bytes) -> tuple[int, bytes | None] | None:
        """Depth of a block in its prompt, and the hash before it; None if it is not present."""
        return self._forest.place_of(block_hash)

    def free_place(self, block_hash: bytes) -> tuple[int, bytes | None]:
        """A place for an absent block whose writer gave none: one that contradicts nothing known.

        That is a beginning of its own; or, where blocks are known to follow it, before those and behind a made-up hash,
        so that no prefix reaches it by the index alone.
        """
        below = self._forest.depth_below(block_hash)
        return (0, None) if below is None or below == 1 else (below - 1, bytes(0xFF - byte for byte in block_hash))

    def remove(self, block_hash: bytes) -> bool:
        """Forgets one block; what follows it stays, out of reach until it is added again. False if absent."""
        return self._forest.remove(block_hash)

    def remove_context(self, context: bytes) -> list[bytes]:
        """Forgets every block of a cache context and returns their hashes, deepest first."""
        mine = self._infos.rows_of_context(context)
        found = [(self._forest.depths[at], key) for key, at in self._forest.rows.items() if mine[at]]
        found.sort(reverse=True)
        for _, key in found:
            self.remove(key)
        return [key for _, key in found]

    def clear(self) -> None:
        """Forgets everything."""
        self._forest = Forest()
        self._infos = InfoTable()

    def orphans(self) -> list[bytes]:
        """Blocks present behind a hole: dead weight until it is filled (lazy eviction, paper §3.9)."""
        forest = self._forest
        return [key for run in forest.runs() if not forest.is_closed(run) for key in run.keys]

    def apply(self, record: Record) -> None:
        """Repeats a change read from a journal; records about the journal itself change no block."""
        if record.op is RecordOp.ADD:
            self.add(record.hashes, record.infos, record.start, record.parent)
        elif record.op is RecordOp.REMOVE:
            for block_hash in record.hashes:
                self.remove(block_hash)
        elif record.op is RecordOp.REMOVE_CONTEXT:
            self.remove_context(record.context)
        elif record.op is RecordOp.CLEAR:
            self.clear()

    def records(self) -> Iterator[bytes]:
        """The fewest records of a journal that make an index like this one: an ADD for each run."""
        for run in self._forest.runs():
            infos = [self._infos.get(self._forest.rows[key]) for key in run.keys]
            yield encode_record(RecordOp.ADD, run.keys, infos, start=run.start, parent=run.parent)

    def snapshot(self) -> bytes:
        """Everything as bytes, with a checksum; :meth:`restore` is the way back. About 68 bytes per block."""
        runs = self._forest.runs()
        keys = [key for run in runs for key in run.keys]
        infos = self._infos.select([self._forest.rows[key] for key in keys])
        heads = [(run.start, run.parent, len(run.keys)) for run in runs]
        return pack_snapshot(Snapshot(heads, b"".join(keys), infos))

    @classmethod
    def restore(cls, data: Buffer) -> RadixIndex:
        """The index a snapshot was taken of. Anything else is :class:`MalformedPacket`."""
        snapshot = unpack_snapshot(data)
        index = cls()
        index._forest.load(snapshot.runs, split_hashes(snapshot.hashes))
        index._infos = snapshot.infos
        return index
