"""LRFU (Lee et al. 2001) whose half-life is learned, and which remembers what it evicted.

A key's worth is the sum over its uses of 2^(-age / half-life): the recent ones nearly whole, old ones hardly. A short
half-life is LRU, an endless one LFU. What is right depends on how long people take to come back to a prompt, and that
is measured: the mean number of events from one use of a key to its next, whether or not the key was still here.
Without that memory of the departed a small satellite would only ever see the short returns that its memory spans.
"""

from __future__ import annotations

from collections import OrderedDict

from skymemory.eviction.ranking import RankedKeys

DEPARTED = 16_384
"""Keys remembered after they went, some 5 MB when full."""
_HALF_LIVES = 2.0
"""A half-life, in mean returns."""
_FIRST_RETURN = 1000.0
"""Events: what a return is taken to last before any was seen."""
_FOLLOW = 1 / 1000
"""How far the mean follows each return."""
_MOST = 2.0**900


class LeastRecentlyAndFrequentlyUsed:
    """Worths are as of the beginning: a use now counts 2^(half-lives since then), and nothing changes as time passes.

    That factor grows event by event, each by the half-life of its time, so that all keys age alike. What is noted again
    was last used just now: a touch thus puts a prefix after what was stored behind it, and with as many uses, each as
    late, a prefix never goes before what is behind it.
    """

    def __init__(self, departed: int = DEPARTED) -> None:
        self._worths: RankedKeys[float] = RankedKeys()
        self._uses: dict[bytes, tuple[float, int]] = {}
        """Worth of all uses but the last, and at which event that was."""
        self._departed: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """Worth and event of the last use, who went longest ago first."""
        self._most_departed = departed
        self._events = 0
        self._now = 1.0
        """What a use counts now."""
        self._mean_return = _FIRST_RETURN

    @property
    def half_life(self) -> float:
        """In events: uses, and keys that came."""
        return _HALF_LIVES * self._mean_return

    def noted(self, key: bytes) -> None:
        uses = self._uses.get(key)
        if uses is None:
            self.used(key)
        else:
            self._worths.put(key, uses[0] + self._now)

    def arrived(self, key: bytes) -> None:
        """One use, as of now. What is remembered of it from when it was last here is left out: whatever flies round
        the world in the box would come back to it, again and again, and outrank all that is new.
        """
        if key in self._uses:
            self.noted(key)
        else:
            self._departed.pop(key, None)
            self._uses[key] = (0.0, self._events)
            self._worths.put(key, self._now)

    def used(self, key: bytes) -> None:
        self._events += 1
        self._now *= 2 ** (1 / (_HALF_LIVES * self._mean_return))
        if self._now > _MOST:
            self._begin_anew()
        uses = self._uses.get(key)
        if uses is not None:
            before, at = self._worths.rank(key) or 0.0, uses[1]
        else:
            before, at = self._departed.pop(key, (0.0, -1))
        if at >= 0:
            self._mean_return += _FOLLOW * (self._events - at - self._mean_return)
        self._uses[key] = (before, self._events)
        self._worths.put(key, before + self._now)

    def _begin_anew(self) -> None:
        """The beginning is now, before a float overflows. What is a thousand half-lives old may be worth nothing."""
        scale = 1 / self._now
        self._now = 1.0
        for uses in (self._uses, self._departed):
            for key, (worth, at) in uses.items():
                uses[key] = (worth * scale, at)
        for key in self._worths.order():
            self._worths.put(key, (self._worths.rank(key) or 0.0) * scale)

    def gone(self, key: bytes, evicted: bool = False) -> None:
        worth = self._worths.pop(key)
        if worth is not None:
            self._departed[key] = (worth, self._uses.pop(key)[1])
            if len(self._departed) > self._most_departed:
                self._departed.popitem(last=False)

    def hold(self, key: bytes) -> None:
        self._worths.hold(key)

    def free(self, key: bytes) -> None:
        self._worths.free(key)

    def victim(self, but: bytes | None = None) -> bytes | None:
        return self._worths.first(but)

    def order(self) -> list[bytes]:
        return self._worths.order()
