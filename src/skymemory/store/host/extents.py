"""Allocator of a host arena: best fit, free neighbours merged at once.

Blocks of one model have one size, so each free extent fits the next block exactly; mixed sizes leave gaps, which
``largest`` and ``free_bytes`` show.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import ChainMap
from collections.abc import Iterable

ALIGNED, LARGE_BYTES, LARGE_ALIGNED = 64, 64 << 10, 4096
"""Values begin at cache lines; large values at pages, so that a copy engine can move them."""


def rounded(size_bytes: int) -> int:
    """Return the bytes that a value takes up."""
    aligned = LARGE_ALIGNED if size_bytes >= LARGE_BYTES else ALIGNED
    return max(-(-size_bytes // aligned) * aligned, ALIGNED)


def _start(begin: int, size_bytes: int) -> int:
    aligned = LARGE_ALIGNED if size_bytes >= LARGE_BYTES else ALIGNED
    return -(-begin // aligned) * aligned


class Extents:
    """Free extents of an arena of ``size_bytes``, without ``used`` (begin, size). Sizes are ``rounded``.
    Not thread-safe.

    Raises ValueError if extents in use overlap.
    """

    def __init__(self, size_bytes: int, used: Iterable[tuple[int, int]] = ()) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []
        """Size and begin of each free extent, ascending."""
        self._sizes: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        """Begin of the free extent that ends there."""
        end = 0
        for begin, used_bytes in sorted(used):
            if begin < end or begin + used_bytes > size_bytes:
                raise ValueError(f"extent {begin} of {used_bytes} bytes overlaps another, or the end")
            if begin > end:
                self._add(end, begin - end)
            end = begin + used_bytes
        if end < size_bytes:
            self._add(end, size_bytes - end)

    @property
    def largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def has_room(self, size_bytes: int) -> bool:
        return self._find(size_bytes) is not None

    def allocate(self, size_bytes: int) -> int | None:
        """Return the begin of an extent in the smallest free extent with room; None without."""
        found = self._find(size_bytes)
        if found is None:
            return None
        begin, free_bytes = found
        self._remove(begin, free_bytes)
        start = _start(begin, size_bytes)
        if start > begin:
            self._add(begin, start - begin)
        if start + size_bytes < begin + free_bytes:
            self._add(start + size_bytes, begin + free_bytes - start - size_bytes)
        return start

    def _find(self, size_bytes: int) -> tuple[int, int] | None:
        for at in range(bisect_left(self._by_size, (size_bytes, 0)), len(self._by_size)):
            free_bytes, begin = self._by_size[at]
            if _start(begin, size_bytes) + size_bytes <= begin + free_bytes:
                return begin, free_bytes
        return None

    def count_until_room(self, size_bytes: int, extents: Iterable[tuple[int, int]]) -> int | None:
        """Return how many of ``extents`` must be freed, in this order, until one has room; None if none ever has."""
        sizes: ChainMap[int, int | None] = ChainMap({}, self._sizes)  # type: ignore[arg-type]
        begins: ChainMap[int, int | None] = ChainMap({}, self._begins)  # type: ignore[arg-type]
        for count, (begin, freed_bytes) in enumerate(extents, 1):
            end = begin + freed_bytes
            if (before := begins.get(begin)) is not None:
                begins[begin], begin = None, before
            if (after_bytes := sizes.get(end)) is not None:
                sizes[end] = None
                end += after_bytes
            sizes[begin], begins[end] = end - begin, begin
            if _start(begin, size_bytes) + size_bytes <= end:
                return count
        return None

    def free(self, begin: int, size_bytes: int) -> None:
        if (before := self._begins.get(begin)) is not None:
            before_bytes = self._sizes[before]
            self._remove(before, before_bytes)
            begin, size_bytes = before, size_bytes + before_bytes
        if (after_bytes := self._sizes.get(begin + size_bytes)) is not None:
            self._remove(begin + size_bytes, after_bytes)
            size_bytes += after_bytes
        self._add(begin, size_bytes)

    def _add(self, begin: int, size_bytes: int) -> None:
        insort(self._by_size, (size_bytes, begin))
        self._sizes[begin] = size_bytes
        self._begins[begin + size_bytes] = begin
        self.free_bytes += size_bytes

    def _remove(self, begin: int, size_bytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size_bytes, begin))]
        del self._sizes[begin], self._begins[begin + size_bytes]
        self.free_bytes -= size_bytes
