"""Tables of the blocks that servers hold: ``PrefixTable`` believes (LRU), ``HolderTable`` follows engines' events.

Blocks are uint64 chained hashes (``backend.chain_hashes``): one names all before it. Servers are *slots*, small
numbers. In a ``PrefixTable`` each slot has a shelf of at most ``capacity`` blocks, in the order of their last use.
Learning a chain uses its blocks from the last to the first, so that a block is always used after those behind it, and
evicting the least recently used never takes the head of a prefix before its end: a slot's blocks are *prefix-closed*.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from typing import TYPE_CHECKING

from skymemory.native.twin.queues import Blocks, check_slot, hashes_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


MAX_CAPACITY = 1 << 28
_ROW = struct.Struct("=QII")
"""A block in a dump: its hash, the place of its parent in the same dump, and four zero bytes."""
_NO_PARENT = 0xFFFFFFFF


class PrefixTable:
    """``capacity``: blocks per slot, unless ``set_capacity`` changes it.

    ``secret`` (odd) makes the hash table's buckets unpredictable: else a client could choose prompts that share a
    bucket, and make the table slow. The twin's dictionaries do not use it.
    """

    def __init__(self, capacity: int, secret: int = 0x9E3779B97F4A7C15) -> None:
        _check_capacity(capacity)
        if not secret & 1:
            raise ValueError("the secret of a table must be odd")
        self._capacity = capacity
        self._changes = 0
        self._own: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        """Bit ``slot`` for each block that a slot holds; no block without a bit."""
        self._shelves: dict[int, OrderedDict[int, int | None]] = {}
        """Each block's parent, by block, the one last used last."""

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Number of leading blocks that each of ``slots`` holds. Does not count as a use."""
        # Sets of slots are bits of an integer. ``left`` are those that hold every block so far: a slot that lacks one
        # holds none behind it (prefix-closed), so its depth is settled there.
        depths = dict.fromkeys(slots, 0)
        left = 0
        for slot in depths:
            check_slot(slot)
            left |= 1 << slot
        hashes = hashes_of(blocks)
        for at, block in enumerate(hashes):
            still = left & self._holders.get(block, 0)
            if still != left:
                depths.update(dict.fromkeys(_slots(left ^ still), at))
                left = still
                if not left:
                    break
        depths.update(dict.fromkeys(_slots(left), len(hashes)))
        return [depths[slot] for slot in slots]

    def learn(self, slot: int, blocks: Blocks) -> None:
        """``slot`` holds this chain now, and uses it; evicts beyond its capacity, least recently used first."""
        check_slot(slot)
        self._changes += 1
        capacity = self.capacity(slot)
        chain = hashes_of(blocks)[:capacity]
        shelf = self._shelves.setdefault(slot, OrderedDict())
        for at in reversed(range(len(chain))):
            shelf[chain[at]] = chain[at - 1] if at else None
            shelf.move_to_end(chain[at])
            self._holders[chain[at]] = self._holders.get(chain[at], 0) | 1 << slot
        self._trim(slot, capacity)

    def drop(self, slot: int, block: int) -> int:
        """``slot`` holds neither ``block`` nor anything behind it; returns the number of removed blocks."""
        check_slot(slot)
        self._changes += 1
        shelf = self._shelves.get(slot)
        if shelf is None or block not in shelf:
            return 0
        gone: set[int] = set()
        for key in reversed(shelf):  # a parent was used after its children
            if key == block or shelf[key] in gone:
                gone.add(key)
        for key in gone:
            self._take_away(slot, key)
        return len(gone)

    def forget(self, slot: int) -> None:
        """Remove all blocks of ``slot``, and reset its capacity."""
        check_slot(slot)
        self._changes += 1
        self._trim(slot, 0)
        self._shelves.pop(slot, None)
        self._own.pop(slot, None)

    def set_capacity(self, slot: int, capacity: int) -> None:
        """Limit ``slot`` to ``capacity`` blocks from now on."""
        check_slot(slot)
        _check_capacity(capacity)
        self._changes += 1
        self._own[slot] = capacity
        self._trim(slot, capacity)

    def capacity(self, slot: int) -> int:
        check_slot(slot)
        return self._own.get(slot, self._capacity)

    def held(self, slot: int) -> int:
        """Blocks that ``slot`` holds."""
        check_slot(slot)
        return len(self._shelves.get(slot, ()))

    def blocks(self) -> int:
        """Number of different blocks, over all slots."""
        return len(self._holders)

    def changes(self) -> int:
        """A number that differs after every change: earlier matches may be stale."""
        return self._changes

    def dump(self, slot: int) -> bytes:
        """The blocks of ``slot``, last used first: per block (16 bytes) its hash, its parent's place and zero."""
        check_slot(slot)
        places: dict[int, int] = {}
        rows = []
        for place, (key, parent) in enumerate(reversed(self._shelves.get(slot, OrderedDict()).items())):
            places[key] = place
            rows.append(_ROW.pack(key, _NO_PARENT if parent is None else places.get(parent, _NO_PARENT), 0))
        return b"".join(rows)

    def load(self, slot: int, dump: Buffer) -> None:
        """Replace the blocks of ``slot`` by those of ``dump``, up to its capacity the most recently used ones.

        Raises:
            ValueError: bytes that no ``dump`` gives. The slot holds nothing then.
        """
        check_slot(slot)
        self._changes += 1
        self._trim(slot, 0)
        raw = bytes(dump)
        if len(raw) % _ROW.size:
            raise ValueError(f"{len(raw)} bytes are no dump of a slot: expected {_ROW.size} for each block")
        rows = list(_ROW.iter_unpack(raw))
        if len({key for key, _, _ in rows}) != len(rows):
            raise ValueError("a dump that has a block twice")
        for place, (_, parent, _) in enumerate(rows):
            if parent != _NO_PARENT and parent >= place:
                raise ValueError("a dump that has a block before its parent")
        shelf = self._shelves.setdefault(slot, OrderedDict())
        for key, parent, _ in reversed(rows[: self.capacity(slot)]):
            shelf[key] = None if parent == _NO_PARENT else rows[parent][0]
            self._holders[key] = self._holders.get(key, 0) | 1 << slot

    def _trim(self, slot: int, capacity: int) -> None:
        shelf = self._shelves.get(slot)
        while shelf is not None and len(shelf) > capacity:
            self._take_away(slot, next(iter(shelf)))

    def _take_away(self, slot: int, block: int) -> None:
        del self._shelves[slot][block]
        left = self._holders[block] & ~(1 << slot)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _check_capacity(capacity: int) -> None:
    if not 0 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"a capacity of {capacity} blocks: expected 0 to {MAX_CAPACITY}")


