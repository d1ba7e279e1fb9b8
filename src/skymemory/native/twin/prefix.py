"""Which servers are believed to hold which blocks of prompts: the twin, and what the compiled table must do.

Blocks are uint64 chained hashes (``twin_hashes``): one names all before it. Servers are *slots*, small numbers. Each
slot has a shelf of at most ``capacity`` blocks, in the order of their last use. Learning a chain uses its blocks from
the last to the first, so that a block is always used after what follows it, and evicting the one whose use is longest
ago never takes the head of a prefix before its end: what a slot holds is *prefix-closed*.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_SLOTS = 65_536
MAX_CAPACITY = 1 << 28
_ROW = struct.Struct("=QII")
"""A block in a dump: its hash, the place of its parent in the same dump, and four bytes of nothing."""
_NO_PARENT = 0xFFFFFFFF


class PrefixTable:
    """``capacity``: blocks per slot where ``set_capacity`` says nothing else.

    ``secret`` (odd) makes the places of blocks unforeseeable: whoever may send prompts could else choose such as share
    a place, and make the table slow. The twin's dictionaries do not use it.
    """

    def __init__(self, capacity: int, secret: int = 0x9E3779B97F4A7C15) -> None:
        _check_capacity(capacity)
        if not secret & 1:
            raise ValueError("the secret of a table must be odd")
        self._capacity = capacity
        self._own: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        """Bit ``slot`` for each block that a slot holds; no block without a bit."""
        self._shelves: dict[int, OrderedDict[int, int | None]] = {}
        """Each block's parent, by block, the one last used last."""

    def match(self, blocks: Buffer, slots: Sequence[int]) -> list[int]:
        """How many blocks from the first on, without a gap, each of ``slots`` holds. No use of them."""
        depths = dict.fromkeys(slots, 0)
        left = 0
        for slot in depths:
            _check_slot(slot)
            left |= 1 << slot
        hashes = _hashes(blocks)
        for at, block in enumerate(hashes):
            still = left & self._holders.get(block, 0)
            if still != left:
                _settle(depths, left ^ still, at)
                left = still
                if not left:
                    break
        _settle(depths, left, len(hashes))
        return [depths[slot] for slot in slots]

    def learn(self, slot: int, blocks: Buffer) -> None:
        """``slot`` holds this chain now, and uses it; what it then holds too much goes, unused longest first."""
        _check_slot(slot)
        capacity = self.capacity(slot)
        chain = _hashes(blocks)[:capacity]
        shelf = self._shelves.setdefault(slot, OrderedDict())
        for at in reversed(range(len(chain))):
            shelf[chain[at]] = chain[at - 1] if at else None
            shelf.move_to_end(chain[at])
            self._holders[chain[at]] = self._holders.get(chain[at], 0) | 1 << slot
        self._trim(slot, capacity)

    def drop(self, slot: int, block: int) -> int:
        """``slot`` holds neither ``block`` nor anything behind it: how many blocks that took away."""
        _check_slot(slot)
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
        """``slot`` holds nothing, and has the table's capacity again."""
        _check_slot(slot)
        self._trim(slot, 0)
        self._shelves.pop(slot, None)
        self._own.pop(slot, None)

    def set_capacity(self, slot: int, capacity: int) -> None:
        """At most so many blocks for ``slot``, from now on."""
        _check_slot(slot)
        _check_capacity(capacity)
        self._own[slot] = capacity
        self._trim(slot, capacity)

    def capacity(self, slot: int) -> int:
        _check_slot(slot)
        return self._own.get(slot, self._capacity)

    def held(self, slot: int) -> int:
        """Blocks that ``slot`` holds."""
        _check_slot(slot)
        return len(self._shelves.get(slot, ()))

    def blocks(self) -> int:
        """Different blocks that are held by any slot."""
        return len(self._holders)

    def dump(self, slot: int) -> bytes:
        """What ``slot`` holds, last used first: per block (16 bytes) its hash, its parent's place and zero."""
        _check_slot(slot)
        places: dict[int, int] = {}
        rows = []
        for place, (key, parent) in enumerate(reversed(self._shelves.get(slot, OrderedDict()).items())):
            places[key] = place
            rows.append(_ROW.pack(key, _NO_PARENT if parent is None else places.get(parent, _NO_PARENT), 0))
        return b"".join(rows)

    def load(self, slot: int, dump: Buffer) -> None:
        """``slot`` holds what ``dump`` says, of which those used last if that is too much, and nothing else.

        Raises:
            ValueError: bytes that no ``dump`` gives. The slot holds nothing then.
        """
        _check_slot(slot)
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


def _settle(depths: dict[int, int], gone: int, depth: int) -> None:
    while gone:
        low = gone & -gone
        depths[low.bit_length() - 1] = depth
        gone ^= low


def _hashes(blocks: Buffer) -> list[int]:
    view = memoryview(blocks).cast("B")
    if len(view) % 8:
        raise ValueError(f"{len(view)} bytes are not a whole number of 8-byte hashes")
    return view.cast("Q").tolist()


def _check_slot(slot: int) -> None:
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot}: expected 0 to {MAX_SLOTS - 1}")


def _check_capacity(capacity: int) -> None:
    if not 0 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"a capacity of {capacity} blocks: expected 0 to {MAX_CAPACITY}")
