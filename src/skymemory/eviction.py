"""Eviction policies: the order in which a full memory evicts keys.

Satellites use ``REPLACEMENTS``; memory and disk ``POLICIES``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from skymemory.errors import InvalidInput

REPLACEMENTS = ("lru", "lfuda", "lrfu")
DEFAULT_REPLACEMENT = "lrfu"


class Replacement(Protocol):
    """Contract of a policy; each has a naive twin in ``tests/eviction/test_policies.py``."""

    def on_store_or_touch(self, key: bytes) -> None:
        """Record a store or touch, not a use: the key becomes the newest of its rank."""

    def on_use(self, key: bytes) -> None:
        """Record a request of the key."""

    def on_handover(self, key: bytes) -> None:
        """Record a handover: keys arrive in their previous order, the next victim first, and are no returns."""

    def on_removal(self, key: bytes, evicted: bool = False) -> None:
        """Record a removal (``evicted``: as the victim); unknown keys are ignored."""

    def hold(self, key: bytes) -> None:
        """Exclude the key from ``victim`` until freed or removed."""

    def free(self, key: bytes) -> None: ...

    def victim(self, but: bytes | None = None) -> bytes | None:
        """Return the next key to evict, not held nor ``but``."""

    def order(self) -> list[bytes]:
        """Return all keys, also held, the next victim first."""


Rank = TypeVar("Rank", int, float)


class RankedKeys(Generic[Rank]):
    """Heap, rebuilt when three in four entries are stale."""

    def __init__(self) -> None:
        self._ranks: dict[bytes, tuple[Rank, int]] = {}
        self._heap: list[tuple[Rank, int, bytes]] = []
        """Rank, stamp, key; stale for held or removed keys."""
        self._held: set[bytes] = set()
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, key: bytes) -> Rank | None:
        known = self._ranks.get(key)
        return None if known is None else known[0]

    def put(self, key: bytes, rank: Rank) -> None:
        """Insert the key or change its rank, as the newest of the rank."""
        self._stamp += 1
        self._ranks[key] = (rank, self._stamp)
        if key not in self._held:
            self._push(key)

    def _push(self, key: bytes) -> None:
        rank, stamp = self._ranks[key]
        heapq.heappush(self._heap, (rank, stamp, key))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [
                (rank, stamp, ranked_key)
                for ranked_key, (rank, stamp) in self._ranks.items()
                if ranked_key not in self._held
            ]
            heapq.heapify(self._heap)

    def hold(self, key: bytes) -> None:
        """Exclude a present or later key from ``first``."""
        self._held.add(key)

    def free(self, key: bytes) -> None:
        if key in self._held:
            self._held.discard(key)
            if key in self._ranks:
                self._push(key)

    def holds(self, key: bytes) -> bool:
        return key in self._held

    def pop(self, key: bytes) -> Rank | None:
        self._held.discard(key)
        known = self._ranks.pop(key, None)
        return None if known is None else known[0]

    def first(self, but: bytes | None = None) -> bytes | None:
        # Stale entries are dropped on the way; ``but``, if it comes first, is put back at the end.
        lowest, spared = None, None
        while self._heap and lowest is None:
            rank, stamp, key = self._heap[0]
            if key not in self._held and self._ranks.get(key) == (rank, stamp):
                if key != but:
                    lowest = key
                    break
                spared = self._heap[0]
            heapq.heappop(self._heap)
        if spared is not None:
            heapq.heappush(self._heap, spared)
        return lowest

    def order(self) -> list[bytes]:
        return sorted(self._ranks, key=lambda key: self._ranks[key])


class _ByRank:
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
    def on_store_or_touch(self, key: bytes) -> None:
        self._ranked.put(key, 0)

    on_use = on_handover = on_store_or_touch

    def on_removal(self, key: bytes, evicted: bool = False) -> None:
        self._ranked.pop(key)


class LeastFrequentlyUsedAged(_ByRank):
    """LFU with dynamic aging (Arlitt et al. 1999): rank = uses + rank of the last victim when last seen.

    A parent is requested with each of its children, so its rank is never lower.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[bytes, int] = {}
        self._age = 0

    def on_store_or_touch(self, key: bytes) -> None:
        self._rank(key, self._uses.get(key, 1))

    def on_handover(self, key: bytes) -> None:
        self.on_store_or_touch(key)

    def on_use(self, key: bytes) -> None:
        self._rank(key, self._uses.get(key, 0) + 1)

    def _rank(self, key: bytes, uses: int) -> None:
        self._uses[key] = uses
        self._ranked.put(key, self._age + uses)

    def on_removal(self, key: bytes, evicted: bool = False) -> None:
        rank = self._ranked.pop(key)
        if rank is not None:
            del self._uses[key]
            if evicted:
                self._age = max(self._age, rank)


