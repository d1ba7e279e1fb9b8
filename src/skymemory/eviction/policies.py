"""Eviction policies under one contract, by name: those that satellites know, and more for memory and disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from skymemory.errors import InvalidInput
from skymemory.eviction.lrfu import LeastRecentlyAndFrequentlyUsed
from skymemory.eviction.ranking import RankedKeys

REPLACEMENTS = ("lru", "lfuda", "lrfu")
DEFAULT_REPLACEMENT = "lrfu"


class Replacement(Protocol):
    """The contract: a naive twin of each is in ``tests/eviction/test_policies.py``."""

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
    "lru": LeastRecentlyUsed,
    "lfuda": LeastFrequentlyUsedAged,
    "lrfu": LeastRecentlyAndFrequentlyUsed,
}


def replacement_named(name: str) -> Replacement:
    """A fresh policy by one of the names of ``REPLACEMENTS``."""
    return _MAKERS[name]()


POLICIES = ("lru", "lfu", "lfuda", "length", "arc", "lrfu")
DEFAULT_POLICY = "lrfu"
"""By the trace: see ``benchmarks/policies.py``."""


class LeastFrequentlyUsed(LeastFrequentlyUsedAged):
    """LFU: what was asked for least goes first, of equals what was noted longest ago. Nothing ages."""

    def gone(self, key: bytes, evicted: bool = False) -> None:
        super().gone(key)  # to age is to hear of evictions


class LengthAware(LeastRecentlyUsed):
    """What has the longest prefix before it goes first, of equals what was noted or used longest ago."""

    def __init__(self, depth_of: Callable[[bytes], int]) -> None:
        super().__init__()
        self._depth_of = depth_of

    def noted(self, key: bytes) -> None:
        self._ranked.put(key, -self._depth_of(key))

    used = arrived = noted


class AdaptiveReplacement:
    """ARC (Megiddo, Modha 2003): keys seen once and keys seen again, each by LRU; what comes back after it was evicted
    says which of the two should have had more room.

    Capacity is what ARC knows beforehand and a byte budget does not say: here it is the most keys that were ever here
    at once. As many evicted keys are remembered.
    """

    def __init__(self) -> None:
        self._once: RankedKeys[int] = RankedKeys()
        self._again: RankedKeys[int] = RankedKeys()
        self._once_gone: OrderedDict[bytes, None] = OrderedDict()
        self._again_gone: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0
        """How many keys seen once there should be."""
        self._capacity = 0

    def noted(self, key: bytes) -> None:
        if self._once.rank(key) is not None:
            self._once.put(key, 0)
        elif self._again.rank(key) is not None:
            self._again.put(key, 0)
        else:
            self._came(key)

    def arrived(self, key: bytes) -> None:
        self.noted(key)

    def used(self, key: bytes) -> None:
        if self._once.rank(key) is None:
            self.noted(key)
            return
        if self._once.holds(key):
            self._again.hold(key)
        self._once.pop(key)
        self._again.put(key, 0)

    def _came(self, key: bytes) -> None:
        once, again = len(self._once_gone), len(self._again_gone)
        if key in self._once_gone:
            del self._once_gone[key]
            self._target = min(float(self._capacity), self._target + max(1.0, again / once))
            self._again.put(key, 0)
        elif key in self._again_gone:
            del self._again_gone[key]
            self._target = max(0.0, self._target - max(1.0, once / again))
            self._again.put(key, 0)
        else:
            self._once.put(key, 0)
        self._capacity = max(self._capacity, len(self._once) + len(self._again))

    def gone(self, key: bytes, evicted: bool = False) -> None:
        was_once = self._once.pop(key) is not None
        if not was_once and self._again.pop(key) is None:
            return
        if evicted:
            (self._once_gone if was_once else self._again_gone)[key] = None
        while self._once_gone and len(self._once) + len(self._once_gone) > self._capacity:
            self._once_gone.popitem(last=False)
        here = len(self._once) + len(self._again)
        while self._again_gone and here + len(self._once_gone) + len(self._again_gone) > 2 * self._capacity:
            self._again_gone.popitem(last=False)

    def hold(self, key: bytes) -> None:
        (self._once if self._once.rank(key) is not None else self._again).hold(key)

    def free(self, key: bytes) -> None:
        self._once.free(key)
        self._again.free(key)

    def victim(self, but: bytes | None = None) -> bytes | None:
        first, second = (self._once, self._again) if len(self._once) > self._target else (self._again, self._once)
        found = first.first(but)
        return second.first(but) if found is None else found

    def order(self) -> list[bytes]:
        once, again = self._once.order()[::-1], self._again.order()[::-1]
        going: list[bytes] = []
        while once or again:
            going.append((once if once and (len(once) > self._target or not again) else again).pop())
        return going


def policy_named(name: str, depth_of: Callable[[bytes], int] = lambda key: 0) -> Replacement:
    """A fresh policy by one of the names of ``POLICIES``; ``depth_of`` counts the blocks before a key.

    Raises:
        InvalidInput: no such policy.
    """
    makers: dict[str, Callable[[], Replacement]] = {
        "lfu": LeastFrequentlyUsed,
        "length": lambda: LengthAware(depth_of),
        "arc": AdaptiveReplacement,
    }
    if name not in POLICIES:
        raise InvalidInput(f"policy {name!r}: expected one of {', '.join(POLICIES)}")
    return makers[name]() if name in makers else replacement_named(name)
