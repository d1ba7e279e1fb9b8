"""Tables of the blocks that servers hold: ``PrefixTable`` estimates them (LRU), ``HolderTable`` follows engines'
events.

Blocks are uint64 chained hashes, servers *slots*, small numbers. Learning uses a chain's blocks from the last to the
first, so eviction keeps a slot *prefix-closed*.
"""

from __future__ import annotations

import math
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
_NO_PARENT = 0xFFFFFFFF
_AGES, _MOST_AGES = 33, 1 << 20
_MOST_INTERVAL = 1 << 20


class PrefixTable:
    """Estimated blocks per slot, at most ``capacity``. ``secret`` (odd) keeps clients from choosing prompts that share
    a hash bucket; the twin does not use it.
    """

    def __init__(self, capacity: int, secret: int = 0x9E3779B97F4A7C15) -> None:
        _check_capacity(capacity)
        if not secret & 1:
            raise ValueError("the secret of a table must be odd")
        self._capacity = capacity
        self._changes = 0
        self._own: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._shelves: dict[int, OrderedDict[int, int | None]] = {}
        """Parent of each block per slot, the last used block last."""
        self._used: dict[tuple[int, int], int] = {}
        """``_learned`` at the last use of a slot's block."""
        self._intervals: dict[tuple[int, int], int] = {}
        """Recent mean of the chains from use to use, in sixteenths, of blocks that were used again."""
        self._learned = self._aged = 0
        self._ages = [0] * _AGES, [0] * _AGES

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Return the number of leading blocks that each slot holds; not a use."""
        # Sets of slots are bits of an integer. ``remaining`` are the slots that hold every block so far: a slot that
        # lacks a block holds none after it (prefix-closed), so its depth is known then.
        depths = dict.fromkeys(slots, 0)
        remaining = 0
        for slot in depths:
            check_slot(slot)
            remaining |= 1 << slot
        hashes = hashes_of(blocks)
        for at, block in enumerate(hashes):
            still = remaining & self._holders.get(block, 0)
            if still != remaining:
                depths.update(dict.fromkeys(_slots(remaining ^ still), at))
                remaining = still
                if not remaining:
                    break
        depths.update(dict.fromkeys(_slots(remaining), len(hashes)))
        return [depths[slot] for slot in slots]

    def learn(self, slot: int, blocks: Blocks) -> None:
        """Record a use of this chain; evict beyond the capacity."""
        check_slot(slot)
        self._changes += 1
        capacity = self.capacity(slot)
        chain = hashes_of(blocks)[:capacity]
        self._learned += 1
        shelf = self._shelves.setdefault(slot, OrderedDict())
        for at in reversed(range(len(chain))):
            if chain[at] in shelf:
                self._count_age(self._ages[0], slot, chain[at])
                self._note_use(slot, chain[at])
            elif len(shelf) >= capacity:
                self._count_age(self._ages[1], slot, oldest := next(iter(shelf)))
                self._take_away(slot, oldest)
            shelf[chain[at]] = chain[at - 1] if at else None
            shelf.move_to_end(chain[at])
            self._used[slot, chain[at]] = self._learned
            self._holders[chain[at]] = self._holders.get(chain[at], 0) | 1 << slot

    def oldest(self, slot: int) -> int:
        """Return the age of the block that a full slot would evict next, in chains learnt since; -1: it has room."""
        check_slot(slot)
        shelf = self._shelves.get(slot)
        if not shelf or len(shelf) < self.capacity(slot):
            return -1
        return self._learned - self._used[slot, next(iter(shelf))]

    def used_every(self, slot: int, blocks: Blocks, interval: int) -> int:
        """Return the leading blocks that a slot uses at least every ``interval`` chains; further blocks of a chain are
        used more rarely.
        """
        check_slot(slot)
        chain = hashes_of(blocks)
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            mean = self._intervals.get((slot, chain[middle - 1]), 0)
            last = self._used.get((slot, chain[middle - 1]), 0)
            if mean and mean <= 16 * interval and self._learned - last <= interval:
                low = middle
            else:
                high = middle - 1
        return low

    def ages(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of blocks that were used again and of those evicted, by the binary digits of their age.
        Old ones count less.
        """
        used, evicted = self._ages
        return tuple(used), tuple(evicted)

    def _note_use(self, slot: int, block: int) -> None:
        last = 16 * min(self._learned - self._used[slot, block], _MOST_INTERVAL)
        mean = self._intervals.get((slot, block), last)
        self._intervals[slot, block] = mean + math.trunc((last - mean) / 4)

    def _count_age(self, counts: list[int], slot: int, block: int) -> None:
        counts[(self._learned - self._used[slot, block]).bit_length()] += 1
        self._aged += 1
        if self._aged >= _MOST_AGES:
            for halved in self._ages:
                halved[:] = [count // 2 for count in halved]
            self._aged = sum(map(sum, self._ages))

    def drop(self, slot: int, block: int) -> int:
        """Remove a block and all after it from a slot. Return how many."""
        check_slot(slot)
        self._changes += 1
        shelf = self._shelves.get(slot)
        if shelf is None or block not in shelf:
            return 0
        removed: set[int] = set()
        for key in reversed(shelf):  # a parent was used after its children
            if key == block or shelf[key] in removed:
                removed.add(key)
        for key in removed:
            self._take_away(slot, key)
        return len(removed)

    def forget(self, slot: int) -> None:
        check_slot(slot)
        self._changes += 1
        self._trim(slot, 0)
        self._shelves.pop(slot, None)
        self._own.pop(slot, None)

    def set_capacity(self, slot: int, capacity: int) -> None:
        check_slot(slot)
        _check_capacity(capacity)
        self._changes += 1
        self._own[slot] = capacity
        self._trim(slot, capacity)

    def capacity(self, slot: int) -> int:
        check_slot(slot)
        return self._own.get(slot, self._capacity)

    def block_count(self, slot: int) -> int:
        check_slot(slot)
        return len(self._shelves.get(slot, ()))

    def blocks(self) -> int:
        return len(self._holders)

    def changes(self) -> int:
        return self._changes

    def dump(self, slot: int) -> bytes:
        """Return the blocks of ``slot``, last used first: hash, parent's position and zero, 16 bytes per block."""
        check_slot(slot)
        places: dict[int, int] = {}
        rows = []
        for position, (key, parent) in enumerate(reversed(self._shelves.get(slot, OrderedDict()).items())):
            places[key] = position
            rows.append(_ROW.pack(key, _NO_PARENT if parent is None else places.get(parent, _NO_PARENT), 0))
        return b"".join(rows)

    def load(self, slot: int, dump: Buffer) -> None:
        """Replace a slot's blocks by the most recent of ``dump``. ValueError, leaving it empty, for bytes that no
        ``dump`` returns.
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
        for position, (_, parent, _) in enumerate(rows):
            if parent != _NO_PARENT and parent >= position:
                raise ValueError("a dump that has a block before its parent")
        shelf = self._shelves.setdefault(slot, OrderedDict())
        for key, parent, _ in reversed(rows[: self.capacity(slot)]):
            shelf[key] = None if parent == _NO_PARENT else rows[parent][0]
            self._used[slot, key] = self._learned
            self._holders[key] = self._holders.get(key, 0) | 1 << slot

    def _trim(self, slot: int, capacity: int) -> None:
        shelf = self._shelves.get(slot)
        while shelf is not None and len(shelf) > capacity:
            self._take_away(slot, next(iter(shelf)))

    def _take_away(self, slot: int, block: int) -> None:
        del self._shelves[slot][block], self._used[slot, block]
        self._intervals.pop((slot, block), None)
        holders = self._holders[block] & ~(1 << slot)
        if holders:
            self._holders[block] = holders
        else:
            del self._holders[block]


def _check_capacity(capacity: int) -> None:
    if not 0 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"a capacity of {capacity} blocks: expected 0 to {MAX_CAPACITY}")


MAX_MEDIA = 16
_RUN_BLOCKS = 128
_MASK = (1 << 64) - 1


class HolderTable:
    """Blocks that each slot (server) holds, by medium, such as GPU or host memory. A slot may hold a block without its
    prefix. ``secret``: as in ``PrefixTable``.
    """

    def __init__(self, secret: int = 0x9E3779B97F4A7C15) -> None:
        if not 0 <= secret <= _MASK:
            raise OverflowError("the secret of a table has 64 bits")
        if not secret & 1:
            raise ValueError("the secret of a table must be odd")
        self._media: list[dict[int, int]] = [{} for _ in range(MAX_MEDIA)]

    def add(self, medium: int, slot: int, block: int) -> None:
        _check(medium, slot, block)
        holders = self._media[medium]
        holders[block] = holders.get(block, 0) | 1 << slot

    def take(self, medium: int, slot: int, block: int) -> None:
        _check(medium, slot, block)
        holders = self._media[medium]
        others_bits = holders.get(block, 0) & ~(1 << slot)
        if others_bits:
            holders[block] = others_bits
        else:
            holders.pop(block, None)

    def add_all(self, medium: int, slot: int, blocks: Buffer) -> None:
        _check(medium, slot, 0)
        for block in hashes_of(blocks):
            self.add(medium, slot, block)

    def take_all(self, medium: int, slot: int, blocks: Buffer) -> None:
        _check(medium, slot, 0)
        for block in hashes_of(blocks):
            self.take(medium, slot, block)

    def match(
        self, blocks: Buffer, slots: Sequence[int], media: Sequence[tuple[int, float]]
    ) -> tuple[list[int], list[float]]:
        """Return, per slot, the number of leading blocks in any of ``media``, and their weight, each by the first of
        ``media`` that has it.
        """
        for slot in slots:
            _check(0, slot, 0)
        if len(media) > MAX_MEDIA:
            raise ValueError(f"{len(media)} media: expected at most {MAX_MEDIA}")
        for medium, _ in media:
            _check(medium, 0, 0)
        # A slot may hold a block without those before it, so the walk goes block by block, in runs of equal holders.
        # ``remaining``: slots without a gap so far. ``still``: of these, the slots that have this run in a medium
        # examined so far; a block in several media counts only for the first.
        depths = dict.fromkeys(slots, 0)
        counts = [dict.fromkeys(slots, 0) for _ in media]
        remaining, at = 0, 0
        for slot in depths:
            remaining |= 1 << slot
        for holders, run in self._runs(blocks, [medium for medium, _ in media]):
            still = 0
            for count, medium_holders in zip(counts, holders, strict=True):
                fresh_slots = medium_holders & remaining & ~still
                still |= fresh_slots
                for slot in _slots(fresh_slots):
                    count[slot] += run
            depths.update(dict.fromkeys(_slots(remaining & ~still), at))
            remaining = still
            if not remaining:
                break
            at += run
        depths.update(dict.fromkeys(_slots(remaining), at))
        weights = [weight for _, weight in media]
        sums = [sum(weight * count[slot] for weight, count in zip(weights, counts, strict=True)) for slot in slots]
        return [depths[slot] for slot in slots], [float(total) for total in sums]

    def _runs(self, blocks: Buffer, media: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield holders per medium, and the number of consecutive blocks with them, in pieces: most prompts are partly
        known.
        """
        hashes = hashes_of(blocks)
        for begin in range(0, len(hashes), _RUN_BLOCKS):
            piece = hashes[begin : begin + _RUN_BLOCKS]
            columns = [list(map(self._media[medium].get, piece, repeat(0))) for medium in media]
            rows = zip(*columns, strict=True) if columns else repeat((), len(piece))
            for holders, run in groupby(rows):
                yield holders, sum(1 for _ in run)

    def blocks(self) -> int:
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
