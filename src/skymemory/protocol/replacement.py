"""In which order a full satellite forgets: three policies under one contract.

A policy sees keys only. ``noted`` says that a key is here and matters now (stored, or touched by who knows its chain),
``used`` that it was asked for, ``gone`` that it is no longer here. Writers store a chain's last block first and touch
its earlier blocks last (``store.constellation``); so of equals the one noted longest ago is the deeper one, and goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from skymemory.protocol.lrfu import LeastRecentlyAndFrequentlyUsed
from skymemory.protocol.ranking import RankedKeys

REPLACEMENTS = ("lru", "lfuda", "lrfu")
DEFAULT_REPLACEMENT = "lrfu"


class Replacement(Protocol):
    """The contract: a naive twin of each is in ``tests/protocol/test_replacement.py``."""

    def noted(self, key: bytes) -> None:
        """The key is here (new or not) and becomes the newest of its rank; that is no use of it."""

    def used(self, key: bytes) -> None:
        """The key, which is here, was asked for."""

    def gone(self, key: bytes, evicted: bool = False) -> None:
        """The key is here no longer; ``evicted``: because it was the victim. Unknown keys are ignored."""

    def victim(self, but: bytes | None = None) -> bytes | None:
        """What goes next, never ``but``; None if there is nothing else. Changes nothing."""

    def order(self) -> list[bytes]:
        """All keys, the next victim first."""


class LeastRecentlyUsed:
    """LRU: what was noted or used longest ago goes first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def noted(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    used = noted

    def gone(self, key: bytes, evicted: bool = False) -> None:
        self._keys.pop(key, None)

    def victim(self, but: bytes | None = None) -> bytes | None:
        for key in self._keys:
            if key != but:
                return key
        return None

    def order(self) -> list[bytes]:
        return list(self._keys)


class LeastFrequentlyUsedAged:
    """LFU with dynamic aging (Arlitt et al. 1999): rank = uses + the rank of the last victim when it was last seen.

    A prompt seen once goes before a prefix that many share, however recently it came, and a prefix nobody asks for
    any more is overtaken in time: each eviction raises the rank at which newcomers start. In a tree of prefixes a
    parent is asked for whenever its child is, so its rank is never the lower one.
    """

    def __init__(self) -> None:
        self._ranked: RankedKeys[int] = RankedKeys()
        self._uses: dict[bytes, int] = {}
        self._age = 0

    def noted(self, key: bytes) -> None:
        self._rank(key, self._uses.get(key, 1))

    def used(self, key: bytes) -> None:
        self._rank(key, self._uses.get(key, 0) + 1)

    def _rank(self, key: bytes, uses: int) -> None:
        self._uses[key] = uses
        self._ranked.put(key, self._age + uses)

    def gone(self, key: bytes, evicted: bool = False) -> None:
        rank = self._ranked.pop(key)
        if rank is not None:
            del self._uses[key]
            if evicted:
                self._age = max(self._age, rank)

    def victim(self, but: bytes | None = None) -> bytes | None:
        return self._ranked.first(but)

    def order(self) -> list[bytes]:
        return self._ranked.order()


_MAKERS: dict[str, Callable[[], Replacement]] = {
    "lru": LeastRecentlyUsed, "lfuda": LeastFrequentlyUsedAged, "lrfu": LeastRecentlyAndFrequentlyUsed
}  # fmt: skip


def replacement_named(name: str) -> Replacement:
    """A fresh policy by one of the names of ``REPLACEMENTS``."""
    return _MAKERS[name]()
