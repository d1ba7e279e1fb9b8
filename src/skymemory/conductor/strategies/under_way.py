"""Prompts that servers are computing: when one is done, its server holds it.

A request queued behind one that shares its beginning finds that beginning cached when its turn comes. So prompts
under way count like cached ones for whoever would queue behind them, and are taken back if they fail.
"""

from __future__ import annotations

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


class UnderWay:
    """Chains by slot. ``most_blocks``: of one chain, no more are kept."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._table = native.HolderTable()
        """Slots in whose chains a block is."""
        self._chains: dict[int, list[Blocks]] = {}

    def __len__(self) -> int:
        return self._table.blocks()

    def depths(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        """Leading blocks of a chain that are under way at each of ``slots``; none at all if nothing is."""
        return self._table.match(blocks.data, slots, _ALL)[0] if self._chains else []

    def add(self, slot: int, blocks: Blocks) -> Blocks:
        """The chain is computed at ``slot`` from now on. What is returned is what ``drop`` takes."""
        chain = blocks[: self._most_blocks]
        others = self._chains.setdefault(slot, [])
        known = max((shared_blocks(chain, other) for other in others), default=0)
        others.append(chain)
        self._table.add_all(0, slot, chain[known:].data)
        return chain

    def drop(self, slot: int, chain: Blocks) -> None:
        """That chain, as ``add`` returned it, is done or failed."""
        others = self._chains.get(slot, [])
        at = next((at for at, other in enumerate(others) if other is chain), None)
        if at is None:
            return
        del others[at]
        if not others:
            del self._chains[slot]
        known = max((shared_blocks(chain, other) for other in others), default=0)
        self._table.take_all(0, slot, chain[known:].data)

    def forget(self, slot: int) -> None:
        for chain in list(self._chains.get(slot, ())):
            self.drop(slot, chain)
