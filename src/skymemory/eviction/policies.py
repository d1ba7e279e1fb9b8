"""Eviction policies by name: those of satellites (``REPLACEMENTS``), and more for memory and disk (``POLICIES``)."""

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
    """The contract of a policy; ``tests/eviction/test_policies.py`` has a naive twin of each."""

    def noted(self, key: bytes) -> None:
        """The key was stored or touched: it becomes the newest of its rank. Not counted as a use."""

    def used(self, key: bytes) -> None:
        """The key, which is present, was requested."""

    def arrived(self, key: bytes) -> None:
        """Like ``noted``, by a handover: arriving keys come in their previous order, the next victim first, and are not
        counted as returns.
        """

    def gone(self, key: bytes, evicted: bool = False) -> None:
        """The key was removed; ``evicted``: as the victim. Unknown keys are ignored."""

    def hold(self, key: bytes) -> None:
        """The key, which is present, must not be the victim until it is freed or gone."""

    def free(self, key: bytes) -> None:
        """End ``hold``; the key has its current rank."""

    def victim(self, but: bytes | None = None) -> bytes | None:
        """The next key to evict, except ``but`` and held keys; None if there is none. Has no effect."""

    def order(self) -> list[bytes]:
        """All keys, the next victim first, held ones included."""


class _ByRank:
    """Evicts the key of the lowest rank."""

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
    """LRU: evicts the key noted or used longest ago. All have the same rank."""

    def noted(self, key: bytes) -> None:
        self._ranked.put(key, 0)

    used = arrived = noted

    def gone(self, key: bytes, evicted: bool = False) -> None:
        self._ranked.pop(key)


class LeastFrequentlyUsedAged(_ByRank):
    """LFU with dynamic aging (Arlitt et al. 1999): rank = uses + the rank of the last victim when it was last seen.

    A prompt seen once is evicted before a prefix that many share, however recent it is; a prefix that is not requested
    any more is overtaken in time, as each eviction raises the rank at which new keys start. In a tree of prefixes a
    parent is requested with each of its children, so its rank is never lower.
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
    """A new policy by a name of ``REPLACEMENTS``."""
    return _MAKERS[name]()


POLICIES = ("lru", "lfu", "lfuda", "length", "arc", "lrfu")
DEFAULT_POLICY = "lrfu"
"""Best on the trace: ``benchmarks/policies.py``."""


class LeastFrequentlyUsed(LeastFrequentlyUsedAged):
    """LFU without aging: evicts the least requested key, of equals the one noted longest ago."""

    def gone(self, key: bytes, evicted: bool = False) -> None:
        super().gone(key)  # aging needs ``evicted``


class LengthAware(LeastRecentlyUsed):
    """Evicts the key with the longest prefix before it, of equals the one noted or used longest ago."""

    def __init__(self, depth_of: Callable[[bytes], int]) -> None:
        super().__init__()
        self._depth_of = depth_of

    def noted(self, key: bytes) -> None:
        self._ranked.put(key, -self._depth_of(key))

    used = arrived = noted


class AdaptiveReplacement:
    """ARC (Megiddo, Modha 2003): an LRU list of keys seen once and one of keys seen again; keys that return after their
    eviction shift the balance between the two.

    ARC's capacity in keys is not given by a byte budget: here it is the largest number of keys present so far. The same
    number of evicted keys is remembered.
    """

    def __init__(self) -> None:
        self._once: RankedKeys[int] = RankedKeys()
        self._again: RankedKeys[int] = RankedKeys()
        self._once_gone: OrderedDict[bytes, None] = OrderedDict()
        self._again_gone: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0
        """Target length of the list of keys seen once."""
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
    """A new policy by a name of ``POLICIES``; ``depth_of``: number of blocks before a key.

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
