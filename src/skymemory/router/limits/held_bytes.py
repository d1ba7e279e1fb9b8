"""Memory that clients share: bytes of request bodies and heads, or of unread responses.

If a holder exceeds its share (``SharedLimit``), the victim is:

1. the incomplete item that made no progress (``PROGRESS_BYTES``) for longest, at least ``SLOW_S``: of the holder, or of
   the holder with most incomplete bytes;
2. else the holder's largest incomplete item.

Without a victim the new bytes are refused: complete requests use the share. All steps take constant time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from skymemory.router.limits.shares import SharedLimit, Shares

Item = TypeVar("Item", bound=Hashable)
SLOW_S = 1.0
PROGRESS_BYTES = 16_384


class Victim(NamedTuple, Generic[Item]):
    """Item to drop. ``is_slow``: it made no progress."""

    item: Item
    is_slow: bool


@dataclass(slots=True)
class _Incomplete(Generic[Item]):
    # Time and bytes of each item's last progress, earliest first.
    marks: dict[Item, tuple[float, int]] = field(default_factory=dict)
    sizes: Shares[Item] = field(default_factory=Shares)


class HeldBytes(Generic[Item]):
    def __init__(self, most_bytes: int) -> None:
        self.limit = SharedLimit(most_bytes)
        self._incomplete: dict[Hashable, _Incomplete[Item]] = {}
        self._holders: Shares[Hashable] = Shares()

    @property
    def held_bytes(self) -> int:
        return self.limit.held

    def track(self, item: Item, holder: Hashable, item_bytes: int, now_s: float) -> None:
        """Record an incomplete item, a possible victim. ``limit.change`` counts its bytes."""
        incomplete = self._incomplete.get(holder)
        if incomplete is None:
            incomplete = self._incomplete[holder] = _Incomplete()
        mark = incomplete.marks.get(item)
        if mark is None or abs(item_bytes - mark[1]) >= PROGRESS_BYTES:
            if mark is not None:
                del incomplete.marks[item]  # to the end
            incomplete.marks[item] = now_s, item_bytes
        more = item_bytes - incomplete.sizes.of(item)
        if more:
            incomplete.sizes.change(item, more)
            self._holders.change(holder, more)

    def untrack(self, item: Item, holder: Hashable) -> None:
        incomplete = self._incomplete.get(holder)
        if incomplete is None or incomplete.marks.pop(item, None) is None:
            return
        item_bytes = incomplete.sizes.of(item)
        if item_bytes:
            incomplete.sizes.change(item, -item_bytes)
            self._holders.change(holder, -item_bytes)
        if not incomplete.marks:
            del self._incomplete[holder]

    def victim(self, holder: Hashable, now_s: float) -> Victim[Item] | None:
        """Return the item to drop so that ``holder`` gets memory; None: refuse its new bytes."""
        for candidate in (holder, self._holders.heaviest()):
            items = self._incomplete.get(candidate)
            if items is not None:
                item, (since_s, _) = next(iter(items.marks.items()))
                if now_s - since_s >= SLOW_S:
                    return Victim(item, True)
        own_items = self._incomplete.get(holder)
        largest = None if own_items is None else own_items.sizes.heaviest()
        return None if largest is None else Victim(largest, False)
