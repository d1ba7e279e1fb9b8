"""Memory that clients share: bytes of request bodies and heads, or of responses that clients do not read.

An incomplete item (a body of which the rest is missing, a response of which the rest is unread) holds memory for as
long as its client likes. Where a holder is beyond its share (``SharedLimit``) an incomplete item of that holder pays:

1. the one that has made no progress for longest, if that is ``SLOW_S``: progress is ``PROGRESS_BYTES``, so that one
   byte now and then is none;
2. else such an item of the holder with the most incomplete bytes;
3. else the largest of its own.

If there is none, the newcomer is refused: its holder has its share in complete requests. All steps take constant time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from skymemory.router.limits.shares import SharedLimit, Shares

Item = TypeVar("Item", bound=Hashable)
SLOW_S = 1.0
"""Without progress for this long an item pays before others."""
PROGRESS_BYTES = 16_384


class Victim(NamedTuple, Generic[Item]):
    item: Item
    is_slow: bool
    """It made no progress; else it is the largest."""


@dataclass(slots=True)
class _Incomplete(Generic[Item]):
    """Of one holder."""

    marks: dict[Item, tuple[float, int]] = field(default_factory=dict)
    """When each item made progress last, the earliest first, and its bytes then."""
    sizes: Shares[Item] = field(default_factory=Shares)


class HeldBytes(Generic[Item]):
    def __init__(self, most_bytes: int) -> None:
        self.limit = SharedLimit(most_bytes)
        self._incomplete: dict[Hashable, _Incomplete[Item]] = {}
        self._holders: Shares[Hashable] = Shares()
        """Incomplete bytes by holder."""

    @property
    def held_bytes(self) -> int:
        return self.limit.held

    def track(self, item: Item, holder: Hashable, item_bytes: int, now_s: float) -> None:
        """An item is incomplete and has this many bytes. They are counted by ``limit.change``."""
        mine = self._incomplete.get(holder)
        if mine is None:
            mine = self._incomplete[holder] = _Incomplete()
        mark = mine.marks.get(item)
        if mark is None or abs(item_bytes - mark[1]) >= PROGRESS_BYTES:
            if mark is not None:
                del mine.marks[item]  # to the end
            mine.marks[item] = now_s, item_bytes
        more = item_bytes - mine.sizes.of(item)
        if more:
            mine.sizes.change(item, more)
            self._holders.change(holder, more)

    def untrack(self, item: Item, holder: Hashable) -> None:
        """An item is complete, or dropped."""
        mine = self._incomplete.get(holder)
        if mine is None or mine.marks.pop(item, None) is None:
            return
        item_bytes = mine.sizes.of(item)
        if item_bytes:
            mine.sizes.change(item, -item_bytes)
            self._holders.change(holder, -item_bytes)
        if not mine.marks:
            del self._incomplete[holder]

    def victim(self, holder: Hashable, now_s: float) -> Victim[Item] | None:
        """The item that pays, where ``limit`` has no room for more of ``holder``; None: the newcomer."""
        for of in (holder, self._holders.heaviest()):
            theirs = self._incomplete.get(of)
            if theirs is not None:
                item, (since_s, _) = next(iter(theirs.marks.items()))
                if now_s - since_s >= SLOW_S:
                    return Victim(item, True)
        mine = self._incomplete.get(holder)
        largest = None if mine is None else mine.sizes.heaviest()
        return None if largest is None else Victim(largest, False)
