"""Amounts by holder, and the holder with the largest amount."""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from functools import lru_cache
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Shares(Generic[Key]):
    """Amounts by key. ``heaviest`` takes constant time and is exact to a factor of two (levels by bit length)."""

    __slots__ = ("_amounts", "_levels", "_occupied")

    def __init__(self) -> None:
        self._amounts: dict[Key, int] = {}
        self._levels: list[dict[Key, None]] = []  # keys by the bit length of their amounts
        self._occupied = 0  # bit mask of the levels with keys

    def of(self, key: Key) -> int:
        return self._amounts.get(key, 0)

    def __len__(self) -> int:
        return len(self._amounts)

    def change(self, key: Key, by: int) -> None:
        before = self._amounts.get(key, 0)
        now = before + by
        if now > 0:
            self._amounts[key] = now
        elif before:
            del self._amounts[key]
        old, new = before.bit_length(), max(0, now).bit_length()
        if old == new:
            return
        if old:
            level = self._levels[old]
            del level[key]
            if not level:
                self._occupied &= ~(1 << old)
        if new:
            while len(self._levels) <= new:
                self._levels.append({})
            self._levels[new][key] = None
            self._occupied |= 1 << new

    def heaviest(self) -> Key | None:
        if not self._occupied:
            return None
        return next(iter(self._levels[self._occupied.bit_length() - 1]))


class SharedLimit:
    """A limit of which a holder may have at most ``PART`` times the free amount (a dynamic threshold).

    A single holder gets four fifths, two get four ninths each.
    """

    PART = 4

    __slots__ = ("_by_holder", "held", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._by_holder: dict[Hashable, int] = {}

    def of(self, holder: Hashable) -> int:
        return self._by_holder.get(holder, 0)

    def has_room(self, holder: Hashable, amount: int = 1) -> bool:
        free = self.most - self.held
        return amount <= free and self._by_holder.get(holder, 0) < self.PART * free

    def add(self, holder: Hashable, amount: int) -> bool:
        """Add an amount even beyond the limit; return True if there was room."""
        free, holder_amount = self.most - self.held, self._by_holder.get(holder, 0)
        self.held += amount
        if holder_amount + amount:
            self._by_holder[holder] = holder_amount + amount
        else:
            self._by_holder.pop(holder, None)
        return amount <= free and holder_amount < self.PART * free

    def take(self, holder: Hashable) -> bool:
        """Add 1 and return True, if there is room."""
        free = self.most - self.held
        holder_amount = self._by_holder.get(holder, 0)
        if free < 1 or holder_amount >= self.PART * free:
            return False
        self.held += 1
        self._by_holder[holder] = holder_amount + 1
        return True

    def change(self, holder: Hashable, by: int) -> None:
        self.held += by
        now = self._by_holder.get(holder, 0) + by
        if now:
            self._by_holder[holder] = now
        else:
            self._by_holder.pop(holder, None)


@lru_cache(maxsize=4096)
def holder_of(address: str) -> str:
    """Return whose share a client uses: its address, or its /64 in IPv6, which a host owns."""
    if ":" not in address:
        return address
    try:
        ipv6 = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if ipv6.ipv4_mapped is not None:
        return str(ipv6.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(ipv6) >> 64 << 64, 64)))
