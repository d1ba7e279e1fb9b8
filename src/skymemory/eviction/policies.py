"""The policies of eviction that a memory or disk tier can have, by name: those of satellites and three more.

They rank; ``store.shelf`` sees to it that a block never goes while one behind it stays, whatever they say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from skymemory.errors import InvalidInput
from skymemory.protocol.ranking import RankedKeys
from skymemory.protocol.replacement import LeastFrequentlyUsedAged, LeastRecentlyUsed, Replacement, replacement_named

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
        first, second = (
            (self._once, self._again) if len(self._once) > self._target else (self._again, self._once)
        )  # fmt: skip
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
        "lfu": LeastFrequentlyUsed, "length": lambda: LengthAware(depth_of), "arc": AdaptiveReplacement
    }  # fmt: skip
    if name not in POLICIES:
        raise InvalidInput(f"policy {name!r}: expected one of {', '.join(POLICIES)}")
    return makers[name]() if name in makers else replacement_named(name)
