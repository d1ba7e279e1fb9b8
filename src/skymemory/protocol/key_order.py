"""Keys in ascending order while they come and go, so that a page of a listing costs what it holds, not all there is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

_MOST = 512
"""Keys in one block: inserting moves half of so many pointers, which costs less than the search for the place."""


class OrderedKeys:
    """A set of keys in blocks of at most ``_MOST``. O(log keys) to add and remove, O(log keys + limit) for a page."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = []
        self._lasts: list[bytes] = []
        """The greatest key of each block."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes) -> None:
        """The key comes; nothing changes if it is here already."""
        if not self._blocks:
            self._blocks, self._lasts, self._count = [[key]], [key], 1
            return
        at = min(bisect_left(self._lasts, key), len(self._blocks) - 1)
        block = self._blocks[at]
        place = bisect_left(block, key)
        if place < len(block) and block[place] == key:
            return
        self._count += 1
        block.insert(place, key)
        if len(block) > _MOST:
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._lasts[at : at + 1] = [block[half - 1], block[-1]]
        else:
            self._lasts[at] = block[-1]

    def remove(self, key: bytes) -> None:
        """The key, which is here, goes."""
        at = bisect_left(self._lasts, key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        self._count -= 1
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at], self._lasts[at]

    def after(self, key: bytes, limit: int) -> list[bytes]:
        """Up to ``limit`` keys greater than ``key``, ascending."""
        at = bisect_right(self._lasts, key)
        page: list[bytes] = []
        while at < len(self._blocks) and len(page) < limit:
            block = self._blocks[at]
            first = 0 if page else bisect_right(block, key)
            page += block[first : first + limit - len(page)]
            at += 1
        return page