# --- LRFU (Lee et al. 2001), with a learned half-life and a memory of evicted keys ---
#
# A key's worth is the sum over its uses of 2^(-age / half-life). A short half-life is LRU, an infinite half-life LFU.
# The right value depends on how long users take to return to a prompt. That is measured: the mean number of events
# between two uses of a key, even if it was evicted in between. Without the memory of evicted keys a small satellite
# would only see returns short enough for its capacity.
#
# The latest stored or used keys are safe, at any worth. Otherwise a newcomer, with a single use, would be the next
# victim as long as all others have two: if each block is stored by one engine and read by another a moment later, a
# full memory would keep no block until its reader came.

DEPARTED = 16_384
"""Evicted keys remembered; about 5 MB."""
RECENT = 0.25
"""Share of keys that are safe."""
_HALF_LIVES = 2.0
"""Half-life in mean returns."""
_FIRST_RETURN = 1000.0
"""Initial mean, in events."""
_FOLLOW = 1 / 1000
_MOST = 2.0**900
"""Limit of a worth; then all are rescaled."""


class LeastRecentlyAndFrequentlyUsed:
    """LRFU. A use counts 2^(half-lives since the start), so stored worths need no decay.

    A touched key counts as last used now: with equal uses a prefix is never evicted before its successors.
    """

    def __init__(self, departed: int = DEPARTED) -> None:
        self._worths: RankedKeys[float] = RankedKeys()
        self._uses: dict[bytes, tuple[float, int]] = {}
        """Worth of earlier uses, and event of the last."""
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        """Safe keys, the latest last."""
        self._held: set[bytes] = set()
        self._departed: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """Worth and last event, the oldest first."""
        self._most_departed = departed
        self._events = 0
        self._now = 1.0
        self._mean_return = _FIRST_RETURN

    @property
    def half_life(self) -> float:
        """Return the half-life in events."""
        return _HALF_LIVES * self._mean_return

    def on_store_or_touch(self, key: bytes) -> None:
        uses = self._uses.get(key)
        if uses is None:
            self.on_use(key)
        else:
            self._set_worth(key, uses[0] + self._now)

    def on_handover(self, key: bytes) -> None:
        """Record a single use, now. A remembered worth is ignored: keys that orbit with the box would outrank new
        keys.
        """
        if key in self._uses:
            self.on_store_or_touch(key)
        else:
            self._departed.pop(key, None)
            self._uses[key] = (0.0, self._events)
            self._set_worth(key, self._now)

    def on_use(self, key: bytes) -> None:
        # Instead of decaying all worths, a use counts more the later it is: ``_now`` doubles with each half-life.
        self._events += 1
        self._now *= 2 ** (1 / (_HALF_LIVES * self._mean_return))
        if self._now > _MOST:
            self._rescale()
        uses = self._uses.get(key)
        if uses is not None:
            before, at = self._worths.rank(key) or 0.0, uses[1]
        else:
            before, at = self._departed.pop(key, (0.0, -1))
        if at >= 0:
            self._mean_return += _FOLLOW * (self._events - at - self._mean_return)
        self._uses[key] = (before, self._events)
        self._set_worth(key, before + self._now)

    def _set_worth(self, key: bytes, worth: float) -> None:
        self._worths.hold(key)
        self._worths.put(key, worth)
        self._recent[key] = None
        self._recent.move_to_end(key)
        while len(self._recent) > max(1.0, RECENT * len(self._uses)):
            older = self._recent.popitem(last=False)[0]
            if older not in self._held:
                self._worths.free(older)

    def _rescale(self) -> None:
        """Rescale before a float overflows."""
        scale = 1 / self._now
        self._now = 1.0
        for uses in (self._uses, self._departed):
            for key, (worth, at) in uses.items():
                uses[key] = (worth * scale, at)
        for key in self._worths.order():
            self._worths.put(key, (self._worths.rank(key) or 0.0) * scale)

    def on_removal(self, key: bytes, evicted: bool = False) -> None:
        worth = self._worths.pop(key)
        if worth is not None:
            self._recent.pop(key, None)
            self._held.discard(key)
            self._departed[key] = (worth, self._uses.pop(key)[1])
            if len(self._departed) > self._most_departed:
                self._departed.popitem(last=False)

    def hold(self, key: bytes) -> None:
        self._held.add(key)
        self._worths.hold(key)

    def free(self, key: bytes) -> None:
        self._held.discard(key)
        if key not in self._recent:
            self._worths.free(key)

    def victim(self, but: bytes | None = None) -> bytes | None:
        key = self._worths.first(but)
        if key is None:  # only recent or held keys
            key = next((key for key in self._recent if key != but and key not in self._held), None)
        return key

    def order(self) -> list[bytes]:
        return [*(key for key in self._worths.order() if key not in self._recent), *self._recent]


