"""A simulated server's prefix cache: so many blocks, the least recently used go first, a parent never before its child.

A prompt's blocks are touched from its last to its first, so that of one chain the deepest is always the oldest. What is
resident is therefore closed under prefixes: the leading resident blocks of a prompt are all that it could hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from skymemory.errors import InvalidInput


class PrefixCache:
    def __init__(self, capacity: int) -> None:
        """``capacity`` in blocks. Raises InvalidInput for none."""
        if capacity < 1:
            raise InvalidInput(f"a cache of {capacity} blocks holds nothing; at least one is needed")
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def leading(self, chain: Sequence[int]) -> int:
        """How many of ``chain``'s first blocks are resident."""
        here = self._blocks
        for at, block in enumerate(chain):
            if block not in here:
                return at
        return len(chain)

    def use(self, chain: Sequence[int]) -> list[int]:
        """``chain`` is accessed and resident, of one longer than the cache its first ``capacity`` blocks.

        Returns what had to go.
        """
        here = self._blocks
        for block in reversed(chain[: self.capacity]):
            here[block] = None
            here.move_to_end(block)
        gone = []
        while len(here) > self.capacity:
            gone.append(here.popitem(last=False)[0])
        return gone
