"""Allocator of a host arena: best fit, free neighbours merged at once.

Blocks of one model have one size, so each free extent fits the next block exactly; mixed sizes leave gaps, which
``largest`` and ``free_bytes`` show.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

ALIGNED, LARGE_BYTES, LARGE_ALIGNED = 64, 64 << 10, 4096
"""Values begin at cache lines; large values at pages, so that a copy engine can move them."""


def rounded(size_bytes: int) -> int:
    """Return the bytes that a value takes up."""
    aligned = LARGE_ALIGNED if size_bytes >= LARGE_BYTES else ALIGNED
    return max(-(-size_bytes // aligned) * aligned, ALIGNED)


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

    def allocate(self, size_bytes: int) -> int | None:
        """Return the begin of an extent in the smallest free extent with room; None without."""
        aligned = LARGE_ALIGNED if size_bytes >= LARGE_BYTES else ALIGNED
        for at in range(bisect_left(self._by_size, (size_bytes, 0)), len(self._by_size)):
            free, begin = self._by_size[at]
            start = -(-begin // aligned) * aligned
            if start + size_bytes <= begin + free:
                self._remove(begin, free)
                if start > begin:
                    self._add(begin, start - begin)
                if start + size_bytes < begin + free:
                    self._add(start + size_bytes, begin + free - start - size_bytes)
                return start
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