MAX_MEDIA = 16
_RUN_BLOCKS = 128
_MASK = (1 << 64) - 1


class HolderTable:
    """The blocks of each slot and medium (a number below ``MAX_MEDIA``). They come and go one by one, in any order, by
    engines' events: a slot may hold a block without its prefix. ``secret``: as in ``PrefixTable``.
    """

    def __init__(self, secret: int = 0x9E3779B97F4A7C15) -> None:
        if not 0 <= secret <= _MASK:
            raise OverflowError("the secret of a table has 64 bits")
        if not secret & 1:
            raise ValueError("the secret of a table must be odd")
        self._media: list[dict[int, int]] = [{} for _ in range(MAX_MEDIA)]
        """Per medium, for each block, the slots that hold it as bits; no block without a bit."""

    def add(self, medium: int, slot: int, block: int) -> None:
        """``slot`` holds the block in that medium. May be repeated."""
        _check(medium, slot, block)
        held = self._media[medium]
        held[block] = held.get(block, 0) | 1 << slot

    def take(self, medium: int, slot: int, block: int) -> None:
        """It no longer holds it there, if it did."""
        _check(medium, slot, block)
        held = self._media[medium]
        left = held.get(block, 0) & ~(1 << slot)
        if left:
            held[block] = left
        else:
            held.pop(block, None)

    def add_all(self, medium: int, slot: int, blocks: Buffer) -> None:
        """``add`` of each."""
        _check(medium, slot, 0)
        for block in hashes_of(blocks):
            self.add(medium, slot, block)

    def take_all(self, medium: int, slot: int, blocks: Buffer) -> None:
        """``take`` of each."""
        _check(medium, slot, 0)
        for block in hashes_of(blocks):
            self.take(medium, slot, block)

    def match(
        self, blocks: Buffer, slots: Sequence[int], media: Sequence[tuple[int, float]]
    ) -> tuple[list[int], list[float]]:
        """How many blocks from the first on, without a gap, each of ``slots`` holds in any of ``media``; and what
        they count: each the weight of the first of ``media`` that has it.
        """
        for slot in slots:
            _check(0, slot, 0)
        if len(media) > MAX_MEDIA:
            raise ValueError(f"{len(media)} media: expected at most {MAX_MEDIA}")
        for medium, _ in media:
            _check(medium, 0, 0)
        # Here a slot may hold a block without those before it, so the walk goes block by block, in runs of equal
        # holders. ``left``: slots without a gap so far. ``still``: of these, those that have this run in a medium
        # looked at so far; a block in several media counts for the first only.
        depths = dict.fromkeys(slots, 0)
        counts = [dict.fromkeys(slots, 0) for _ in media]
        left, at = 0, 0
        for slot in depths:
            left |= 1 << slot
        for holders, run in self._runs(blocks, [medium for medium, _ in media]):
            still = 0
            for count, held in zip(counts, holders, strict=True):
                here = held & left & ~still
                still |= here
                for slot in _slots(here):
                    count[slot] += run
            depths.update(dict.fromkeys(_slots(left & ~still), at))
            left = still
            if not left:
                break
            at += run
        depths.update(dict.fromkeys(_slots(left), at))
        weights = [weight for _, weight in media]
        sums = [sum(weight * count[slot] for weight, count in zip(weights, counts, strict=True)) for slot in slots]
        return [depths[slot] for slot in slots], [float(total) for total in sums]

    def _runs(self, blocks: Buffer, media: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Holders per medium, and how many blocks in a row have the same: a prompt has few such runs.

        In pieces, since most prompts are known to a part only.
        """
        hashes = hashes_of(blocks)
        for begin in range(0, len(hashes), _RUN_BLOCKS):
            piece = hashes[begin : begin + _RUN_BLOCKS]
            columns = [list(map(self._media[medium].get, piece, repeat(0))) for medium in media]
            rows = zip(*columns, strict=True) if columns else repeat((), len(piece))
            for holders, run in groupby(rows):
                yield holders, sum(1 for _ in run)

    def blocks(self) -> int:
        """Number of different blocks, summed over the media."""
        return sum(map(len, self._media))


def _slots(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _check(medium: int, slot: int, block: int) -> None:
    if not 0 <= medium < MAX_MEDIA:
        raise ValueError(f"medium {medium}: expected 0 to {MAX_MEDIA - 1}")
    check_slot(slot)
    if not 0 <= block <= _MASK:
        raise OverflowError(f"block {block} is no hash of 64 bits")