_MAKERS: dict[str, Callable[[], Replacement]] = {
    "lru": LeastRecentlyUsed,
    "lfuda": LeastFrequentlyUsedAged,
    "lrfu": LeastRecentlyAndFrequentlyUsed,
}


def replacement_named(name: str) -> Replacement:
    return _MAKERS[name]()


POLICIES = ("lru", "lfu", "lfuda", "length", "arc", "lrfu")
DEFAULT_POLICY = "lrfu"
"""Best policy on the trace: ``benchmarks/policies.py``."""


class LeastFrequentlyUsed(LeastFrequentlyUsedAged):
    """LFU without aging; of equals the oldest."""

    def on_removal(self, key: bytes, evicted: bool = False) -> None:
        super().on_removal(key)  # aging needs ``evicted``


class LengthAware(LeastRecentlyUsed):
    """Longest prefix first, of equals the least recent."""

    def __init__(self, depth_of: Callable[[bytes], int]) -> None:
        super().__init__()
        self._depth_of = depth_of

    def on_store_or_touch(self, key: bytes) -> None:
        self._ranked.put(key, -self._depth_of(key))

    on_use = on_handover = on_store_or_touch


class AdaptiveReplacement:
    """ARC (Megiddo, Modha 2003): an LRU list of keys seen once and another of keys seen again.

    A byte budget gives no capacity in keys: here it is the largest number of keys so far.
    """

    def __init__(self) -> None:
        self._once: RankedKeys[int] = RankedKeys()
        self._again: RankedKeys[int] = RankedKeys()
        self._once_gone: OrderedDict[bytes, None] = OrderedDict()
        self._again_gone: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0
        self._capacity = 0

    def on_store_or_touch(self, key: bytes) -> None:
        if self._once.rank(key) is not None:
            self._once.put(key, 0)
        elif self._again.rank(key) is not None:
            self._again.put(key, 0)
        else:
            self._insert(key)

    def on_handover(self, key: bytes) -> None:
        self.on_store_or_touch(key)

    def on_use(self, key: bytes) -> None:
        if self._once.rank(key) is None:
            self.on_store_or_touch(key)
            return
        if self._once.holds(key):
            self._again.hold(key)
        self._once.pop(key)
        self._again.put(key, 0)

    def _insert(self, key: bytes) -> None:
        # A key that returns after its eviction shows which list was too short: that list's share grows, by more if
        # few keys of that kind are remembered.
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

    def on_removal(self, key: bytes, evicted: bool = False) -> None:
        was_once = self._once.pop(key) is not None
        if not was_once and self._again.pop(key) is None:
            return
        if evicted:
            (self._once_gone if was_once else self._again_gone)[key] = None
        while self._once_gone and len(self._once) + len(self._once_gone) > self._capacity:
            self._once_gone.popitem(last=False)
        present = len(self._once) + len(self._again)
        while self._again_gone and present + len(self._once_gone) + len(self._again_gone) > 2 * self._capacity:
            self._again_gone.popitem(last=False)

    def hold(self, key: bytes) -> None:
        (self._once if self._once.rank(key) is not None else self._again).hold(key)

    def free(self, key: bytes) -> None:
        self._once.free(key)
        self._again.free(key)

    def victim(self, but: bytes | None = None) -> bytes | None:
        first, second = (self._once, self._again) if len(self._once) > self._target else (self._again, self._once)
        key = first.first(but)
        return second.first(but) if key is None else key

    def order(self) -> list[bytes]:
        once, again = self._once.order()[::-1], self._again.order()[::-1]
        victims: list[bytes] = []
        while once or again:
            victims.append((once if once and (len(once) > self._target or not again) else again).pop())
        return victims


def policy_named(name: str, depth_of: Callable[[bytes], int] = lambda key: 0) -> Replacement:
    """Return a new policy; ``depth_of``: blocks before a key.

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
