"""Prompts that servers are computing: when one is done, its server holds it.

A request queued behind one that shares its beginning finds that beginning cached when its turn comes. So prompts
under way count like cached ones for whoever would queue behind them, and are taken back if they fail.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.strategies.chains import depths

Blocks = NDArray[np.uint64]


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
        self._sets: dict[int, int] = {}
        """Slots in whose chains a block is, as bits."""
        self._chains: dict[int, list[Blocks]] = {}

    def __len__(self) -> int:
        return len(self._sets)

    def depths(self, blocks: Blocks) -> dict[int, int]:
        """Leading blocks of a chain that are under way, by slot; slots with none are left out."""
        return depths(self._sets, blocks) if self._sets else {}

    def add(self, slot: int, blocks: Blocks) -> Blocks:
        """The chain is computed at ``slot`` from now on. What is returned is what ``drop`` takes."""
        chain = blocks[: self._most_blocks]
        others = self._chains.setdefault(slot, [])
        known = max((shared_blocks(chain, other) for other in others), default=0)
        others.append(chain)
        sets, bit = self._sets, 1 << slot
        for block in chain[known:].tolist():
            sets[block] = sets.get(block, 0) | bit
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
        sets, rest = self._sets, ~(1 << slot)
        for block in chain[known:].tolist():
            left = sets[block] & rest
            if left:
                sets[block] = left
            else:
                del sets[block]

    def forget(self, slot: int) -> None:
        for chain in list(self._chains.get(slot, ())):
            self.drop(slot, chain)
