"""Which servers know how much of a chain, where each block's hash leads to a set of servers.

Sets are bits of an integer, by slot. A server that is at a block is at every block before it, so along a chain the
sets only shrink: the places where they change are found by halving, and a prompt of 512 blocks takes some ten looks
per change instead of 512.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def depths(sets: Mapping[int, int], blocks: NDArray[np.uint64]) -> dict[int, int]:
    """Leading blocks of the chain ``blocks`` that each slot is at; slots at none are left out."""
    found: dict[int, int] = {}
    hash_at, count = blocks.item, len(blocks)
    known = sets.get(hash_at(0), 0) if count else 0
    at = 0
    while known:
        low, high = at, count - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if sets.get(hash_at(middle), 0) == known:
                low = middle
            else:
                high = middle - 1
        at = low + 1
        further = sets.get(hash_at(at), 0) & known if at < count else 0
        ends = known & ~further
        while ends:
            lowest = ends & -ends
            found[lowest.bit_length() - 1] = at
            ends ^= lowest
        known = further
    return found
