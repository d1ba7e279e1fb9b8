"""Prompts that servers are computing: when one is done, its server holds it.

A request queued behind one that shares its beginning finds that beginning cached when its turn comes. So prompts
under way count like cached ones for whoever would queue behind them, and are taken back if they fail.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skymemory import native

Blocks = NDArray[np.uint64]
"""One dimension, contiguous."""
_ALL = ((0, 1.0),)


def shared_blocks(one: Blocks, other: Blocks) -> int:
    """Leading blocks that two chains share; equal hashes mean that all before them are equal, so by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) >> 1
        if one.item(middle) == other.item(middle):
            low = middle + 1
        else:
            high = middle
    return low


class _Line:
    """Chains at one slot, in the order of their blocks: who shares most with a chain is next to it."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._chains: list[Blocks] = []
        self.open: dict[int, Blocks] = {}
        """Those that were added and not dropped, by their ``id``."""

    def add(self, chain: Blocks) -> int:
        """How many of its blocks are in others."""
        key = _key(chain)
        at = bisect_left(self._keys, key)
        known = self._shared(chain, at - 1, at)
        self._keys.insert(at, key)
        self._chains.insert(at, chain)
        self.open[id(chain)] = chain
        return known

    def drop(self, chain: Blocks) -> int:
        """It, or one that equals it, leaves: how many of its blocks are in others still."""
        del self.open[id(chain)]
        at = bisect_left(self._keys, _key(chain))
        del self._keys[at], self._chains[at]
        return self._shared(chain, at - 1, at)

    def _shared(self, chain: Blocks, *places: int) -> int:
        chains = self._chains
        return max((shared_blocks(chain, chains[at]) for at in places if 0 <= at < len(chains)), default=0)


def _key(chain: Blocks) -> bytes:
    """Sorts as the blocks do, one after the other."""
    return chain.astype(">u8").tobytes()


class UnderWay:
    """Chains by slot. ``most_blocks``: of one chain, no more are kept. ``secret``: see ``native.PrefixTable``."""

    def __init__(self, most_blocks: int, secret: int | None = None) -> None:
        self.most_blocks = most_blocks
        self._table = native.HolderTable() if secret is None else native.HolderTable(secret)
        """Slots in whose chains a block is."""
        self._lines: dict[int, _Line] = {}

    def __len__(self) -> int:
        return self._table.blocks()

    def depths(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Leading blocks of a chain that are under way at each of ``slots``; none at all if nothing is."""
        return self._table.match(blocks.data, slots, _ALL)[0] if self._lines else []

    def add(self, slot: int, blocks: Blocks) -> Blocks:
        """The chain is computed at ``slot`` from now on. What is returned is what ``drop`` takes."""
        chain = blocks[: self.most_blocks]
        known = self._lines.setdefault(slot, _Line()).add(chain)
        self._table.add_all(0, slot, chain[known:].data)
        return chain

    def drop(self, slot: int, chain: Blocks) -> None:
        """That chain, as ``add`` returned it, is done or failed."""
        line = self._lines.get(slot)
        if line is None or line.open.get(id(chain)) is not chain:
            return
        known = line.drop(chain)
        if not line.open:
            del self._lines[slot]
        self._table.take_all(0, slot, chain[known:].data)

    def forget(self, slot: int) -> None:
        line = self._lines.get(slot)
        for chain in list(line.open.values()) if line is not None else ():
            self.drop(slot, chain)
