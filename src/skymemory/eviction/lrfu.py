"""LRFU (Lee et al. 2001) with a learned half-life and a memory of evicted keys.

A key's worth is the sum over its uses of 2^(-age / half-life). A short half-life is LRU, an infinite one LFU. The right
one depends on how long users take to return to a prompt, which is measured: the mean number of events between two uses
of a key, whether or not it was evicted in between. Without the memory of evicted keys a small satellite would only see
returns short enough for its capacity.
"""

from __future__ import annotations

from collections import OrderedDict

from skymemory.eviction.ranking import RankedKeys

DEPARTED = 16_384
"""Evicted keys remembered; about 5 MB when full."""
_HALF_LIVES = 2.0
"""Half-life as a multiple of the mean return."""
_FIRST_RETURN = 1000.0
"""Initial mean return, in events."""
_FOLLOW = 1 / 1000
"""Weight of each return in the mean."""
_MOST = 2.0**900


class LeastRecentlyAndFrequentlyUsed:
    """Worths are relative to the start: a use counts 2^(half-lives since the start), so stored worths need no decay.

    The factor grows with each event, by the half-life at that time, so that all keys age alike. A key that is noted
    again counts as last used now: a touch ranks a prefix above the blocks behind it, and with equal uses a prefix is
    never evicted before what is behind it.
    """

    def __init__(self, departed: int = DEPARTED) -> None:
        self._worths: RankedKeys[float] = RankedKeys()
        self._uses: dict[bytes, tuple[float, int]] = {}
        """Worth of all uses but the last, and the event of the last."""
        self._departed: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """Worth and event of the last use of evicted keys, the oldest first."""
        self._most_departed = departed
        self._events = 0
        self._now = 1.0
        """Worth of a use now."""
        self._mean_return = _FIRST_RETURN

    @property
    def half_life(self) -> float:
        """In events: uses and new keys."""
        return _HALF_LIVES * self._mean_return

    def noted(self, key: bytes) -> None:
        uses = self._uses.get(key)
        if uses is None:
            self.used(key)
        else:
            self._worths.put(key, uses[0] + self._now)

    def arrived(self, key: bytes) -> None:
        """One use, now. Its remembered worth is ignored: keys that orbit with the box would return again and again and
        outrank all new ones.
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
            self._rescale()
        uses = self._uses.get(key)
        if uses is not None:
            before, at = self._worths.rank(key) or 0.0, uses[1]
        else:
            before, at = self._departed.pop(key, (0.0, -1))
        if at >= 0:
            self._mean_return += _FOLLOW * (self._events - at - self._mean_return)
        self._uses[key] = (before, self._events)
        self._worths.put(key, before + self._now)

    def _rescale(self) -> None:
        """Move the reference time to now before a float overflows; keys a thousand half-lives old may become 0."""
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
