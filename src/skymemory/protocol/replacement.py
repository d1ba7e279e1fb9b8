"""In which order a full memory forgets: policies under one contract, those of satellites and (``store.policies``) more.

A policy sees keys only. ``noted`` says that a key is here and matters now (stored, or touched by who knows its chain),
``used`` that it was asked for, ``gone`` that it is no longer here. Writers store a chain's last block first and touch
its earlier blocks last (``store.constellation``); so of equals the one noted longest ago is the deeper one, and goes.
Who knows the chains (``store.shelf``) holds what must not go.
"""

from __future__ import annotations

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

    def arrived(self, key: bytes) -> None:
        """As ``noted``, by a handover: those that arrive were ranked elsewhere, and come in that order, the next to go
        first. That nobody asked for them teaches nothing of when people come back.
        """

    def gone(self, key: bytes, evicted: bool = False) -> None:
        """The key is here no longer; ``evicted``: because it was the victim. Unknown keys are ignored."""

    def hold(self, key: bytes) -> None:
        """The key, which is here, is not to be the victim until it is freed or gone."""

    def free(self, key: bytes) -> None:
        """It may be again, by the rank that it has now."""

    def victim(self, but: bytes | None = None) -> bytes | None:
        """What goes next, never ``but`` and nothing held; None if there is nothing else. Changes nothing."""

    def order(self) -> list[bytes]:
        """All keys, the next victim first, as if none were held."""


class _ByRank:
    """Who goes first is who has the lowest rank."""

    def __init__(self) -> None:
        self._ranked: RankedKeys[int] = RankedKeys()

    def hold(self, key: bytes) -> None:
        self._ranked.hold(key)

    def free(self, key: bytes) -> None:
        self._ranked.free(key)

    def victim(self, but: bytes | None = None) -> bytes | None:
        return self._ranked.first(but)

    def order(self) -> list[bytes]:
        return self._ranked.order()


class LeastRecentlyUsed(_ByRank):
    """LRU: what was noted or used longest ago goes first. All are of one rank."""

    def noted(self, key: bytes) -> None:
        self._ranked.put(key, 0)

    used = arrived = noted

    def gone(self, key: bytes, evicted: bool = False) -> None:
        self._ranked.pop(key)


class LeastFrequentlyUsedAged(_ByRank):
    """LFU with dynamic aging (Arlitt et al. 1999): rank = uses + the rank of the last victim when it was last seen.

    A prompt seen once goes before a prefix that many share, however recently it came, and a prefix nobody asks for
    any more is overtaken in time: each eviction raises the rank at which newcomers start. In a tree of prefixes a
    parent is asked for whenever its child is, so its rank is never the lower one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[bytes, int] = {}
        self._age = 0

    def noted(self, key: bytes) -> None:
        self._rank(key, self._uses.get(key, 1))

    def arrived(self, key: bytes) -> None:
        self.noted(key)

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


_MAKERS: dict[str, Callable[[], Replacement]] = {
    "lru": LeastRecentlyUsed, "lfuda": LeastFrequentlyUsedAged, "lrfu": LeastRecentlyAndFrequentlyUsed
}  # fmt: skip


def replacement_named(name: str) -> Replacement:
    """A fresh policy by one of the names of ``REPLACEMENTS``."""
    return _MAKERS[name]()
